"""From a target to a schedule: the cheapest schedules of every budget, and what the frontier says of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from cachedit.errors import ProfileError
from cachedit.frontier import QUALITIES, Frontier
from cachedit.paths import CRITERIA
from cachedit.profile import Profile
from cachedit.solver import PREDICTORS, Solver
from cachedit.strategy import SHORT_RUN, Schedule

NEAR = 1.03  # a speed-up this close to the highest is reached by it
LOWER_IS_BETTER = ("lpips", "st_lpips")


@dataclass(frozen=True)
class Plan:
    """A static schedule, how it forecasts, and what it costs."""

    computed: tuple[int, ...]
    predictor: str
    criterion: str
    cost: float


class Planner:
    """Plans of one run.

    Args:
        profile: holds what ``Solver`` takes, and perhaps a frontier.
        schedule: of the run.
        handover: first step of a second expert, or the number of steps.
        terms: most residuals that a forecast may take.
        predictor, criterion: None for what did best at a budget.
    """

    def __init__(
        self,
        profile: Profile,
        schedule: Schedule,
        handover: int,
        terms: int,
        predictor: str | None = None,
        criterion: str | None = None,
    ) -> None:
        self.solver, self.frontier = Solver(profile, schedule, handover), Frontier.of(profile)
        self.steps, self.terms, self._fixed = self.solver.steps, terms, (predictor, criterion)
        self._every: dict[int, Plan] = {}

    @property
    def every(self) -> dict[int, Plan]:
        """Number of computed steps -> plan, of what was measured, and of the run in which nothing is reused."""
        if not self._every:
            lowest = 1 if self.frontier is None else min(point.nfe for point in self.frontier.near(self.steps))
            for nfe in range(min(lowest, self.steps), self.steps + 1):
                predictor, criterion = self._chosen(nfe)
                path = self.solver.paths(predictor, criterion).get(nfe)
                if path is not None:
                    self._every[nfe] = Plan(path, predictor, criterion, self.solver.cost(predictor, path))
        return self._every

    @property
    def gains(self) -> dict[int, float]:
        """Number of computed steps -> predicted speed-up, of every plan."""
        assert self.frontier is not None
        return {nfe: self.frontier.speedup(self.steps, nfe) for nfe in self.every}

    def within(self, budget: int) -> Plan:
        """The plan of that many computed steps, or of as many as the run has.

        Raises:
            ValueError: there is none of so few.
        """
        if budget < min(self.every):
            raise ValueError(
                f"max_nfe={budget}; allowed for {self.steps} steps: {min(self.every)} to {self.steps}. With fewer, "
                f"gaps would be wider than {self.solver.widest} steps, or were not measured."
            )
        return self.every[max(nfe for nfe in self.every if nfe <= budget)]

    def near(self, speedup: float) -> Plan:
        """The plan whose speed-up comes nearest. In a short run, where little may be reused, that may be far off.

        Raises:
            ValueError: it is higher than that of the fewest steps.
        """
        gains = self.gains
        if self.steps > SHORT_RUN and speedup > NEAR * max(gains.values()):
            raise ValueError(
                f"target_speedup={speedup:g}; allowed for {self.steps} steps: 1 to {max(gains.values()):.3g}, the "
                f"speed-up with {min(gains)} computed steps, the fewest that were measured. Ask for less."
            )
        return self.every[min(gains, key=lambda nfe: (abs(math.log(gains[nfe] / speedup)), -nfe))]

    def reaching(self, metric: str, limit: float) -> Plan:
        """The plan of the fewest computed steps that is expected to be at least as good as the limit.

        Raises:
            ProfileError: the metric was not measured.
            ValueError: the limit lies outside of what was measured.
        """
        assert self.frontier is not None
        if metric not in self.frontier.metrics:
            measured = ", ".join(QUALITIES[name] for name in self.frontier.metrics)
            raise ProfileError(
                f"the profile's frontier has no {QUALITIES[metric]}; allowed: {measured}. Calibrate where it can be "
                "computed, or ask for one of these."
            )
        low, high = self.frontier.range(metric, self.steps)
        if not low <= limit <= high:
            raise ValueError(
                f"{QUALITIES[metric]} {limit:g}; allowed for {self.steps} steps: {_digits(low, math.ceil)} to "
                f"{_digits(high, math.floor)}, which was measured. Ask for a value in between."
            )
        sign = -1 if metric in LOWER_IS_BETTER else 1
        for plan in self.every.values():
            if plan.cost == 0 or sign * self.frontier.quality(metric, self.steps, plan.cost) >= sign * limit:
                return plan
        return self.every[self.steps]

    def _chosen(self, nfe: int) -> tuple[str, str]:
        """Predictor and criterion at a budget."""
        predictor, criterion = self._fixed
        best_predictor, best_criterion = "fitted", "minimax"
        if self.frontier is not None:
            point = self.frontier.point(self.steps, nfe)
            best_predictor, best_criterion = [*PREDICTORS][point.predictor], [*CRITERIA][point.criterion]
        if PREDICTORS[best_predictor] > self.terms:
            best_predictor = "plain" if self.terms == 1 else "fitted"
        return predictor or best_predictor, criterion or best_criterion


def _digits(value: float, towards: Callable[[float], int]) -> str:
    """Four digits of an end of a range, cut so that they lie inside it."""
    if value == 0:
        return "0"
    scale = 10.0 ** (3 - math.floor(math.log10(abs(value))))
    return f"{towards(value * scale) / scale:.4g}"
