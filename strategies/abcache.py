"""AB-Cache: extrapolate the model output by Adams-Bashforth weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from cachedit.predictors import lagrange
from cachedit.strategies.checks import check_count
from cachedit.strategies.clocks import Clock, check_clock, times
from cachedit.strategy import Context, FeatureStrategy, Output, Site


@dataclass(frozen=True)
class ABCache(FeatureStrategy):
    """Replace a skipped model output by a sum of the last ones with alternating binomial weights (arXiv 2504.10540).

    From the Adams-Bashforth methods the paper derives ``sum_{j=1..k} (-1)^(j-1) C(k, j) v_{n+1-j}``, with an error of
    order h^k. These are the weights of the polynomial through k outputs, read one step on.

    Ours: the k outputs are computed ones, and the polynomial is read at the true distance. On an even grid, one step
    on, that is the paper's sum. Applied to its own forecasts the sum diverges from gaps of 3 steps on: the slope after
    a computed step is taken to a forecast one, whose error grows by the factor 1 - interval in every gap. Noise grows
    with k and the distance in either form, to more than three times that of k = 2 at k = 3 from 2 steps on, so 2 is the
    default. Forecasting each branch equals forecasting the guided output, as the paper does, while guidance is a fixed
    mix of the branches.

    interval: steps whose index is a multiple of it are computed (an adapter's rule for 50 steps of FLUX: 6).
    warmup:   leading steps that are always computed (5).
    order:    k, how many computed outputs are combined; 1 is plain reuse (paper: 2 to 5).
    clock:    "step" extrapolates over step indices, "sigma" over noise levels, where they are known.
    """

    interval: int = 3
    warmup: int = 5
    order: int = 2
    clock: Clock = "step"

    paper: ClassVar[str] = "arXiv 2504.10540"
    site: ClassVar[Site] = Output()

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range.
        """
        check_count(self, "interval", "warmup", "order", lowest=1)
        check_clock(self.clock, "ABCache")

    @property
    def depth(self) -> int:
        """As many as are combined."""
        return self.order

    def should_compute(self, ctx: Context) -> bool | str:
        """The warm-up, then the multiples of ``interval``; a later expert begins anew."""
        position = ctx.step - ctx.computed_steps[0]
        if position < self.warmup:
            return "warm-up"
        return position % self.interval == 0

    def weights(self, ctx: Context) -> Sequence[float]:
        """Those of the polynomial through the newest outputs."""
        return lagrange(*times(ctx, self.clock), self.order - 1)
