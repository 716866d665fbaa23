"""Speed against quality as a drawing: one point per configuration, and a line down to its worst prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from cachedit.evaluate.comparison import Comparison, Row

WIDTH, HEIGHT = 620, 360
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 20, 48  # margins
LETTER = 6.6  # width of a letter of a label, about
TICKS = 6  # at most
LONGEST = 36  # letters of a label


def draw_plot(comparison: Comparison) -> str:
    """PSNR over speed-up as an SVG element that stands for itself; "" without two numbers to show for any cache."""
    rows = [row for row in comparison.cached if _drawable(row)]
    if not rows:
        return ""
    across = [row.speedup or 0 for row in rows]
    up = [value for row in rows for value in _span(row)]
    x_ticks, y_ticks = ticks(min(1.0, *across), max(1.0, *across), 0.1), ticks(min(up), max(up), 1.0)
    parts = [*_axes(x_ticks, y_ticks)]
    spots = [(_x(row.speedup or 0, x_ticks), _y(row.psnr or 0, y_ticks)) for row in rows]
    taken = [(x - 6, x + 6, y + 4) for x, y in spots]
    for row in sorted(rows, key=lambda row: -(row.psnr or 0)):
        parts += _point(row, x_ticks, y_ticks, taken)
    told = "; ".join(f"{row.strategy} {row.speedup:.2f}x at {row.psnr:.1f} dB" for row in rows)
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="currentColor">'
        f"<title>PSNR over speed-up</title><desc>{escape(told)}</desc>{''.join(parts)}</svg>"
    )


def undrawn(comparison: Comparison) -> list[str]:
    """Names of the caches that have no place in the plot, as their pictures are identical or not finite."""
    return [row.strategy for row in comparison.cached if not _drawable(row)]


def ticks(low: float, high: float, least: float) -> list[float]:
    """Round numbers from at most ``low`` to at least ``high``, in steps of 1, 2 or 5 times a power of ten.

    Args:
        low, high: what is drawn.
        least: smallest range to spread over the axis, so that noise does not fill it.
    """
    middle, half = (low + high) / 2, max(high - low, least) / 2
    low, high, span = middle - half, middle + half, 2 * half
    power = 10 ** math.floor(math.log10(span / (TICKS - 1)))
    for factor in (1, 2, 5, 10):
        step = factor * power
        first, last = math.floor(low / step), math.ceil(high / step)
        if last - first < TICKS:
            break
    return [round(k * step, 10) for k in range(first, max(last, first + 1) + 1)]


def _drawable(row: Row) -> bool:
    return row.speedup is not None and row.psnr is not None and math.isfinite(row.psnr)


def _span(row: Row) -> list[float]:
    """The mean PSNR, and the worst one where it is a number."""
    return [value for value in (row.psnr, row.worst_psnr) if value is not None and math.isfinite(value)]


def _x(value: float, ticks: Sequence[float]) -> float:
    return LEFT + (value - ticks[0]) / (ticks[-1] - ticks[0]) * (WIDTH - LEFT - RIGHT)


def _y(value: float, ticks: Sequence[float]) -> float:
    return HEIGHT - BOTTOM - (value - ticks[0]) / (ticks[-1] - ticks[0]) * (HEIGHT - TOP - BOTTOM)


def _axes(x_ticks: Sequence[float], y_ticks: Sequence[float]) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    grid, parts = 'stroke="currentColor" opacity=".15"', []
    for tick in x_ticks:
        x = _x(tick, x_ticks)
        parts.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" {grid}/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{tick:g}x</text>')
    for tick in y_ticks:
        y = _y(tick, y_ticks)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" {grid}/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    parts.append(_title((LEFT + right) / 2, HEIGHT - 8, "speed-up of a whole call"))
    middle = (TOP + bottom) / 2
    return [*parts, _title(14, middle, "PSNR (dB)", f' transform="rotate(-90 14 {middle})"')]


def _title(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="middle"{more}>{text}</text>'


def _point(
    row: Row, x_ticks: Sequence[float], y_ticks: Sequence[float], taken: list[tuple[float, float, float]]
) -> list[str]:
    """The point, the line to its worst prompt, and a label that keeps clear of those in ``taken``."""
    heights = [_y(value, y_ticks) for value in _span(row)]
    x, y = _x(row.speedup or 0, x_ticks), heights[0]
    name = row.strategy if len(row.strategy) <= LONGEST else f"{row.strategy[: LONGEST - 1]}…"
    width = LETTER * len(name)
    to_left = x + 9 + width > WIDTH
    start = max(x - 9 - width, 0) if to_left else x + 9
    level = y + 4
    while any(abs(level - other) < 14 and start < end and begin < start + width for begin, end, other in taken):
        level += 14
    taken.append((start, start + width, level))
    mark, low = "var(--mark, #0a7d5a)", heights[-1]
    return [
        f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{x:.1f}" y2="{low:.1f}" stroke="{mark}" stroke-width="2" opacity=".5"/>',
        f'<circle class="point" cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{mark}"/>',
        f'<text x="{start:.1f}" y="{level:.1f}">{escape(name)}</text>',
    ]
