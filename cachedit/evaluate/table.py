"""A comparison as words: the cells of its table, its conditions, and both on the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cachedit.evaluate.comparison import Comparison, Row
from cachedit.frontier import QUALITIES

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

COLUMNS = ("strategy", "latency", "speed-up", "NFE", "rho", "cache", "PSNR", "SSIM")
CAPTION = (
    "latency: median of a whole call. NFE: computed steps. rho: time of a reused denoiser call over a computed one. "
    "PSNR (dB), SSIM, st-lpips: against the baseline's pictures, mean over the prompts; identical pictures are left "
    "out of the mean PSNR. st-lpips is not comparable with published LPIPS."
)
NAMES = {"call_options": "call options", "num_prompts": "number of prompts"}


def header(comparison: Comparison) -> list[str]:
    """Column names; st-lpips is there if it could be computed."""
    return [*COLUMNS, "st-lpips"] if _has_st_lpips(comparison) else [*COLUMNS]


def table_cells(comparison: Comparison, row: Row) -> list[str]:
    """One text per column of ``header``; "-" where a number does not apply."""
    cells = [
        row.strategy,
        duration(row.latency_s),
        f"{row.speedup:.2f}x",
        _number(row.nfe, "g"),
        _number(row.rho, ".3f"),
        size(row.cache_bytes),
        "identical" if row.psnr == math.inf else _number(row.psnr, ".1f"),
        _number(row.ssim, ".4f"),
    ]
    return [*cells, _number(row.st_lpips, ".4f")] if _has_st_lpips(comparison) else cells


def condition_lines(conditions: dict[str, Any]) -> list[tuple[str, str]]:
    """Name and text of every condition, as they are shown."""
    lines = []
    for name, value in conditions.items():
        if isinstance(value, dict):
            text = ", ".join(f"{key}={entry}" for key, entry in value.items()) or "none"
        elif isinstance(value, list):
            text = "; ".join(map(str, value))
        else:
            text = str(value)
        lines.append((NAMES.get(name, name), text))
    return lines


def print_comparison(console: Console, comparison: Comparison) -> None:
    """Print the table, the conditions, and under them the strips and what the numbers would hide."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_edge=False, pad_edge=False)
    for index, name in enumerate(header(comparison)):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    for row in comparison.rows:
        table.add_row(*(Text(cell) for cell in table_cells(comparison, row)))
    console.print(table)
    console.print()
    for name, text in condition_lines(comparison.conditions):
        if name != "prompts":
            console.print(Text(f"{name + ':':18s} {text}"), style="dim", soft_wrap=True)
    console.print()
    for row in comparison.cached:
        if row.strip:
            console.print(marked(console, f"{row.strategy}  {row.strip}  (■ computed, □ reused)"), soft_wrap=True)
        if row.expected:
            console.print(Text(f"{row.strategy} expected {expectation(row.expected)}"), soft_wrap=True)
        if row.note:
            console.print(Text(f"{row.strategy}: {row.note}"), style="yellow", soft_wrap=True)


def marked(console: Console, text: str) -> Text:
    """A text with a strip in it, in marks that the terminal has."""
    from rich.text import Text

    return Text(text.translate(str.maketrans("■□", "#.")) if console.options.ascii_only else text)


def expectation(expected: Mapping[str, Any]) -> str:
    """What a strategy expected of a run: "2.03x, 12 computed steps, PSNR 56.6"."""
    forms = {"speedup": "{:.2f}x", "computed_steps": "{} computed steps", "psnr": "PSNR {:.1f}"}
    forms |= {metric: f"{QUALITIES[metric]} {{:.4f}}" for metric in QUALITIES if metric not in forms}
    order = [name for name in forms if name in expected]
    others = [f"{name} {value}" for name, value in expected.items() if name not in forms]
    return ", ".join([*(forms[name].format(expected[name]) for name in order), *others])


def duration(seconds: float) -> str:
    """Seconds as people read them: "812 ms", "3.46 s"."""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def size(count: int | None) -> str:
    """Bytes as people read them: "320 kB", "1.5 MB"."""
    if count is None:
        return "-"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def _has_st_lpips(comparison: Comparison) -> bool:
    return any(row.st_lpips is not None for row in comparison.cached)
