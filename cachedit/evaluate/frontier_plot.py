"""A measured frontier as a picture: PSNR over computed steps and over speed-up, one line per number of steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from cachedit.frontier import QUALITIES

WIDTH, HEIGHT = 460, 320  # of a panel's frame
LEFT, TOP, BETWEEN, BELOW = 62, 64, 42, 58
COLOURS = ("#0b5cad", "#c0392b", "#1e8449", "#6c3483", "#b9770e", "#148f77", "#444444")
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #222; }
.title { font-size: 15px; font-weight: 600; }
.tick, .legend { font-size: 12px; fill: #555; }
.grid { stroke: #e6e6e6; stroke-width: 1; }
.frame { fill: none; stroke: #999; stroke-width: 1; }
.line { fill: none; stroke-width: 2; }
.spread { stroke-width: 1.2; stroke-opacity: .45; }
"""
IDENTICAL = 1e3  # the PSNR that a profile holds where no picture differs
NEEDED = ("steps", "nfe", "speedup", "psnr")


def frontier_svg(columns: Mapping[str, Sequence[float]], title: str) -> str:
    """Draw a frontier.

    Args:
        columns: the profile's array "frontier": column -> one number per budget.
        title: above the panels.

    Returns:
        A whole SVG file that loads nothing. Every budget is a point in both panels, with its numbers as its tooltip
        and a bar of one standard deviation over the prompts.

    Raises:
        ValueError: a column is missing.
    """
    missing = [name for name in NEEDED if name not in columns]
    if missing:
        raise ValueError(f"the frontier has no {', '.join(missing)}; allowed: one as cachedit calibrate measures it")
    budgets = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    lengths = sorted({int(budget["steps"]) for budget in budgets})
    colours = {steps: COLOURS[k % len(COLOURS)] for k, steps in enumerate(lengths)}
    highest = max((budget["psnr"] for budget in budgets if budget["psnr"] < IDENTICAL), default=100.0)
    for budget in budgets:  # where no picture differs, the point lies as high as the highest of the others
        level, spread = min(budget["psnr"], highest), budget.get("psnr_spread", 0.0)
        budget |= {"level": level, "low": level - spread, "high": level + spread}
    vertical = Axis.over([budget["low"] for budget in budgets], [budget["high"] for budget in budgets], HEIGHT)
    width, height = LEFT + 2 * WIDTH + BETWEEN + 20, TOP + HEIGHT + BELOW
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text class="title" x="{LEFT}" y="24">{escape(title)}</text>',
        *_legend(colours),
    ]
    panels = (("nfe", "computed steps", [0.0]), ("speedup", "speed-up of the whole call, measured", [1.0]))
    for place, (column, label, also) in enumerate(panels):
        values = [budget[column] for budget in budgets]
        panel = Panel(column, Axis.over([*values, *also], values, WIDTH), vertical)
        parts.append(f'<g class="panel" transform="translate({LEFT + place * (WIDTH + BETWEEN)} {TOP})">')
        parts += panel.frame(label, labelled=place == 0)
        for steps in lengths:
            parts += panel.line([budget for budget in budgets if budget["steps"] == steps], colours[steps])
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


@dataclass(frozen=True)
class Axis:
    """A scale from values to pixels.

    Attributes:
        first, last: values at its ends.
        step: between ticks.
        length: in pixels.
    """

    first: float
    last: float
    step: float
    length: float

    @classmethod
    def over(cls, lows: Sequence[float], highs: Sequence[float], length: float) -> Axis:
        """The scale from the tick below the lowest value to the one above the highest."""
        low, high = min(lows), max(highs)
        rough = max(high - low, 1e-3) / 6
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= rough)
        first = math.floor(low / step) * step
        return cls(first, max(math.ceil(high / step) * step, first + step), step, length)

    def at(self, value: float) -> float:
        """Pixels from the beginning."""
        return round((value - self.first) / (self.last - self.first) * self.length, 2)

    @property
    def ticks(self) -> list[float]:
        """The values that are written."""
        return [self.first + k * self.step for k in range(round((self.last - self.first) / self.step) + 1)]


@dataclass(frozen=True)
class Panel:
    """PSNR over one column.

    Attributes:
        column: of the frontier.
        across, up: scales.
    """

    column: str
    across: Axis
    up: Axis

    def frame(self, label: str, labelled: bool) -> list[str]:
        """Grid, ticks and names of the axes; ``labelled``: that of the PSNR too."""
        parts = []
        for tick in self.across.ticks:
            x = self.across.at(tick)
            parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="0" y2="{HEIGHT}"/>')
            parts.append(f'<text class="tick" x="{x}" y="{HEIGHT + 18}" text-anchor="middle">{tick:g}</text>')
        for tick in self.up.ticks:
            y = HEIGHT - self.up.at(tick)
            parts.append(f'<line class="grid" x1="0" x2="{WIDTH}" y1="{y}" y2="{y}"/>')
            parts.append(f'<text class="tick" x="-8" y="{y + 4}" text-anchor="end">{tick:g}</text>')
        parts.append(f'<rect class="frame" width="{WIDTH}" height="{HEIGHT}"/>')
        parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT + 42}" text-anchor="middle">{label}</text>')
        if labelled:
            place = f'transform="translate(-42 {HEIGHT / 2}) rotate(-90)"'
            parts.append(f'<text {place} text-anchor="middle">PSNR against the uncached picture (dB)</text>')
        return parts

    def line(self, budgets: Sequence[Mapping[str, float]], colour: str) -> list[str]:
        """The budgets of one number of steps, the fewest computed steps first."""
        budgets = sorted(budgets, key=lambda budget: budget["nfe"])
        places = [(self.across.at(budget[self.column]), self._y(budget["level"])) for budget in budgets]
        parts = []
        for budget, (x, _) in zip(budgets, places, strict=True):
            low, high = self._y(budget["low"]), self._y(budget["high"])
            parts.append(f'<line class="spread" stroke="{colour}" x1="{x}" x2="{x}" y1="{low}" y2="{high}"/>')
        joined = " ".join(f"{x},{y}" for x, y in places)
        parts.append(f'<polyline class="line" stroke="{colour}" points="{joined}"/>')
        for budget, (x, y) in zip(budgets, places, strict=True):
            told = f"<title>{escape(_told(budget))}</title>"
            parts.append(f'<circle class="budget" fill="{colour}" cx="{x}" cy="{y}" r="4">{told}</circle>')
        return parts

    def _y(self, psnr: float) -> float:
        return round(HEIGHT - self.up.at(psnr), 2)


def _legend(colours: Mapping[int, str]) -> list[str]:
    parts = []
    for place, (steps, colour) in enumerate(colours.items()):
        x = LEFT + 95 * place
        parts.append(f'<line class="line" stroke="{colour}" x1="{x}" x2="{x + 20}" y1="44" y2="44"/>')
        parts.append(f'<text class="legend" x="{x + 26}" y="48">{steps} steps</text>')
    parts.append(f'<text class="legend" x="{LEFT + 95 * len(colours)}" y="48">bars: standard deviation</text>')
    return parts


def _told(budget: Mapping[str, float]) -> str:
    """The numbers of a budget: "12 of 28 steps computed, 2.02x, PSNR 56.63"."""
    if budget["psnr"] >= IDENTICAL:
        quality = ["identical pictures"]
    else:
        quality = [f"{QUALITIES[name]} {budget[name]:.4g}" for name in QUALITIES if name in budget]
    words = [f"{budget['nfe']:g} of {budget['steps']:g} steps computed", f"{budget['speedup']:.3g}x"]
    return ", ".join([*words, *quality])
