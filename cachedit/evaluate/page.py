"""One HTML file that shows a comparison: conditions, table, and every prompt's pictures side by side."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from torch import Tensor

from cachedit.evaluate.comparison import Comparison, Row, Shot
from cachedit.evaluate.pictures import LOSSLESS_SIDE, data_uri, difference
from cachedit.evaluate.table import CAPTION, condition_lines, expectation, header, table_cells

GAIN = 5.0
"""How many times brighter differences are drawn; the same for every picture, so that they can be compared."""

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --mark: #0a7d5a; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; } h3 { font-size: 1rem; margin: 1.4rem 0 .3rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; }
th, td { padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 0; }
dt { opacity: .7; } dd { margin: 0; overflow-wrap: anywhere; }
.note { border-left: 3px solid #c60; padding-left: .7rem; }
.caption, figcaption { font-size: .85rem; opacity: .75; }
.shots { display: flex; flex-wrap: wrap; gap: .8rem; }
figure { margin: 0; width: min(100%, 220px); }
figure img { width: 100%; display: block; background: var(--soft); }
img.small { image-rendering: pixelated; }
.strip { font-family: ui-monospace, monospace; letter-spacing: .05em; color: var(--mark); overflow-wrap: anywhere; }
"""


def render(comparison: Comparison, title: str = "cachedit demo") -> str:
    """The page as HTML. It holds its pictures and its style, and loads nothing.

    Args:
        comparison: what was measured.
        title: of the page.
    """
    conditions = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in condition_lines(comparison.conditions)
    )
    prompts = "".join(_prompt(comparison, index) for index in comparison.worst_first())
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<h2>Conditions</h2>
<dl>{conditions}</dl>
<h2>Result</h2>
{_table(comparison)}
<p class="caption">{escape(CAPTION)}</p>
{"".join(_summary(row) for row in comparison.cached)}
<h2>Pictures, lowest PSNR first</h2>
<p class="caption">{escape(_legend(comparison))}</p>
{prompts}
</body>
</html>
"""


def _table(comparison: Comparison) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in header(comparison))
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in table_cells(comparison, row)) + "</tr>"
        for row in comparison.rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _summary(row: Row) -> str:
    """The strip of a configuration, what it expected, and what its numbers would hide."""
    note = f'<p class="note">{escape(row.strategy)}: {escape(row.note)}</p>' if row.note else ""
    lines = [f'{escape(row.strategy)} <span class="strip">{row.strip}</span>']
    if row.expected:
        lines.append(f"expected {escape(expectation(row.expected))}")
    lines.append(f'<span class="caption">{escape(row.configuration)}</span>')
    return f"<p>{'<br>'.join(lines)}</p>{note}"


def _legend(comparison: Comparison) -> str:
    texts = [f"■ computed step, □ reused step. Differences to the baseline are drawn {GAIN:g} times brighter."]
    picture = _picture(comparison.baseline.shots[0])
    count = len(_pictures(comparison.baseline.shots[0]))
    if count > 1:
        texts.append(f"The middle one of {count} frames is shown; the numbers are means over all.")
    if max(picture.shape[1:]) > LOSSLESS_SIDE:
        texts.append("Pictures are shown as JPEG; the numbers come from the exact pixels.")
    return " ".join(texts)


def _prompt(comparison: Comparison, index: int) -> str:
    reference = comparison.baseline.shots[index]
    parts = [f"<h3>{escape(reference.prompt)}</h3>"]
    for row in comparison.cached:
        shot = row.shots[index]
        bare, cached = _picture(reference), _picture(shot)
        figures = [
            _figure(bare, "baseline"),
            _figure(cached, f"{row.strategy}: {_quality(shot)}"),
            _figure(difference(bare, cached, GAIN), f"difference x {GAIN:g}"),
        ]
        parts.append(f'<div class="shots">{"".join(figures)}</div><p class="strip">{shot.strip}</p>')
    return f"<section>{''.join(parts)}</section>"


def _quality(shot: Shot) -> str:
    if shot.identical:
        return "identical to the baseline"
    named: Sequence[tuple[str, float | None, str]] = (
        ("PSNR", shot.psnr, ".1f"),
        ("SSIM", shot.ssim, ".3f"),
        ("st-lpips", shot.st_lpips, ".3f"),
    )
    return ", ".join(f"{name} {value:{form}}" for name, value, form in named if value is not None)


def _figure(picture: Tensor, caption: str) -> str:
    small = ' class="small"' if max(picture.shape[1:]) <= LOSSLESS_SIDE else ""
    alt = escape(caption, quote=True)
    return f'<figure><img{small} src="{data_uri(picture)}" alt="{alt}"><figcaption>{alt}</figcaption></figure>'


def _pictures(shot: Shot) -> Tensor:
    assert shot.pictures is not None
    return shot.pictures


def _picture(shot: Shot) -> Tensor:
    """The one picture ``[3, H, W]`` that stands for a shot: the middle frame."""
    pictures = _pictures(shot)
    return pictures[len(pictures) // 2]
