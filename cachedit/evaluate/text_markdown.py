"""A comparison of text strategies as Markdown: conditions, table, what is to be said, and the prompts, worst first."""

from __future__ import annotations

from collections.abc import Iterator

from cachedit.evaluate.markdown import head_lines, plain, table_lines
from cachedit.evaluate.text_comparison import TextComparison
from cachedit.evaluate.text_table import MARKS, caption, header, table_cells, told

WRITTEN = 3  # prompts whose answers are written out; report.json has all


def render_markdown(comparison: TextComparison, title: str) -> str:
    """The text.

    Args:
        comparison: what was measured.
        title: of the text.
    """
    return "\n".join(_lines(comparison, title)) + "\n"


def _lines(comparison: TextComparison, title: str) -> Iterator[str]:
    rows = [table_cells(comparison, row) for row in comparison.rows]
    yield from head_lines(title, comparison.conditions, header(comparison), rows, caption(comparison))
    for row in comparison.cached:
        yield f"- {plain(row.strategy)}: {row.strip} ({MARKS}); {plain(row.configuration)}"
        if row.note:
            yield f"- **{plain(row.strategy)}: {plain(row.note)}**"
    yield "\n## Prompts, least like the baseline first\n"
    order = comparison.worst_first()
    cells = []
    for index in order:
        asked = comparison.baseline.answers[index]
        cells.append([asked.prompt, str(asked.seed), *(told(row.answers[index]) for row in comparison.rows)])
    yield from table_lines(["prompt", "seed", *(row.strategy for row in comparison.rows)], cells)
    for index in order[:WRITTEN]:
        yield f"\n{plain(comparison.baseline.answers[index].prompt)}"
        for row in comparison.rows:
            text = row.answers[index].text
            fence = "`" * max(3, _longest_run(text) + 1)
            yield f"\n{plain(row.strategy)}:\n\n{fence}text\n{text}\n{fence}"


def _longest_run(text: str) -> int:
    """Length of the longest row of backquotes, which would end a fence."""
    longest = run = 0
    for letter in text:
        run = run + 1 if letter == "`" else 0
        longest = max(longest, run)
    return longest
