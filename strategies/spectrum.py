"""Spectrum: fit Chebyshev polynomials to all computed residuals, and compute ever more rarely."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from cachedit.predictors import chebyshev
from cachedit.schedules import growing
from cachedit.strategies.checks import check_count
from cachedit.strategy import Context, FeatureStrategy


@dataclass(frozen=True)
class Spectrum(FeatureStrategy):
    """Forecast by a ridge fit of Chebyshev polynomials over the whole run (arXiv 2603.01623).

    The fit is mixed with the line through the two newest residuals. Gaps start at ``window`` steps and every computed
    step adds ``growth`` to them: the more is known, the further the fit reaches. In 50 steps the defaults compute
    0-4 6 8 11 15 20 25 31 38 46, and ``growth=3`` computes 0-4 6 11 19 30 44.

    The paper fits the state before the last norm, takes all runs for 50 steps long, and lets the ridge shrink the
    constant, which that norm undoes. Ours: the residual of the stack, the true number of steps, a fit that keeps a
    constant, and a bound on what is kept, as every residual that the fit sees stays in memory.

    window:    first gap after the warm-up, 1 or more (paper: 2).
    growth:    what a computed step adds to the gap, 0 or more (paper: 0.75, or 3 for more speed).
    warmup:    leading steps that are always computed (paper: 5).
    degree:    highest polynomial (paper: 4).
    ridge:     penalty on the squared coefficients (paper: 0.1); 0 is least squares.
    mix:       share of the fit, the rest is the line (paper: 0.5 to 1).
    snapshots: newest residuals that are kept and fitted (paper: 100, which is all).
    """

    window: float = 2.0
    growth: float = 0.75
    warmup: int = 5
    degree: int = 4
    ridge: float = 0.1
    mix: float = 0.5
    snapshots: int = 16

    paper: ClassVar[str] = "arXiv 2603.01623"
    needs_schedule: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range.
        """
        growing(1, self.window, self.growth, self.warmup)
        check_count(self, "degree")
        check_count(self, "snapshots", lowest=1)
        for name, highest, allowed in (("ridge", math.inf, "0 or more"), ("mix", 1, "a share from 0 to 1")):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value <= highest or value == math.inf:
                raise ValueError(f"Spectrum {name}={value!r}; allowed: {allowed}")

    @property
    def depth(self) -> int:
        """As many as are fitted."""
        return self.snapshots

    def should_compute(self, ctx: Context) -> bool | str:
        """The warm-up, then ever larger gaps; a later expert begins anew."""
        position = ctx.step - ctx.computed_steps[0]
        if position < self.warmup:
            return "warm-up"
        return growing(position + 1, self.window, self.growth, self.warmup)[-1] == position

    def weights(self, ctx: Context) -> Sequence[float]:
        """Those of the fit mixed with the line, over the steps of this expert."""
        times = [step - ctx.expert_start for step in ctx.computed_steps]
        span = ctx.expert_steps or ctx.schedule.num_steps
        assert span is not None
        return chebyshev(times, ctx.step - ctx.expert_start, self.degree, self.ridge, span, self.mix)
