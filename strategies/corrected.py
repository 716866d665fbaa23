"""What strategies share that compute the steps of a solved list and correct what they reuse at the others."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from cachedit.errors import ProfileError
from cachedit.profile import Profile
from cachedit.schedules import Table
from cachedit.strategy import Axes, Context, FeatureStrategy, Schedule

ROWS = ("correction_scale", "correction_shift")


@dataclass(frozen=True)
class Corrected(FeatureStrategy, abstract=True):
    """Computes the steps of a list and corrects, at the others, what it reuses by calibrated rows.

    correction: apply the rows. They hold for the steps and the list that they were fitted on; False lifts that limit.
    """

    correction: bool = True

    profile_arrays: ClassVar[Axes] = {"correction_mask": ("step",)} | dict.fromkeys(ROWS, ("step", "channel"))
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
