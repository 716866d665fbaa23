"""A comparison as words: the cells of its table, its conditions, and both on the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cachedit.evaluate.comparison import Comparison, Row
from cachedit.evaluate.panel import Metric
from cachedit.evaluate.rollouts import in_words
from cachedit.frontier import QUALITIES

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

CAPTION = (
    "latency: median of a whole call. NFE: computed steps. rho: time of a reused denoiser call over a computed one. "
    "PSNR (dB), SSIM, st-lpips: against the baseline's pictures, mean over the prompts; identical pictures are left "
    "out of the mean PSNR. st-lpips is not comparable with published LPIPS."
)
COUNTED = (
    "MACs: what the denoiser multiplies in one run, as a share of the baseline's, by torch's FlopCounterMode. cache: "
    "what the cache holds at most; peak memory: all that torch held on the device at once."
)
FOLDERS = "PSNR (dB) and others: against the picture of the same name, mean over all; PSNR of those that differ."
UNTOLD = "not measured"
NAMES = {
    "call_options": "call options",
    "num_prompts": "number of prompts",
    "num_files": "number of files",
    "baseline_calls": "baseline calls",
}


def header(comparison: Comparison) -> list[str]:
    """Column names; a metric is there if it could be computed for some row, PSNR and SSIM always."""
    return [*_measured(comparison, comparison.baseline), *(metric.title for metric in _shown(comparison))]


def table_cells(comparison: Comparison, row: Row) -> list[str]:
    """One text per column of ``header``; "-" where a number does not apply."""
    return [*_measured(comparison, row).values(), *(_value(row, metric) for metric in _shown(comparison))]


def caption(comparison: Comparison) -> str:
    """What the columns mean."""
    if comparison.baseline.latency_s is None:
        return FOLDERS
    return f"{CAPTION} {COUNTED}" if comparison.counted else CAPTION


def missing(comparison: Comparison) -> list[str]:
    """Why a metric that was asked for is not in the table, one sentence each."""
    titles = {metric.name: metric.title for metric in comparison.metrics}
    return [f"{titles[name]} was not computed: {why}" for name, why in comparison.unavailable.items()]


def _measured(comparison: Comparison, row: Row) -> dict[str, str]:
    """Title and text of the columns that are no metrics."""
    if comparison.baseline.latency_s is None:
        return {"pictures": row.strategy, "identical": "-" if row.identical is None else str(row.identical)}
    cells = {
        "strategy": row.strategy,
        "latency": duration(row.latency_s),
        "speed-up": "-" if row.speedup is None else f"{row.speedup:.2f}x",
        "NFE": _number(row.nfe, "g"),
        "rho": _number(row.rho, ".3f"),
    }
    if comparison.counted:
        cells["MACs"] = UNTOLD if row.macs_ratio is None else f"{100 * row.macs_ratio:.1f} %"
    cells["cache"] = size(row.cache_bytes)
    if comparison.counted:
        cells["peak memory"] = UNTOLD if row.peak_memory is None else size(row.peak_memory)
    return cells


def _shown(comparison: Comparison) -> list[Metric]:
    known = {name for row in comparison.rows for name in row.quality}
    return [metric for metric in comparison.metrics if metric.name in {"psnr", "ssim"} | known]


def _value(row: Row, metric: Metric) -> str:
    value = row.quality.get(metric.name)
    return "identical" if value == math.inf and metric.name == "psnr" else _number(value, metric.form)


def condition_lines(conditions: dict[str, Any]) -> list[tuple[str, str]]:
    """Name and text of every condition, as they are shown; one that does not apply is left out."""
    lines = []
    for name, value in conditions.items():
        if value is None:
            continue
        if isinstance(value, dict):
            equals = ": " if name == "profiles" else "="  # names of configurations hold "=" themselves
            text = ", ".join(f"{key}{equals}{entry}" for key, entry in value.items()) or "none"
        elif isinstance(value, list):
            text = "; ".join(map(str, value))
        else:
            text = str(value)
        lines.append((NAMES.get(name, name), text))
    return lines


def print_comparison(console: Console, comparison: Comparison) -> None:
    """Print the table, the conditions, and under them the strips and what the numbers would hide."""
    from rich.text import Text

    print_cells(
        console, header(comparison), [table_cells(comparison, row) for row in comparison.rows], comparison.conditions
    )
    for row in comparison.rows:
        if row.rollout:
            console.print(Text(f"{row.strategy}: {in_words(row.rollout)}"), soft_wrap=True)
        if row.strip:
            console.print(marked(console, f"{row.strategy}  {row.strip}  (■ computed, □ reused)"), soft_wrap=True)
        if row.expected:
            console.print(Text(f"{row.strategy} expected {expectation(row.expected)}"), soft_wrap=True)
        if row.note:
            console.print(Text(f"{row.strategy}: {row.note}"), style="yellow", soft_wrap=True)
    for line in missing(comparison):
        console.print(Text(line), style="dim", soft_wrap=True)


def print_cells(
    console: Console, names: Sequence[str], rows: Sequence[Sequence[str]], conditions: dict[str, Any]
) -> None:
    """Print a table, the first column to the left, and under it the conditions but for the prompts."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_edge=False, pad_edge=False)
    for index, name in enumerate(names):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
    console.print()
    for name, text in condition_lines(conditions):
        if name != "prompts":
            console.print(Text(f"{name + ':':18s} {text}"), style="dim", soft_wrap=True)
    console.print()


def marked(console: Console, text: str) -> Text:
    """A text with a strip in it, in marks that the terminal has."""
    from rich.text import Text

    return Text(text.translate(str.maketrans("■□▪", "#..")) if console.options.ascii_only else text)


def expectation(expected: Mapping[str, Any]) -> str:
    """What a strategy expected of a run: "2.03x, 12 computed steps, PSNR 56.6"."""
    forms = {"speedup": "{:.2f}x", "computed_steps": "{} computed steps", "psnr": "PSNR {:.1f}"}
    forms |= {metric: f"{QUALITIES[metric]} {{:.4f}}" for metric in QUALITIES if metric not in forms}
    order = [name for name in forms if name in expected]
    others = [f"{name} {value}" for name, value in expected.items() if name not in forms]
    return ", ".join([*(forms[name].format(expected[name]) for name in order), *others])


def duration(seconds: float | None) -> str:
    """Seconds as people read them: "812 ms", "3.46 s"; "-" for none."""
    if seconds is None:
        return "-"
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
