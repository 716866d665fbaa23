"""FreqCa: reuse the low frequencies, forecast the high ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from cachedit.predictors import hermite, plain
from cachedit.schedules import every
from cachedit.strategies.checks import check_count
from cachedit.strategies.rules import at_interval
from cachedit.strategy import Bands, Context, FeatureStrategy


@dataclass(frozen=True)
class FreqCa(FeatureStrategy):
    """Keep the low band as it was and forecast the high band by Hermite polynomials (arXiv 2510.08669).

    Low frequencies of what leaves the stack stay alike from step to step but move without a pattern; high ones drift
    steadily. So the low band is that of the newest computed step, the high one HiCache's forecast at a scale that is
    exact for lines. One tensor per computed step is kept instead of one per module.

    The paper forecasts the state that leaves the stack, split by a cosine transform over the picture (FLUX) or a
    Fourier transform over the tokens (Qwen-Image). Ours: the residual of the stack, so that what enters it is fresh,
    and always the Fourier transform. Which band drifts depends on the model, so compare with HiCache on yours.

    interval: one step in ``interval`` is computed after the warm-up, counted from its end (paper: 6 to 9 in 50 steps).
    warmup:   leading steps that are always computed (paper: 3); 4 keeps the first step, from which features jump, out
              of the first quadratic.
    order:    highest difference in the high band (paper: 2).
    scale:    contraction of the Hermite basis, above 0 (paper: 0.71, which is sqrt(0.5) rounded).
    cut:      share of the frequencies that is low, in (0, 1) (paper: 0.1).
    """

    interval: int = 4
    warmup: int = 4
    order: int = 2
    scale: float = math.sqrt(0.5)
    cut: float = 0.1

    paper: ClassVar[str] = "arXiv 2510.08669"

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range.
        """
        every(1, self.interval, self.warmup)
        check_count(self, "order")
        if type(self.scale) not in (int, float) or not 0 < self.scale < math.inf:
            raise ValueError(f"FreqCa scale={self.scale!r}; allowed: a number above 0, such as 0.71")
        if type(self.cut) is not float or not 0 < self.cut < 1:
            raise ValueError(f"FreqCa cut={self.cut!r}; allowed: a share between 0 and 1, such as 0.1")

    @property
    def partition(self) -> Bands:  # type: ignore[override]
        """The two bands."""
        return Bands(self.cut)

    @property
    def depth(self) -> int:
        """As many as the highest difference reads."""
        return self.order + 1

    def should_compute(self, ctx: Context) -> bool | str:
        """The warm-up, then one step in ``interval``; a later expert begins anew."""
        return at_interval(ctx, self.interval, self.warmup)

    def weights(self, ctx: Context) -> tuple[Sequence[float], Sequence[float]]:
        """Those of the low and of the high band."""
        steps = ctx.computed_steps
        return plain(steps, ctx.step), hermite(steps, ctx.step, self.order, self.scale)
