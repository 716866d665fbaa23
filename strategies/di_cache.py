"""DiCache: the first blocks tell when to reuse, and how far along the line through the last two residuals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from cachedit.strategies.checks import check_count, check_number
from cachedit.strategies.rules import over_budget
from cachedit.strategy import Context, FeatureStrategy, Site, Stack

FURTHEST = 1.5  # of the way from the older residual to the newer one


@dataclass(frozen=True)
class DiCache(FeatureStrategy):
    """Let the first blocks, as a probe, decide when and how to reuse the others (arXiv 2508.17356).

    The probe runs at every step. ``|relative change of its state - relative change of what enters it|`` since the step
    before is summed from the last computed step on, and a step is reused while the sum is below ``threshold``. With p
    what the probe adds now, p1 and p2 what it added at the newest and the second newest computed step, the reused
    residual is ``r2 + g (r1 - r2)``, where ``g = mean |p - p2| / mean |p1 - p2|``, clipped to [1, 1.5].

    Ours: the residual is that of the blocks behind the probe, since what the probe adds is there fresh (the authors'
    code forecasts both); the cap on reused steps in a row, without which a quiet beginning is skipped in one go; a
    fifth of warm-up by default (the authors: none with this error, a fifth with their other one, the probe's change
    alone at 0.4); every sample of a batch has its own sum and its own g.

    threshold:       summed difference of the two changes that forces a computation.
    retention_ratio: share of the leading steps that is always computed.
    max_skip_steps:  most reused steps in a row.
    probe:           leading blocks that form the probe (1 to 5).
    """

    threshold: float = 0.08
    retention_ratio: float = 0.2
    max_skip_steps: int = 3
    probe: int = 1

    paper: ClassVar[str] = "arXiv 2508.17356"
    signal: ClassVar[str] = "probe_gap"
    history: ClassVar[int] = 2
    needs_schedule: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range.
        """
        check_number(self, "threshold")
        check_number(self, "retention_ratio", 1.0)
        check_count(self, "max_skip_steps")
        check_count(self, "probe", lowest=1)

    @property
    def sites(self) -> tuple[Site, ...]:
        """The blocks behind the probe."""
        return (Stack(self.probe),)

    def should_compute(self, ctx: Context) -> bool | str:
        """The authors' rule; a later expert warms up anew."""
        assert ctx.schedule.num_steps is not None
        steps = ctx.expert_steps or ctx.schedule.num_steps
        if ctx.step - ctx.expert_start <= int(steps * self.retention_ratio):
            return "warm-up"
        return over_budget(ctx, sum(ctx.signals), self.threshold, self.max_skip_steps)

    def weights(self, ctx: Context) -> Sequence[float] | None:
        """The line through the two residuals, as far along as the probe has gone."""
        if len(ctx.computed_steps) < 2:
            return None
        way = min(max(ctx.trend, 1.0), FURTHEST)
        return 1.0 - way, way
