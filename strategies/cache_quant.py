"""CacheQuant: a schedule that was optimised for the model, and a correction of what it reuses."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from cachedit.errors import ProfileError
from cachedit.profile import Profile
from cachedit.schedules import Table, edge_costs, min_sum
from cachedit.strategy import Context, FeatureStrategy, Schedule, Site, Skip, Stack

ROWS = ("correction_scale", "correction_shift")


@dataclass(frozen=True)
class Corrected(FeatureStrategy, abstract=True):
    """Computes the steps of a list and corrects, at the others, what it reuses by calibrated rows.

    correction: apply the rows. They hold for the steps and the list that they were fitted on; False lifts that limit.
    """

    correction: bool = True

    profile_arrays: ClassVar[tuple[str, ...]] = ("correction_mask", *ROWS)
    fitted: ClassVar[tuple[str, ...]] = ("correction",)
    needs_schedule: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range.
        """
        for name in self.fitted:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{type(self).__name__} {name}={getattr(self, name)!r}; allowed: True, False")

    def computed(self, schedule: Schedule, profile: Profile) -> tuple[int, ...]:
        """The steps that are computed, rising from 0."""
        raise NotImplementedError

    def should_compute(self, ctx: Context) -> bool | str:
        """The steps of the list."""
        assert ctx.profile is not None
        return ctx.step in self.computed(ctx.schedule, ctx.profile)

    def correct(self, ctx: Context) -> tuple[Sequence[float], Sequence[float]] | None:
        """The rows of this step and branch, if there are any and it reuses the step that they were fitted for."""
        assert ctx.profile is not None
        rows = [ctx.profile.arrays.get(name, {}).get(ctx.branch) for name in ROWS]
        if not self.correction or rows[0] is None or rows[1] is None or not corrects(ctx.profile):
            return None
        computed = self.computed(ctx.schedule, ctx.profile)
        last = computed[bisect.bisect(computed, ctx.step) - 1]
        if ctx.computed_steps[-1] != max(last, ctx.expert_start):  # a later expert begins with a computed step
            return None
        return rows[0][ctx.step], rows[1][ctx.step]

    def check_run(self, schedule: Schedule, profile: Profile | None) -> None:
        """Raise ProfileError if there are rows, and they were fitted on other steps or another list."""
        assert profile is not None
        if self.correction and corrects(profile):
            self._check_fitted(schedule, profile)

    def _check_fitted(self, schedule: Schedule, profile: Profile) -> None:
        without = ", ".join([f"{name}=False" for name in self.fitted if getattr(self, name)])
        try:
            profile.check_same_schedule(schedule, type(self).__name__)
        except ProfileError as error:
            raise ProfileError(f"{error} With {without} it runs on any steps.") from error
        mask = next(iter(profile.arrays["correction_mask"].values()))
        fitted, wanted = tuple([i for i, one in enumerate(mask) if one]), self.computed(schedule, profile)
        if fitted != wanted:
            raise ProfileError(
                f"{type(self).__name__} computes steps {' '.join(map(str, wanted))} with these options, and the "
                f"profile was fitted while {' '.join(map(str, fitted))} were computed. Allowed: the options of the "
                f"calibration, which are the profile's defaults, or {without}. Or calibrate with these options."
            )


def corrects(profile: Profile) -> bool:
    """True if the rows of the profile change anything; calibration keeps none that do not help."""

    def found() -> bool:
        rows = [(row, same) for name, same in zip(ROWS, (1, 0), strict=True) for row in profile.arrays[name].values()]
        return any(value != same for steps, same in rows for channels in steps for value in channels)

    return ROWS[0] in profile.arrays and profile.once("corrects", found)


def worst(tables: Mapping[str, Table]) -> list[list[float]]:
    """Of several branches, entry by entry, the one with the largest error."""
    return [[max(cell) for cell in zip(*rows, strict=True)] for rows in zip(*tables.values(), strict=True)]


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
    profile_arrays: ClassVar[tuple[str, ...]] = ("residual_error", *Corrected.profile_arrays)

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range.
        """
        super().__post_init__()
        if self.interval is not None and (type(self.interval) is not int or self.interval < 1):
            raise ValueError(f"CacheQuant interval={self.interval!r}; allowed: an integer, 1 or more")
        if self.scope not in ("stack", "skip"):
            raise ValueError(f"CacheQuant scope={self.scope!r}; allowed: 'stack', 'skip'")

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
