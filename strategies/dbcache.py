"""DBCache: the blocks at both ends always run, and those between are reused while the front ones hardly change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from cachedit.predictors import taylor
from cachedit.strategies.checks import check_count, check_number
from cachedit.strategy import Context, FeatureStrategy, Site, Stack


@dataclass(frozen=True)
class DBCache(FeatureStrategy):
    """Reuse the blocks between the first F and the last B of them (no arXiv; cache-dit's dual block cache).

    With d_i what the first F blocks add at step i, and a the last computed step, a step is reused if
    ``mean |d_i - d_a| / mean |d_a|`` is below ``threshold``, after the warm-up and within both caps. The last B blocks
    then run on the reused state and correct it. Published as F8B0, F1B0 for speed, F16B16 for few-step models.

    Ours: the cap on reused steps in a row (published: none, or 4 in the fast setting), and that every sample of a batch
    has its own change, the largest of which decides.

    front:            F, leading blocks that always run and are listened to: their number, or a share of the stack, at
                      least one block (0.14 of FLUX's 57 are the published 8).
    back:             B, last blocks that always run, likewise; front and back must leave a block between them.
    threshold:        relative change of the front residual that forces a computation (0.08 to 0.12).
    warmup:           leading steps that are always computed (8; 4 in the fast setting).
    max_skip_steps:   most reused steps in a row.
    max_cached_steps: most reused steps in a run; None sets no limit.
    order:            0 reuses the residual as it is, 1 or more forecasts it by its Taylor expansion (see TaylorSeer).
    """

    front: int | float = 0.14
    back: int | float = 0
    threshold: float = 0.08
    warmup: int = 8
    max_skip_steps: int = 4
    max_cached_steps: int | None = None
    order: int = 0

    paper: ClassVar[str] = "cache-dit (github.com/vipshop/cache-dit)"
    signal: ClassVar[str] = "first_blocks"

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range.
        """
        for name, lowest in (("front", 1), ("back", 0)):
            blocks = getattr(self, name)
            if not (isinstance(blocks, float) and 0 < blocks < 1):
                check_count(self, name, lowest=lowest)
        check_count(self, "warmup", "max_skip_steps", "order")
        if self.max_cached_steps is not None:
            check_count(self, "max_cached_steps")
        check_number(self, "threshold")

    @property
    def sites(self) -> tuple[Site, ...]:
        """The blocks between the front and the back."""
        return (Stack(self.front, -self.back or None),)

    @property
    def depth(self) -> int:
        """As many as the highest difference reads."""
        return self.order + 1

    def should_compute(self, ctx: Context) -> bool | str:
        """The warm-up, the caps, then the change of the front blocks; a later expert begins anew."""
        since_first = ctx.step - ctx.computed_steps[0]
        if since_first < self.warmup:
            return "warm-up"
        if ctx.step - ctx.computed_steps[-1] > self.max_skip_steps:
            return "max_skip_steps reached"
        if self.max_cached_steps is not None and since_first - len(ctx.computed_steps) >= self.max_cached_steps:
            return "max_cached_steps reached"
        return False if ctx.signals[-1] < self.threshold else "change reached the threshold"

    def weights(self, ctx: Context) -> Sequence[float] | None:
        """Those of the expansion."""
        return taylor(ctx.computed_steps, ctx.step, self.order) if self.order else None
