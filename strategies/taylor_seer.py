"""TaylorSeer: forecast skipped features by the Taylor expansion of the computed ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from cachedit.predictors import taylor
from cachedit.schedules import every
from cachedit.strategies.checks import check_choice, check_count
from cachedit.strategies.rules import at_interval
from cachedit.strategy import Context, FeatureStrategy, Module, Site, Stack


@dataclass(frozen=True)
class TaylorSeer(FeatureStrategy):
    """Forecast by the Taylor expansion over the step index (arXiv 2503.06923).

    With D_0 the newest computed feature and D_{m+1} = (D_m - D_m at the computed step before) / gap, u steps later the
    feature is ``sum_m D_m u^m / m!``. While there are too few computed steps for ``order``, a lower one is used.

    The paper forecasts what every module gives before its gate, and in its light form only the state that leaves the
    stack. Ours: the light form forecasts the stack's residual, so what enters the stack is always fresh; and the order
    may be 0, which is plain reuse. diffusers' hook counts the first gap differently (interval 5 gives 0-2 4 9 14 ...).

    interval: one step in ``interval`` is computed after the warm-up, counted from its end (paper: 3 to 6 in 50 steps).
    order:    highest difference (paper: 1 to 4).
    warmup:   leading steps that are always computed (FLUX 3, DiT 2).
    scope:    "stack" keeps order + 1 residuals in all, "modules" as many of every attention and feed-forward module:
              the paper's own form, but gigabytes on large models.
    """

    interval: int = 4
    order: int = 1
    warmup: int = 3
    scope: Literal["stack", "modules"] = "stack"

    paper: ClassVar[str] = "arXiv 2503.06923"

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range.
        """
        every(1, self.interval, self.warmup)
        check_count(self, "order")
        check_choice(self, "scope", ("stack", "modules"))

    @property
    def sites(self) -> tuple[Site, ...]:
        """The whole stack, or every kind of module."""
        if self.scope == "stack":
            return (Stack(),)
        return Module("attn"), Module("temporal"), Module("cross"), Module("mlp")

    @property
    def depth(self) -> int:
        """As many as the highest difference reads."""
        return self.order + 1

    def should_compute(self, ctx: Context) -> bool | str:
        """The warm-up, then one step in ``interval``; a later expert begins anew."""
        return at_interval(ctx, self.interval, self.warmup)

    def weights(self, ctx: Context) -> Sequence[float]:
        """Those of the expansion."""
        return taylor(ctx.computed_steps, ctx.step, self.order)
