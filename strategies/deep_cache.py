"""DeepCache: on most steps run only the outermost layers of a UNet, on the deep feature of an earlier step."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

from cachedit.profile import Profile
from cachedit.schedules import every, quad_center
from cachedit.strategies.checks import check_count
from cachedit.strategy import Context, FeatureStrategy, Schedule, Site, Skip


@dataclass(frozen=True)
class DeepCache(FeatureStrategy):
    """Reuse the deep feature of a UNet and run only what lies above it (arXiv 2312.00858).

    The feature is what enters a layer on the way up, before it meets the skip connection. Of the way down, a reused
    pass runs what gives the skip connections from there on.

    Published code counts the layers through (``cache_branch_id``, three to a level in Stable Diffusion); here they are
    named by level and layer. The paper gives the center as a step of 50 (15 there); ours is a share of the run.

    interval: one step in ``interval`` is computed (paper: 2 to 10).
    level:    of the layer, from the outside in.
    layer:    in its level, from the outside in; level 0, layer 0 runs least.
    center:   share of the run around which computed steps are dense; None spaces them evenly (paper: 0.3, or even).
    power:    how dense, above 1 and up to 10 (paper: 1.4).
    """

    interval: int = 3
    level: int = 0
    layer: int = 0
    center: float | None = None
    power: float = 1.4

    paper: ClassVar[str] = "arXiv 2312.00858"

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range.
        """
        every(1, self.interval)
        check_count(self, "level", "layer")
        if self.center is not None and (type(self.center) not in (int, float) or not 0 < self.center < 1):
            raise ValueError(f"DeepCache center={self.center!r}; allowed: a share between 0 and 1, or None")
        if type(self.power) not in (int, float) or not 1 < self.power <= 10:
            raise ValueError(f"DeepCache power={self.power!r}; allowed: a number above 1 and up to 10")

    @property
    def sites(self) -> tuple[Site, ...]:
        """One layer on the way up."""
        return (Skip(self.level, self.layer),)

    def check_run(self, schedule: Schedule, profile: Profile | None) -> None:
        """Uneven steps must be laid out over the run.

        Raises:
            ValueError: its length is not known, or the options give no such steps.
        """
        if self.center is None:
            return
        if schedule.num_steps is None:
            raise ValueError(
                f"DeepCache center={self.center!r} must know the number of steps, and the model is driven by hand. "
                "Pass timesteps=scheduler.timesteps or num_inference_steps=N to cachedit.wrap, or center=None."
            )
        _uneven(schedule.num_steps, self.interval, self.center, self.power)

    def should_compute(self, ctx: Context) -> bool:
        """One step in ``interval``, even or dense around the center."""
        if self.center is None:
            return (ctx.step - ctx.computed_steps[0]) % self.interval == 0
        assert ctx.schedule.num_steps is not None
        return ctx.step in _uneven(ctx.schedule.num_steps, self.interval, self.center, self.power)


@functools.lru_cache
def _uneven(steps: int, interval: int, center: float, power: float) -> tuple[int, ...]:
    return quad_center(steps, interval, int(center * steps), power)
