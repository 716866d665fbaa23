"""FoCa: forecast then calibrate, features taken as the solution of a differential equation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from cachedit.predictors import heun
from cachedit.schedules import every
from cachedit.strategies.rules import at_interval
from cachedit.strategy import Context, FeatureStrategy


@dataclass(frozen=True)
class FoCa(FeatureStrategy):
    """Forecast by BDF2 and calibrate by Heun's rule (arXiv 2508.16211).

    Features are taken as a curve over the steps. A two-step backward difference formula forecasts the skipped feature;
    the slope there and the slope at the last computed step are averaged, and the feature moves along the average.

    The paper's formulas are known to us second-hand, and implementations feed forecasts back into their history. Ours:
    one step from the newest computed residual, coefficients for uneven gaps, the slope of the quadratic through the
    three newest (``cachedit.predictors.heun``), and the residual of the stack in the place of every module.

    interval: one step in ``interval`` is computed after the warm-up, counted from its end (paper: 5 to 8 in 50 steps).
    warmup:   leading steps that are always computed; 4 keeps the first step, from which features jump, out of the first
              quadratic.
    """

    interval: int = 4
    warmup: int = 4

    paper: ClassVar[str] = "arXiv 2508.16211"
    history: ClassVar[int] = 3

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range.
        """
        every(1, self.interval, self.warmup)

    def should_compute(self, ctx: Context) -> bool | str:
        """The warm-up, then one step in ``interval``; a later expert begins anew."""
        return at_interval(ctx, self.interval, self.warmup)

    def weights(self, ctx: Context) -> Sequence[float]:
        """Those of the calibrated forecast."""
        return heun(ctx.computed_steps, ctx.step)
