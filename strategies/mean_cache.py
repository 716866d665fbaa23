"""MeanCache: reuse the velocity, corrected by its mean over the latest part of the trajectory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from cachedit.predictors import mean_velocity
from cachedit.strategies.checks import check_count
from cachedit.strategies.clocks import times
from cachedit.strategy import Context, FeatureStrategy, Output, Site

PUBLISHED: dict[int, tuple[int, ...]] = {
    25: (*range(17), 24, 32, 40, 43, 45, 47, 48, 49),
    17: (*range(9), 10, 17, 24, 31, 38, 45, 48, 49),
    10: (0, 1, 3, 7, 14, 21, 28, 35, 42, 49),
}
"""Computed steps of 50 by their number, released for Qwen-Image."""
PUBLISHED_STEPS = 50


@dataclass(frozen=True)
class MeanCache(FeatureStrategy):
    """Cache the model output and correct it by the mean velocity (arXiv 2601.19961).

    What a flow model gives at a step is a velocity; the mean velocity of a stretch is what the latent moved in it, over
    how far the noise level did. The difference between the velocity at the start of the stretch and its mean tells how
    fast the velocity changes, and the last velocity is moved on by that: a damped line.

    The paper finds the computed steps and one span per gap for each model offline. Ours: the lists released for
    Qwen-Image, stretched to the number of steps, and one span; the output of every branch in the place of the guided
    one, which is the same while guidance is a fixed mix; a mean over computed velocities only, in one step.

    budget:  how many of 50 steps are computed: 25, 17 or 10; of other numbers of steps about that share.
    compute: step indices that are computed, in rising order, instead of a published list.
    span:    computed velocities that the mean covers, 1 or more (paper: 1 to 6); 1 is plain reuse.
    """

    budget: Literal[25, 17, 10] = 17
    compute: tuple[int, ...] | None = None
    span: int = 2

    paper: ClassVar[str] = "arXiv 2601.19961"
    site: ClassVar[Site] = Output()
    needs_schedule: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range.
        """
        if type(self.budget) is not int or self.budget not in PUBLISHED:
            raise ValueError(f"MeanCache budget={self.budget!r}; allowed: 25, 17, 10; or list the steps in compute=")
        if self.compute is not None and not _rising(self.compute):
            raise ValueError(f"MeanCache compute={self.compute!r}; allowed: a tuple of rising step indices, or None")
        check_count(self, "span", lowest=1)

    @property
    def depth(self) -> int:
        """As many as the mean covers."""
        return self.span

    def computed_of(self, steps: int) -> tuple[int, ...]:
        """The computed steps of a run of ``steps``; a published list by place in the schedule, first to last step."""
        if self.compute is not None:
            return self.compute
        places = (step / (PUBLISHED_STEPS - 1) for step in PUBLISHED[self.budget])
        return tuple(dict.fromkeys(round(place * (steps - 1)) for place in places))

    def should_compute(self, ctx: Context) -> bool:
        """At the listed steps."""
        assert ctx.schedule.num_steps is not None
        return ctx.step in self.computed_of(ctx.schedule.num_steps)

    def weights(self, ctx: Context) -> Sequence[float]:
        """Those of the corrected velocity, over noise levels where they are known."""
        return mean_velocity(*times(ctx, "sigma"), self.span)


def _rising(steps: object) -> bool:
    if not isinstance(steps, tuple) or not steps or any(type(step) is not int or step < 0 for step in steps):
        return False
    return list(steps) == sorted(set(steps))
