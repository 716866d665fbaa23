"""What calibration measured of speed against quality, and what it predicts of other runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cachedit.errors import ProfileError
from cachedit.paths import CRITERIA
from cachedit.profile import Profile
from cachedit.solver import PREDICTORS
from cachedit.strategy import Axes

QUALITIES = {"psnr": "PSNR", "ssim": "SSIM", "lpips": "LPIPS", "st_lpips": "st-lpips"}
OF_FRONTIER: Axes = {"frontier": ("budget",), "time": ("value",)}
"""The arrays that a profile gets when its frontier is measured, and their axes."""
COLUMNS = ("steps", "nfe", "predictor", "criterion")
RANGES = {
    **dict.fromkeys(["steps", "nfe"], (1, math.inf)),
    "cost": (0, math.inf),
    **dict.fromkeys(["reused", "outside", "keeping"], (0, 1e6)),  # times of a computed step
    "predictor": (0, len(PREDICTORS) - 1),
    "criterion": (0, len(CRITERIA) - 1),
}
FREE = 1e-12  # a cost that is none


@dataclass(frozen=True)
class Point:
    """One measured budget.

    Attributes:
        steps, nfe: length of the runs, and how many of their steps were computed.
        predictor, criterion: places of what did best among those of the solver.
        cost: of the schedule, as the solver has it.
        quality: metric -> mean over prompts, against the uncached pipeline.
        spread: metric -> standard deviation over prompts.
    """

    steps: int
    nfe: int
    predictor: int
    criterion: int
    cost: float
    quality: dict[str, float]
    spread: dict[str, float]


class Frontier:
    """Measured points, and lines through them.

    Quality is read off over the cost of the schedule, which takes other numbers of steps and other samplers along: the
    error of the final sample is taken to be proportional to it between two points. Points of the number of steps that
    is nearest to the run's are used, and their metrics are never extended beyond the best and the worst of them.

    Args:
        points: measured budgets.
        reused: time of a reused step over that of a computed one.
        outside: time of a call outside of its steps, over that of a computed step.
        keeping: what a computed step takes longer because its residual is kept, over that of a computed step.
    """

    def __init__(self, points: Sequence[Point], reused: float, outside: float, keeping: float = 0.0) -> None:
        self.points, self.reused, self.outside, self.keeping = list(points), reused, outside, keeping

    @classmethod
    def of(cls, profile: Profile) -> Frontier | None:
        """What a profile holds; None if it holds no frontier.

        Raises:
            ProfileError: it holds one that cannot have been measured.
        """
        table, time = profile.arrays.get("frontier"), profile.arrays.get("time")
        if table is None or time is None:
            return None
        profile.check_arrays(OF_FRONTIER, "a plan")
        spreads = [f"{name}_spread" for name in QUALITIES if name in table]
        _check("frontier", table, [*COLUMNS, "cost", *spreads])
        _check("time", time, ["reused", "outside"])
        points = []
        for k in range(len(table["nfe"])):
            steps, nfe, predictor, criterion = (int(table[name][k]) for name in COLUMNS)
            quality = {name: table[name][k] for name in QUALITIES if name in table}
            spread = {name: table[f"{name}_spread"][k] for name in quality}
            points.append(Point(steps, nfe, predictor, criterion, table["cost"][k], quality, spread))
        return cls(points, time["reused"][0], time["outside"][0], time.get("keeping", [0.0])[0])

    @cached_property
    def metrics(self) -> list[str]:
        """What was measured."""
        return list(self.points[0].quality)

    def near(self, steps: int) -> list[Point]:
        """The points of the number of steps that is nearest, by ratio, from the cheapest schedule to the costliest."""
        nearest = min(sorted({point.steps for point in self.points}), key=lambda known: abs(math.log(known / steps)))
        return sorted([point for point in self.points if point.steps == nearest], key=lambda point: point.cost)

    def point(self, steps: int, nfe: int) -> Point:
        """The point with the nearest number of computed steps."""
        return min(self.near(steps), key=lambda point: (abs(point.nfe - nfe), point.nfe))

    def quality(self, metric: str, steps: int, cost: float) -> float:
        """Predicted mean of a metric for a schedule of that cost."""
        points = self.near(steps)
        levels = [_decibel(metric, point.quality[metric]) for point in points]
        known = [math.log(max(point.cost, FREE)) for point in points]
        found = np.interp(math.log(max(cost, FREE)), known, levels)
        return _value(metric, float(found))

    def range(self, metric: str, steps: int) -> tuple[float, float]:
        """The lowest and the highest measured mean of a metric."""
        values = [point.quality[metric] for point in self.near(steps)]
        return min(values), max(values)

    def speedup(self, steps: int, nfe: int) -> float:
        """Predicted time of a whole uncached call over that of a cached one, where the profile was measured."""
        if nfe == steps:
            return 1.0
        return (self.outside + steps) / (self.outside + nfe * (1 + self.keeping) + (steps - nfe) * self.reused)


def _check(array: str, rows: Mapping[str, Sequence[float]], columns: Sequence[str]) -> None:
    """Raise ProfileError unless these columns are there, and no number is one that nothing can have."""
    again = "Calibrate again: that measures it anew."
    missing = [name for name in columns if name not in rows]
    if missing:
        raise ProfileError(f"field 'arrays.{array}' lacks {', '.join(missing)}; it holds {', '.join(rows)}. {again}")
    for name in set(rows) & set(RANGES):
        lowest, highest = RANGES[name]
        wrong = [v for v in rows[name] if not lowest <= v <= highest or (name in COLUMNS and v != int(v))]
        if wrong:
            allowed = f"{'integers' if name in COLUMNS else 'numbers'} from {lowest} to {highest}"
            raise ProfileError(f"field 'arrays.{array}.{name}' holds {wrong[0]}; allowed: {allowed}. {again}")


def _decibel(metric: str, value: float) -> float:
    """A metric on a scale that is linear in the logarithm of the error."""
    if metric == "psnr":
        return value
    return -20 * math.log10(max(1 - value if metric == "ssim" else value, 1e-9))


def _value(metric: str, decibel: float) -> float:
    if metric == "psnr":
        return decibel
    distance = 10 ** (-decibel / 20)
    return 1 - distance if metric == "ssim" else distance
