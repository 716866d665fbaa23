"""One HTML file that shows a comparison: conditions, table, plot, and every prompt's pictures, the worst first."""

from __future__ import annotations

from html import escape

from torch import Tensor

from cachedit.evaluate.comparison import Comparison, Row, Shot, told
from cachedit.evaluate.document import document, head, region
from cachedit.evaluate.figures import LARGEST_SIDE, LOSSLESS_SIDE, figure, film, player, shown_frames
from cachedit.evaluate.frame_plot import frame_plot
from cachedit.evaluate.page_style import PLAYER
from cachedit.evaluate.pictures import difference
from cachedit.evaluate.plot import draw_plot, undrawn
from cachedit.evaluate.rollouts import in_words
from cachedit.evaluate.table import caption, expectation, header, missing, table_cells

GAIN = 5.0
"""How many times brighter differences are drawn; the same for every picture, so that they can be compared."""

SHOWN = 16  # prompts with pictures; a page of all of them would take long to open


def render(comparison: Comparison, title: str = "cachedit demo") -> str:
    """The page as HTML. It holds its pictures and its style, and loads nothing.

    Args:
        comparison: what was measured.
        title: of the page.
    """
    order = comparison.worst_first()
    prompts = "".join(_prompt(comparison, index) for index in order[:SHOWN])
    cells = [table_cells(comparison, row) for row in comparison.rows]
    body = f"""{head(comparison.conditions, header(comparison), cells, caption(comparison))}
{"".join(f'<p class="note">{escape(line)}</p>' for line in missing(comparison))}
{"".join(_summary(row) for row in comparison.rows if row.configuration or row.note)}
{_plot(comparison)}
<h2>Pictures, lowest PSNR first</h2>
<p class="caption">{escape(_legend(comparison))}</p>
{prompts}"""
    return document(title, body, PLAYER if _is_video(comparison) else "")


def _summary(row: Row) -> str:
    """The strip of a configuration, what it expected, and what its numbers would hide."""
    note = f'<p class="note">{escape(row.strategy)}: {escape(row.note)}</p>' if row.note else ""
    lines = [f"{escape(row.strategy)} {_strip(row.strip)}"]
    if row.expected:
        lines.append(f"expected {escape(expectation(row.expected))}")
    if row.rollout:
        lines.append(escape(in_words(row.rollout)))
    if row.configuration:
        lines.append(f'<span class="caption">{escape(row.configuration)}</span>')
    return f"<p>{'<br>'.join(lines)}</p>{note}" if row.strip or row.rollout else note


def _strip(strip: str) -> str:
    """The marks, with their meaning in words for whoever does not see them."""
    if not strip:
        return ""
    text = f"{strip.count('■')} of {len(strip)} steps computed"
    return f'<span class="strip" role="img" aria-label="{text}" title="{text}">{strip}</span>'


def _plot(comparison: Comparison) -> str:
    drawing = draw_plot(comparison)
    if not drawing:
        return ""
    texts = ["Each point is the mean over the prompts, the line under it reaches down to the worst one."]
    if undrawn(comparison):
        texts.append(f"Without a finite PSNR, and so not drawn: {', '.join(undrawn(comparison))}.")
    shown = region("Plot", drawing)
    return f'<h2>Speed and quality</h2>{shown}<p class="caption">{escape(" ".join(texts))}</p>'


def _legend(comparison: Comparison) -> str:
    texts = ["■ computed step, □ reused step."] if any(row.strip for row in comparison.cached) else []
    texts.append(f"Differences to the baseline are drawn {GAIN:g} times brighter.")
    shots = comparison.baseline.shots
    pictures = shots[0].look()
    if _is_video(comparison) and len(shown_frames(len(pictures))) < len(pictures):
        texts.append(f"{len(shown_frames(len(pictures)))} of {len(pictures)} frames are shown.")
    elif len(pictures) > 1 and not _is_video(comparison):
        texts.append(f"The middle one of {len(pictures)} pictures is shown.")
    if len(pictures) > 1:
        texts.append("The numbers are means over all.")
    if max(pictures.shape[2:]) > LOSSLESS_SIDE:
        texts.append(
            f"Pictures are shown as JPEG of at most {LARGEST_SIDE} pixels; the numbers come from the exact ones."
        )
    if len(shots) > SHOWN:
        texts.append(f"The {SHOWN} worst of {len(shots)} are shown.")
    return " ".join(texts)


def _prompt(comparison: Comparison, index: int) -> str:
    reference = comparison.baseline.shots[index]
    seeded = any(shot.prompt == reference.prompt for shot in comparison.baseline.shots if shot is not reference)
    heading = escape(reference.prompt) + (f", seed {reference.seed}" if seeded else "")
    parts = [f"<h3>{heading}</h3>"]
    bare = reference.look()
    if reference.video:
        parts.append(player(len(shown_frames(len(bare))), reference.prompt))
    parts.append('<div class="caches">')
    for row in comparison.cached:
        shot = row.shots[index]
        quality = told(shot.quality, comparison.metrics, shot.identical)
        captions = [_named(comparison, reference), f"{row.strategy}: {quality}", f"difference x {GAIN:g}"]
        looks = _looks(bare, shot.look(), reference.video)
        draw = film if reference.video else figure
        drawn = [draw(look, text) for look, text in zip(looks, captions, strict=True)]
        under = f"<p>{_strip(shot.strip)}</p>" if shot.strip else ""
        if reference.video:
            under += region("PSNR of each frame", frame_plot(shot.look(), bare, row.strategy))
        parts.append(f'<div><div class="shots">{"".join(drawn)}</div>{under}</div>')
    return f"<section>{''.join(parts)}</div></section>"


def _named(comparison: Comparison, shot: Shot) -> str:
    """The baseline, and what was measured of it by itself."""
    quality, name = told(shot.quality, comparison.metrics), comparison.baseline.strategy
    return f"{name}: {quality}" if quality else name


def _looks(bare: Tensor, cached: Tensor, video: bool) -> list[Tensor]:
    """Baseline, cached and difference: the frames to show, or the one picture that stands for all."""
    places = shown_frames(len(bare)) if video else [len(bare) // 2]
    a, b = bare[places], cached[places]
    return [a, b, difference(a, b, GAIN)]


def _is_video(comparison: Comparison) -> bool:
    return comparison.baseline.shots[0].video
