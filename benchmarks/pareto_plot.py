"""The picture of the Pareto benchmark: measured speed-up against PSNR, a line over the best settings of each method."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pareto_table import TARGETS, Point, Row, front, on_front

OURS, QUIET = "#0b5cad", "#9db4c8"
PEERS = {
    "diffusers": ("#c0392b", "#e67e22", "#a0522d", "#d4a017", "#b03a6f", "#7f3b08"),
    "cache-dit": ("#1e8449", "#6c3483", "#148f77", "#4a235a", "#52796f", "#8e44ad"),
}
MARKERS = {"diffusers": "s", "cache-dit": "^"}
LOWEST = 20.0  # dB; what lies below is another picture and only squeezes the rest
SHIFTS = sorted(range(-140, 141, 10), key=abs)  # points up or down that a label may be moved out of the way


def plot(rows: Sequence[Row], conditions: dict[str, Any], file: Path) -> None:
    """Write ``file`` as PNG and as SVG.

    Raises:
        ValueError: no row has both a speed and a PSNR.
    """
    from matplotlib.figure import Figure

    lines = curves(rows)
    if not lines:
        raise ValueError("there is nothing to plot: no row has both a speed-up and a PSNR that are finite")
    figure = Figure(figsize=(13, 8.5), layout="constrained")
    axes = figure.add_subplot()
    labels: list[tuple[Point, str, str, bool]] = []
    best = {row.point(): row for row in on_front(rows)}
    for number, ((group, name), points) in enumerate(lines.items()):
        if group == "cachedit":
            style: dict[str, Any] = {"linestyle": "-", "color": QUIET, "linewidth": 0.9, "zorder": 2}
            axes.plot(*zip(*points, strict=True), "o", color=QUIET, markersize=3, zorder=2)
            if not best.keys() & set(points):
                labels.append((points[-1], name, "#5d7388", False))
        else:
            colour = PEERS[group][number % len(PEERS[group])]
            style = {"linestyle": "--", "color": colour, "linewidth": 1.3, "zorder": 3}
            axes.plot(*zip(*points, strict=True), MARKERS[group], color=colour, markersize=3.5, zorder=3)
            labels.append((points[-1], f"{group}: {name}", colour, False))
        axes.plot(*zip(*front(points), strict=True), **style)
    line = front(point for point in best if point is not None)
    if line:
        axes.plot(*zip(*line, strict=True), "-o", color=OURS, linewidth=2.6, markersize=6, zorder=4)
        labels = [(point, best[point].name, OURS, True) for point in line] + labels
    for target in TARGETS:
        axes.axvline(target, color="#cccccc", linewidth=0.8, zorder=1)
    _frame(axes, [point for points in lines.values() for point in points], conditions)
    figure.draw_without_rendering()
    place(axes, labels)
    for suffix in (".png", ".svg"):
        figure.savefig(file.with_suffix(suffix), dpi=140)


def curves(rows: Iterable[Row]) -> dict[tuple[str, str], list[Point]]:
    """(group, name) -> the points of its settings that are worth drawing, the slowest first."""
    found: dict[tuple[str, str], list[Point]] = {}
    for row in rows:
        point = row.point()
        if point is not None and point[1] >= LOWEST:
            found.setdefault((row.group, row.name), []).append(point)
    return {key: sorted(points) for key, points in found.items()}


def _frame(axes: Any, points: Sequence[Point], conditions: dict[str, Any]) -> None:
    fastest, nearest, farthest = max(x for x, _ in points), max(y for _, y in points), min(y for _, y in points)
    axes.set_xlim(min(0.95, min(x for x, _ in points)), fastest + 0.14 * (fastest - 0.95))  # room for the last labels
    axes.set_ylim(farthest - 2, nearest + 2)
    axes.set_xlabel("speed-up of the whole call, measured (uncached = 1)")
    axes.set_ylabel("PSNR of the final picture against uncached (dB), mean over the prompts")
    axes.set_title(
        "Speed against fidelity: cachedit (blue, its front bold), diffusers' caches and cache-dit (dashed)", loc="left"
    )
    told = (
        f"sample pipeline {conditions['pipeline']}, {conditions['steps']} steps, guidance "
        f"{conditions['call_options']['guidance_scale']:g}, {conditions['num_prompts']} held-out prompts; one thread, "
        f"{conditions['device']}; torch {conditions['torch']}, diffusers {conditions['diffusers']}, cache-dit "
        f"{conditions['cache-dit']}"
    )
    axes.text(0, -0.085, told, transform=axes.transAxes, fontsize=8, color="#555555", va="top")
    axes.grid(True, color="#eeeeee", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def place(axes: Any, labels: Sequence[tuple[Point, str, str, bool]]) -> None:
    """Write every label beside its point, moved up or down until it covers no other one."""
    taken: list[Any] = []
    inside = axes.get_window_extent()
    for point, text, colour, bold in labels:
        style = {"color": colour, "fontsize": 8.5 if bold else 7.5, "fontweight": "bold" if bold else "normal"}
        for shift in SHIFTS:
            offset = (7, shift + (5 if bold else 0))
            label = axes.annotate(text, point, offset, textcoords="offset points", va="center", zorder=5, **style)
            box = label.get_window_extent().padded(1)
            free = inside.y0 < box.y0 and box.y1 < inside.y1 and not any(box.overlaps(other) for other in taken)
            if free or shift == SHIFTS[-1]:
                break
            label.remove()
        taken.append(box)
        if abs(shift) > 10:
            line = {"arrowstyle": "-", "color": colour, "linewidth": 0.4, "alpha": 0.6}
            axes.annotate("", point, offset, textcoords="offset points", arrowprops=line)
