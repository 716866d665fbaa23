"""One HTML file that shows a comparison of text strategies: conditions, table, and every prompt's answers."""

from __future__ import annotations

from difflib import SequenceMatcher
from html import escape

from cachedit.evaluate.answer import Answer
from cachedit.evaluate.document import document, head
from cachedit.evaluate.text_comparison import TextComparison, TextRow
from cachedit.evaluate.text_table import caption, header, table_cells, told

SHOWN = 16  # prompts with answers; a page of all of them would be long
BARS = (720, 120)  # size of a chart


def render(comparison: TextComparison, title: str) -> str:
    """The page as HTML. It holds its style, and loads nothing.

    Args:
        comparison: what was measured.
        title: of the page.
    """
    order = comparison.worst_first()
    more = f" The first {SHOWN} of {len(order)} are shown." if len(order) > SHOWN else ""
    cells = [table_cells(comparison, row) for row in comparison.rows]
    body = f"""{head(comparison.conditions, header(comparison), cells, caption(comparison))}
<h2>Tokens computed by every step</h2>
<p class="caption">Of the first prompt. A bar as high as the chart is a step that computes all tokens.</p>
{"".join(_row(row) for row in comparison.rows)}
<h2>Answers, least like the baseline first</h2>
<p class="caption">What differs from the baseline's answer is marked.{more}</p>
{"".join(_prompt(comparison, index) for index in order[:SHOWN])}"""
    return document(title, body)


def chart(computed: list[int], most: int, name: str) -> str:
    """A bar for every step, as high as many tokens it computed, as an SVG element.

    Args:
        computed: tokens that each step computed.
        most: those of a step that computes all.
        name: what the chart is of.
    """
    width, height = BARS
    step = width / max(len(computed), 1)
    bars = "".join(
        f'<rect x="{i * step:.1f}" y="{height - height * count / most:.1f}" width="{max(step - 1, 0.5):.1f}" '
        f'height="{height * count / most:.1f}"/>'
        for i, count in enumerate(computed)
    )
    mean = sum(computed) / max(len(computed), 1)
    text = f"{name}: {len(computed)} steps compute {mean:.1f} tokens each on average, of {most}"
    return (
        f'<svg class="bars" viewBox="0 0 {width} {height}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(text)}"><title>{escape(text)}</title>{bars}</svg>'
    )


def _row(row: TextRow) -> str:
    """The chart of a configuration, its options, and what its numbers would hide."""
    run = row.answers[0].run
    if run is None:
        return ""
    computed = [step.computed for step in run.steps]
    most = max([*computed, *(step.total for step in run.steps)])
    options = f'<br><span class="caption">{escape(row.configuration)}</span>' if row.configuration else ""
    note = f'<p class="note">{escape(row.strategy)}: {escape(row.note)}</p>' if row.note else ""
    return f"<p>{escape(row.strategy)}{options}</p>{chart(computed, most, row.strategy)}{note}"


def _prompt(comparison: TextComparison, index: int) -> str:
    asked = comparison.baseline.answers[index]
    seeded = any(other.prompt == asked.prompt for other in comparison.baseline.answers if other is not asked)
    heading = escape(asked.prompt) + (f", seed {asked.seed}" if seeded else "")
    parts = [
        f'<figure><pre tabindex="0">{_marked(row.answers[index], asked)}</pre>'
        f"<figcaption>{escape(_caption(row, index))}</figcaption></figure>"
        for row in comparison.rows
    ]
    return f'<section><h3>{heading}</h3><div class="answers">{"".join(parts)}</div></section>'


def _caption(row: TextRow, index: int) -> str:
    words = told(row.answers[index])
    return f"{row.strategy}: {words}" if words else row.strategy


def _marked(answer: Answer, asked: Answer) -> str:
    """The answer, with what is not in the baseline's in marks."""
    parts = []
    for kind, _, _, start, end in SequenceMatcher(None, asked.text, answer.text, autojunk=False).get_opcodes():
        text = escape(answer.text[start:end])
        parts.append(text if kind == "equal" or not text else f"<mark>{text}</mark>")
    return "".join(parts)
