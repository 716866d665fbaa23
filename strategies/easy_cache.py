"""EasyCache: foretell how much the output changes from how much the latent did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cachedit.strategies.checks import check_count, check_number
from cachedit.strategies.rules import over_budget
from cachedit.strategy import Context, FeatureStrategy, Output, Site


@dataclass(frozen=True)
class EasyCache(FeatureStrategy):
    """Reuse the output's difference from the latent while the foretold change is small (arXiv 2507.02860).

    At computed steps a and b, one after the other, ``k = mean |v_a - v_b| / mean |x_a - x_b|`` is measured. From there
    on ``k * mean |x_i - x_{i-1}| / mean |v_a|`` is summed, and a step gives ``x_i + (v_a - x_a)`` while the sum is
    below ``threshold``. The last step is computed. The first branch of a step decides for the others.

    Ours: the warm-up is a share of the steps (paper: 10 of 50 for Wan2.1, 7 for Wan2.2, 5 for HunyuanVideo); the cap on
    reused steps in a row; every sample of a batch has its own k and its own sum.

    threshold:       summed change that forces a computation (0.05 for Wan, 0.025 for HunyuanVideo).
    retention_ratio: share of the leading steps that is always computed.
    max_skip_steps:  most reused steps in a row.
    """

    threshold: float = 0.05
    retention_ratio: float = 0.2
    max_skip_steps: int = 5

    paper: ClassVar[str] = "arXiv 2507.02860"
    site: ClassVar[Site] = Output(residual=True)
    signal: ClassVar[str] = "output_change"
    needs_schedule: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range.
        """
        check_number(self, "threshold")
        check_number(self, "retention_ratio", 1.0)
        check_count(self, "max_skip_steps")

    def should_compute(self, ctx: Context) -> bool | str:
        """The paper's rule; a later expert warms up anew."""
        assert ctx.schedule.num_steps is not None
        steps = ctx.expert_steps or ctx.schedule.num_steps
        if ctx.step - ctx.expert_start < round(steps * self.retention_ratio):
            return "warm-up"
        return over_budget(ctx, sum(ctx.signals), self.threshold, self.max_skip_steps)
