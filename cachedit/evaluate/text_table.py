"""A comparison of text strategies as words: the cells of its table, and all of it on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cachedit.evaluate.answer import Answer
from cachedit.evaluate.table import duration, marked, print_cells, size
from cachedit.evaluate.text_comparison import TextComparison, TextRow

if TYPE_CHECKING:
    from rich.console import Console

CAPTION = (
    "latency: median of a whole call. tokens per step: of prompt and answer, that a step computes on average. token "
    "ratio: how many times fewer that is than without a cache, and so about the most that the cache can gain. as "
    "baseline: share of the baseline's tokens that are the same, mean over the prompts."
)
SCORED = "score: mean of what the scorer says of an answer, where 1 is right."
MARKS = "■ all tokens computed, ▪ some"


def header(comparison: TextComparison) -> list[str]:
    """Column names."""
    names = ["strategy", "latency", "speed-up", "tokens/s", "steps", "tokens per step", "token ratio"]
    return [*names, *(["score"] if comparison.scored else []), "as baseline", "cache"]


def table_cells(comparison: TextComparison, row: TextRow) -> list[str]:
    """One text per column of ``header``; "-" where a number does not apply."""
    cells = [row.strategy, duration(row.latency_s), f"{row.speedup:.2f}x", _number(row.tokens_per_s, ".0f")]
    cells += [_number(row.steps, "g"), _number(row.tokens_per_step, ".1f")]
    cells.append("-" if row.token_ratio is None else f"{row.token_ratio:.2f}x")
    if comparison.scored:
        cells.append(_number(row.score, ".3f"))
    return [*cells, share(row.exact_match), size(row.cache_bytes)]


def caption(comparison: TextComparison) -> str:
    """What the columns mean."""
    return f"{CAPTION} {SCORED}" if comparison.scored else CAPTION


def share(value: float | None) -> str:
    """A share in percent; 100 % only if it is all."""
    if value is None:
        return "-"
    return "100 %" if value == 1 else f"{min(100 * value, 99.9):.1f} %"


def told(answer: Answer) -> str:
    """One answer in words: "score 1, as the baseline", "score 0, 81.2 % of the baseline's tokens"."""
    parts = [] if answer.score is None else [f"score {answer.score:g}"]
    if answer.exact_match is not None:
        same = answer.exact_match == 1
        parts.append("as the baseline" if same else f"{share(answer.exact_match)} of the baseline's tokens")
    return ", ".join(parts)


def print_text_comparison(console: Console, comparison: TextComparison) -> None:
    """Print the table, the conditions, and under them the strips and what the numbers would hide."""
    from rich.text import Text

    print_cells(
        console, header(comparison), [table_cells(comparison, row) for row in comparison.rows], comparison.conditions
    )
    for row in comparison.cached:
        console.print(marked(console, f"{row.strategy}  {row.strip}  ({MARKS})"), soft_wrap=True)
        if row.note:
            console.print(Text(f"{row.strategy}: {row.note}"), style="yellow", soft_wrap=True)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"
