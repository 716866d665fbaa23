"""Static schedules of one run, solved from what calibration stored over noise level."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from cachedit.distances import Distances
from cachedit.paths import shortest_paths
from cachedit.predictors import lagrange
from cachedit.profile import Profile
from cachedit.schedules import resample_amplification
from cachedit.strategy import FEW_STEPS, SHORT_RUN, Schedule

PREDICTORS = {"plain": 1, "line": 2, "quadratic": 3, "fitted": 2, "damped": 2}
"""Predictor -> how many computed residuals it takes. Profiles store places in it: new ones go to its end."""
RIDGES = {"fitted": 0.3, "damped": 1.5}  # what is computed after a forecast differs from what weights were fitted to
WIDEST = 8  # steps between computed ones
ARRAYS = ("sensitivity", "residual_distance", "residual_square")


class Solver:
    """What every schedule of a run would cost, and the cheapest of every budget.

    The cost of a schedule is the sum over its reused steps of the relative error of the forecast, times what an error
    at that step does to the final sample.

    Args:
        profile: holds ``ARRAYS``.
        schedule: of the run, with its number of steps.
        handover: first step of a second expert, which is computed and draws on nothing before it; the number of steps
            where there is none.
    """

    def __init__(self, profile: Profile, schedule: Schedule, handover: int) -> None:
        assert schedule.num_steps is not None
        self.steps, self.handover = schedule.num_steps, handover
        sensitivity = next(iter(profile.arrays["sensitivity"].values()))
        known, wanted = profile.levels(schedule, len(sensitivity))
        self.sensitivity = np.asarray(resample_amplification(sensitivity, known, wanted))
        distances, squares = profile.arrays["residual_distance"], profile.arrays["residual_square"]
        self.distances = Distances.over(distances, squares, known, wanted)
        falling = all(later < earlier for earlier, later in itertools.pairwise(wanted))
        self._times: Sequence[float] = wanted if falling else range(self.steps)
        self.widest = 1 if self.steps <= FEW_STEPS else 2 if self.steps <= SHORT_RUN else WIDEST
        self._paths: dict[tuple[str, str], dict[int, tuple[int, ...]]] = {}

    def paths(self, predictor: str, criterion: str) -> dict[int, tuple[int, ...]]:
        """Number of computed steps -> the steps, for every budget that there is a schedule for."""
        if (predictor, criterion) not in self._paths:
            costs: dict[tuple[int, ...], list[float]] = {}

            def cost(tail: tuple[int, ...], step: int) -> float:
                if tail not in costs:
                    costs[tail] = self._costs(predictor, tail)
                return costs[tail][step - tail[-1] - 1]

            found = shortest_paths(self.steps, self.widest, PREDICTORS[predictor], cost, criterion)
            self._paths[predictor, criterion] = found
        return self._paths[predictor, criterion]

    def cost(self, predictor: str, path: Sequence[int]) -> float:
        """What a schedule costs."""
        total = 0.0
        for k, (start, end) in enumerate(itertools.pairwise((*path, self.steps)), 1):
            tail = tuple(path[max(0, k - PREDICTORS[predictor]) : k])
            total += self._costs(predictor, tail)[end - start - 1]
        return total

    def weights(self, predictor: str, computed: Sequence[int], steps: Sequence[int]) -> np.ndarray:
        """``[len(steps), K]``, how each step is forecast from the K newest computed ones, oldest first."""
        computed = computed[-PREDICTORS[predictor] :]
        if predictor in RIDGES and len(computed) == 2:
            return self.distances.fitted(computed[0], computed[1], steps, RIDGES[predictor])
        times = [self._times[step] for step in computed] if predictor in ("line", "quadratic") else [0.0]
        rows = [lagrange(times, self._times[step], len(times) - 1) for step in steps]
        return np.array([[0.0] * (len(computed) - len(row)) + row for row in rows]).reshape(len(steps), len(computed))

    def _costs(self, predictor: str, tail: tuple[int, ...]) -> list[float]:
        """Cost of computing next 1, 2, ... steps after the newest of ``tail``; inf where the handover is in between."""
        newest = tail[-1]
        own = [step for step in tail if (step >= self.handover) == (newest >= self.handover)]
        reused = range(newest + 1, min(newest + self.widest, self.steps))
        errors = self.distances.errors(own, self.weights(predictor, own, reused), reused)
        sums = np.concatenate([[0.0], np.cumsum(errors * self.sensitivity[newest + 1 : reused.stop])])
        if newest < self.handover:
            sums[self.handover - newest :] = np.inf
        return [float(value) for value in sums]
