"""FirstBlockCache: reuse the other blocks while the first one gives much the same as at the last computed step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cachedit.strategies.checks import check_count, check_number
from cachedit.strategy import Context, FeatureStrategy, Site, Stack


@dataclass(frozen=True)
class FirstBlockCache(FeatureStrategy):
    """Run the first block at every step and the others when its residual has changed (no arXiv; ParaAttention).

    With d_i what the first block adds at step i, and a the last computed step, a step is computed if
    ``mean |d_i - d_a| / mean |d_a|`` is above ``threshold``, else the other blocks' residual is reused. The distance is
    from the last computed step, so nothing accumulates and the threshold hardly depends on the number of steps.

    Ours: the cap on reused steps in a row, which keeps one threshold safe for models it was not tuned on. ParaAttention
    measures one distance for the whole batch, here every sample has its own, and the largest decides.

    threshold:      relative change of the first block's residual that forces a computation (0.05 to 0.12).
    max_skip_steps: most reused steps in a row.
    """

    threshold: float = 0.08
    max_skip_steps: int = 3

    paper: ClassVar[str] = "ParaAttention (github.com/chengzeyi/ParaAttention)"
    site: ClassVar[Site] = Stack(1)
    signal: ClassVar[str] = "first_blocks"

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range.
        """
        check_number(self, "threshold")
        check_count(self, "max_skip_steps")

    def should_compute(self, ctx: Context) -> bool | str:
        """Whether the first block has changed."""
        if ctx.step - ctx.computed_steps[-1] > self.max_skip_steps:
            return "max_skip_steps reached"
        return "change above the threshold" if ctx.signals[-1] > self.threshold else False
