"""CacheQuant: a schedule that was optimised for the model, and a correction of what it reuses."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from cachedit.profile import Profile
from cachedit.schedules import edge_costs, min_sum
from cachedit.strategies.checks import check_choice, check_count
from cachedit.strategies.corrected import Corrected, worst
from cachedit.strategy import Axes, Schedule, Site, Skip, Stack


@dataclass(frozen=True)
class CacheQuant(Corrected):
    """Reuse over groups of steps chosen by dynamic programming, and correct what is reused (arXiv 2503.01323).

    With an interval N the run is split into ``ceil(T / N)`` groups of ``ceil(N / 2)`` to ``2 N`` steps, of which the
    first is computed, so that the sum of all steps' errors against the first of their group is least. At the other
    steps the feature is ``a y + b``, with the least squares a and b of every step and channel.

    The paper's other half, which quantises the weights and folds a correction of that into them, is no caching and is
    not here. Ours: errors are relative to the step, not absolute, and groups end at the widest gap of the table; the
    schedule is solved again for every number of steps; the correction is kept only if it brings the latents of a
    prompt that it was not fitted on nearer to the uncached ones. On a transformer, as in the paper, the feature is the
    residual of the blocks.

    interval:   steps per computed one, on average (paper: 2 on DiT-XL, 5 on UNets; 2, or 3 with scope "skip").
    scope:      "stack" for transformers; "skip" for UNets, where the paper caches what enters the last layers.
    correction: apply the calibrated a and b, which hold for the steps and the interval of the calibration alone.
    """

    interval: int | None = None
    scope: Literal["stack", "skip"] = "stack"

    paper: ClassVar[str] = "arXiv 2503.01323"
    profile_arrays: ClassVar[Axes] = {"residual_error": ("step", "gap"), **Corrected.profile_arrays}

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range.
        """
        super().__post_init__()
        if self.interval is not None:
            check_count(self, "interval", lowest=1)
        check_choice(self, "scope", ("stack", "skip"))

    @property
    def sites(self) -> tuple[Site, ...]:
        """The stack, or the feature that enters the outermost layer of a UNet's way up."""
        return (Stack(),) if self.scope == "stack" else (Skip(),)

    def configured(self, profile: Profile | None) -> CacheQuant:
        """An open interval from the profile, else 2, or 3 for the skip features."""
        usual = 2 if self.scope == "stack" else 3
        recommended = profile.defaults.get("interval", usual) if profile is not None else usual
        return self if self.interval is not None else replace(self, interval=recommended)

    def computed(self, schedule: Schedule, profile: Profile) -> tuple[int, ...]:
        """The first steps of the groups."""
        assert self.interval is not None
        interval = self.interval
        return profile.once(("CacheQuant", interval, schedule), lambda: _groups(schedule, profile, interval))


def _groups(schedule: Schedule, profile: Profile, interval: int) -> tuple[int, ...]:
    """First steps of the groups."""
    costs = edge_costs(worst(profile.errors("residual_error", schedule)))
    steps, widest = len(costs), len(costs[0]) - 1
    longest = min(2 * interval, widest)
    budget = max(math.ceil(steps / interval), math.ceil(steps / longest))
    return min_sum(costs, budget, min(math.ceil(interval / 2), steps // budget), longest)
