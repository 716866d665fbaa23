"""A comparison as Markdown: conditions, table, what is to be said, and the prompts, worst first."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cachedit.evaluate.comparison import Comparison, Row, told
from cachedit.evaluate.rollouts import in_words
from cachedit.evaluate.table import caption, condition_lines, expectation, header, missing, table_cells

PICTURED = 3  # prompts whose pictures are shown; the others are in their folder


def render_markdown(comparison: Comparison, folder: Path, title: str) -> str:
    """The text.

    Args:
        comparison: what was measured.
        folder: in which the text will lie; pictures are linked from there.
        title: of the text.
    """
    return "\n".join(_lines(comparison, folder, title)) + "\n"


def _lines(comparison: Comparison, folder: Path, title: str) -> Iterator[str]:
    cells = [table_cells(comparison, row) for row in comparison.rows]
    yield from head_lines(title, comparison.conditions, header(comparison), cells, caption(comparison))
    yield from (f"- {plain(line)}" for line in missing(comparison))
    for row in comparison.rows:
        yield from (f"- {line}" for line in _said(row))
    yield "\n## Prompts, lowest PSNR first\n"
    names = ["prompt", "seed", *(row.strategy for row in comparison.cached)]
    order = comparison.worst_first()
    prompts = []
    for index in order:
        shot = comparison.baseline.shots[index]
        others = [row.shots[index] for row in comparison.cached]
        judged = [told(other.quality, comparison.metrics, other.identical) for other in others]
        prompts.append([shot.prompt, str(shot.seed), *judged])
    yield from table_lines(names, prompts)
    for index in order[:PICTURED]:
        files = [(row.strategy, row.shots[index].file) for row in comparison.rows]
        if all(file is not None and file.is_relative_to(folder) for _, file in files):
            yield f"\n{plain(comparison.baseline.shots[index].prompt)}\n"
            links = [f"![{plain(name)}]({file.relative_to(folder).as_posix()})" for name, file in files if file]
            yield from table_lines([name for name, _ in files], [links], escaped=True)


def _said(row: Row) -> Iterator[str]:
    name = plain(row.strategy)
    if row.strip:
        yield f"{name}: {row.strip} (■ computed, □ reused); {plain(row.configuration)}"
    if row.rollout:
        yield f"{name}: {plain(in_words(row.rollout))}; {plain(row.configuration)}"
    if row.expected:
        yield f"{name} expected {plain(expectation(row.expected))}"
    if row.note:
        yield f"**{name}: {plain(row.note)}**"


def head_lines(
    title: str, conditions: dict[str, Any], names: list[str], rows: list[list[str]], caption: str
) -> Iterator[str]:
    """What every report begins with: title, conditions, and the table with what its columns mean."""
    yield f"# {title}\n"
    yield "## Conditions\n"
    yield from table_lines(["condition", "value"], [list(line) for line in condition_lines(conditions)])
    yield "\n## Result\n"
    yield from table_lines(names, rows)
    yield f"\n{caption}\n"


def table_lines(names: list[str], rows: list[list[str]], escaped: bool = False) -> Iterator[str]:
    """A table, line by line; cells that are Markdown themselves are ``escaped`` already."""
    yield f"| {' | '.join(map(plain, names))} |"
    yield f"|{'---|' * len(names)}"
    for row in rows:
        yield f"| {' | '.join(row if escaped else map(plain, row))} |"


def plain(text: str) -> str:
    """A text that Markdown shows as it is, and that stays in its cell."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", " ".join(text.split()))
