"""LeMiCa: choose the computed steps so that the worst reused stretch costs the final sample least."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from cachedit.profile import Profile
from cachedit.schedules import edge_costs, minimax, resample_amplification
from cachedit.strategies.checks import check_count
from cachedit.strategy import Axes, Context, FeatureStrategy, Schedule


@dataclass(frozen=True)
class LeMiCa(FeatureStrategy):
    """Spread a budget of computed steps so that the costliest gap costs least (arXiv 2511.00090).

    A gap from step i to step j, both computed, reuses the residual of i in between and costs what that changes in the
    final sample. Among all ways from the first to the last step in ``budget`` computed steps the one is taken whose
    worst gap is cheapest; among equals the one whose second worst gap is, and so on.

    The paper measures every gap by runs of its own, some 140 full runs per prompt at 50 steps, and publishes lists of
    computed steps for a few models and budgets, but not the measurements. Ours: the cost of a gap is the sum over its
    reused steps t of ``|r_i - r_t| / |r_t| * amplification_t``, where the amplification is what a relative error of 1
    at step t alone does to the final sample (T - 1 runs or fewer). So the units of the costs are the paper's, and one
    profile serves any budget, any number of steps and any noise levels. Of several branches the one with the largest
    error counts. A gap never spans two experts, whose first steps are computed.

    budget:  computed steps of a run.
    speedup: steps / budget, in place of it; as close to it as ``max_gap`` allows (2).
    max_gap: largest distance between computed steps; None: the largest that was measured (the paper's lists: 7 to 10).
    """

    budget: int | None = None
    speedup: float | None = None
    max_gap: int | None = None

    paper: ClassVar[str] = "arXiv 2511.00090"
    profile_arrays: ClassVar[Axes] = {"residual_error": ("step", "gap"), "amplification": ("step",)}
    needs_schedule: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range, or both a budget and a speed-up.
        """
        if self.budget is not None and (type(self.budget) is not int or self.budget < 1):
            raise ValueError(f"LeMiCa budget={self.budget!r}; allowed: a number of steps, 1 or more")
        if self.speedup is not None and (type(self.speedup) not in (int, float) or not 1 <= self.speedup < math.inf):
            raise ValueError(f"LeMiCa speedup={self.speedup!r}; allowed: a number, 1 or more")
        if self.budget is not None and self.speedup is not None:
            raise ValueError(f"LeMiCa budget={self.budget}, speedup={self.speedup}; allowed: one of the two")
        if self.max_gap is not None:
            check_count(self, "max_gap", lowest=2)

    def configured(self, profile: Profile | None) -> LeMiCa:
        """Open options from the profile's recommendation; with none a speed-up of 2."""
        known = profile.defaults if profile is not None else {}
        strategy = replace(self, max_gap=self.max_gap or known.get("max_gap"))
        if self.budget is not None or self.speedup is not None:
            return strategy
        speedup = None if "budget" in known else known.get("speedup", 2.0)
        return replace(strategy, budget=known.get("budget"), speedup=speedup)

    def check_run(self, schedule: Schedule, profile: Profile | None) -> None:
        """Solve for the noise levels of the run.

        Raises:
            ValueError: they allow no schedule of this budget, or lie outside of the measured ones.
        """
        assert profile is not None
        assert schedule.num_steps is not None
        self.computed(schedule, profile, schedule.num_steps)

    def should_compute(self, ctx: Context) -> bool:
        """The steps on the path."""
        assert ctx.profile is not None
        assert ctx.schedule.num_steps is not None
        handover = ctx.expert_start or ctx.expert_steps or ctx.schedule.num_steps
        return ctx.step in self.computed(ctx.schedule, ctx.profile, handover)

    def computed(self, schedule: Schedule, profile: Profile, handover: int) -> tuple[int, ...]:
        """Computed steps of a run, solved once. ``handover``: first step of a second expert, or the number of steps."""
        return profile.once((self, schedule, handover), lambda: self._path(schedule, profile, handover))

    def _path(self, schedule: Schedule, profile: Profile, handover: int) -> tuple[int, ...]:
        costs = _costs(schedule, profile)
        last, widest = len(costs) - 1, len(costs[0]) - 1
        if self.max_gap is not None and self.max_gap > widest:
            raise ValueError(f"LeMiCa max_gap={self.max_gap}; allowed: up to {widest}, the largest gap measured")
        widest = self.max_gap or widest
        for i, row in enumerate(costs):
            across = range(handover - i + 1, widest + 1) if i < handover else ()
            costs[i] = [math.inf if gap in across else cost for gap, cost in enumerate(row[: widest + 1])]
        if self.budget is not None:
            return minimax(costs, self.budget)
        assert self.speedup is not None
        lowest = 1 + sum(math.ceil(span / widest) for span in (min(handover, last), max(last - handover, 0)))
        return minimax(costs, min(len(costs), max(lowest, round(len(costs) / self.speedup))))


def _costs(schedule: Schedule, profile: Profile) -> list[list[float]]:
    """What every gap changes in the final sample, as in ``cachedit.schedules``."""
    tables = profile.errors("residual_error", schedule).values()
    worst = [[max(errors) for errors in zip(*rows, strict=True)] for rows in zip(*tables, strict=True)]
    amplification = next(iter(profile.arrays["amplification"].values()))
    levels = profile.levels(schedule, len(amplification))
    return edge_costs(worst, resample_amplification(amplification, *levels))
