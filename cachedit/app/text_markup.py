"""A decoding as HTML: its tokens, where each came from, and how many every step computed. All text is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from cachedit.app import markup
from cachedit.evaluate.text_comparison import TextComparison
from cachedit.evaluate.text_page import chart
from cachedit.evaluate.text_table import header, table_cells, told

MASKED = "·"
LEGEND = (
    ("computed", "computed in this step"),
    ("cached", "keys and values from the cache"),
    ("new", "decided in this step"),
    ("masked", f"{MASKED} not yet decided"),
)


@dataclass(frozen=True)
class View:
    """A sequence after a step; one entry per token, the prompt included.

    Attributes:
        pieces: what the token says.
        masked: True if it is not yet decided.
        computed: True if the step computed its keys and values.
        committed: True if the step decided it.
        prompt_length: number of tokens before the answer.
    """

    pieces: Sequence[str]
    masked: Sequence[bool]
    computed: Sequence[bool]
    committed: Sequence[bool]
    prompt_length: int


def tokens(view: View, step: int) -> str:
    """Prompt and answer, each token marked by where its keys and values are from.

    Args:
        view: what is shown.
        step: number of the step, from 0.
    """
    count = len(view.pieces)
    parts = [
        _part("Prompt", view, range(view.prompt_length)),
        _part("Answer", view, range(view.prompt_length, count)),
    ]
    legend = "".join(f'<li><span class="ce-token {kind}">a</span> {escape(text)}</li>' for kind, text in LEGEND)
    said = f"Step {step + 1}: {sum(view.computed)} of {count} tokens computed, {sum(view.masked)} not yet decided."
    return f'{"".join(parts)}<p class="ce-marks">{said}</p><ul class="ce-legend">{legend}</ul>'


def steps(computed: list[int], most: int, name: str) -> str:
    """How many tokens every step computed so far, as a chart.

    Args:
        computed: of each step.
        most: of a step that computes all.
        name: of the strategy.
    """
    text = "Tokens computed by every step; a bar as high as the chart is a step that computes all"
    return f'<p class="ce-caption">{escape(text)}</p><div class="ce-bars">{chart(computed, most, name)}</div>'


def result(measured: TextComparison) -> str:
    """A cache beside the baseline on one prompt: table, answers, and what the numbers would hide."""
    baseline, row = measured.rows
    bare, cached = baseline.answers[0], row.answers[0]
    cells = [table_cells(measured, one) for one in measured.rows]
    parts = [markup.table(header(measured), cells, "One call each; the report repeats calls and takes medians")]
    if bare.text == cached.text:
        parts.append('<p class="ce-detail">Both answers are the same.</p>')
    else:
        parts.append(f'<p class="ce-note">{escape(told(cached))}; without a cache the answer is:</p>')
        parts.append(f'<pre class="ce-answer">{escape(bare.text)}</pre>')
    if row.speedup < 1:
        parts.append(f'<p class="ce-note">{escape(row.note)}</p>')
    parts.append(f'<p class="ce-detail">{escape(row.configuration)}</p>')
    return "\n".join(parts)


def _part(name: str, view: View, places: range) -> str:
    spans = "".join(
        f'<span class="{_kinds(view, i)}">{MASKED if view.masked[i] else _visible(view.pieces[i])}</span>'
        for i in places
    )
    return f'<p class="ce-caption">{name}</p><div class="ce-tokens" role="group" aria-label="{name}">{spans}</div>'


def _kinds(view: View, i: int) -> str:
    """The classes of a token."""
    named = {"masked": view.masked[i], "new": view.committed[i]}
    kinds = [kind for kind, wanted in named.items() if wanted]
    return " ".join(["ce-token", "computed" if view.computed[i] else "cached", *kinds])


def _visible(piece: str) -> str:
    """A token's text, in which also a line break can be seen."""
    return escape(piece).replace("\n", "↵\n") or " "
