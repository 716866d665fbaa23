"""Static schedules of one run, solved from what calibration stored over noise level."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from cachedit.distances import Distances
from cachedit.errors import ProfileError
from cachedit.paths import shortest_paths
from cachedit.profile import Profile
from cachedit.sensitivity import sensitivity_of
from cachedit.strategy import FEW_STEPS, SHORT_RUN, Axes, Schedule

PREDICTORS = {"plain": 1, "line": 2, "quadratic": 3, "fitted": 2, "damped": 2}
"""Predictor -> how many computed residuals it takes. Profiles store places in it: new ones go to its end."""
RIDGES = {"fitted": 0.3, "damped": 1.5}  # what is computed after a forecast differs from what weights were fitted to
WIDEST = 8  # steps between computed ones
ARRAYS: Axes = {"sensitivity": ("step",), "residual_distance": ("pair",), "residual_square": ("step",)}


def check_measured(profile: Profile) -> None:
    """Raise ProfileError unless distances and squares are those of the same branches."""
    distances, squares = profile.arrays["residual_distance"], profile.arrays["residual_square"]
    if distances.keys() != squares.keys():
        raise ProfileError(
            f"field 'arrays.residual_square' holds {', '.join(squares)}; allowed: {', '.join(distances)}, as "
            "'residual_distance' does. Calibrate again."
        )


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
        self.sensitivity = sensitivity_of(profile, schedule)
        distances, squares = profile.arrays["residual_distance"], profile.arrays["residual_square"]
        known, wanted = profile.levels(schedule, len(next(iter(squares.values()))))
        self.distances = Distances.over(distances, squares, known, wanted)
        falling = all(later < earlier for earlier, later in itertools.pairwise(wanted))
        self._times = np.asarray(wanted if falling else range(self.steps), dtype=float)
        self.widest = 1 if self.steps <= FEW_STEPS else 2 if self.steps <= SHORT_RUN else WIDEST
        self._paths: dict[tuple[str, str], dict[int, tuple[int, ...]]] = {}
        self._priced: dict[str, dict[tuple[int, ...], list[float]]] = {}

    def paths(self, predictor: str, criterion: str) -> dict[int, tuple[int, ...]]:
        """Number of computed steps -> the steps, for every budget that there is a schedule for."""
        if (predictor, criterion) not in self._paths:
            found = shortest_paths(
                self.steps, PREDICTORS[predictor], lambda tail: self._costs(predictor, tail), criterion
            )
            self._paths[predictor, criterion] = found
        return self._paths[predictor, criterion]

    def cost(self, predictor: str, path: Sequence[int]) -> float:
        """What a schedule costs."""
        total = 0.0
        for k, (start, end) in enumerate(itertools.pairwise((*path, self.steps)), 1):
            tail = tuple(path[max(0, k - PREDICTORS[predictor]) : k])
            total += self._costs(predictor, tail)[end - start - 1]
        return total

    def weights(self, predictor: str, computed: Sequence[int], step: int) -> list[float]:
        """How a step is forecast from the computed ones, oldest first; those that count for nothing get 0."""
        used = np.asarray(computed[-PREDICTORS[predictor] :])
        row = self._weights(predictor, used, np.asarray([step]))[0]
        return [0.0] * (len(computed) - len(row)) + [float(weight) for weight in row]

    def _weights(self, predictor: str, computed: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """``[..., S, K]``, how ``steps [..., S]`` are forecast from ``computed [..., K]``, K what is taken or fewer."""
        if predictor in RIDGES and computed.shape[-1] == 2:
            return self.distances.fitted(computed[..., 0], computed[..., 1], steps, RIDGES[predictor])
        return _lagrange(self._times[computed], self._times[steps])

    def _costs(self, predictor: str, tail: tuple[int, ...]) -> list[float]:
        """Cost of computing next 1, 2, ... steps after the newest of ``tail``; inf where the handover is in between."""
        if predictor not in self._priced:
            self._priced[predictor] = self._all_costs(PREDICTORS[predictor], predictor)
        return self._priced[predictor][tuple(step for step in tail if self._expert(step) == self._expert(tail[-1]))]

    def _all_costs(self, depth: int, predictor: str) -> dict[tuple[int, ...], list[float]]:
        """The costs after every few computed steps of one expert that a forecast can be made of."""
        found: dict[tuple[int, ...], list[float]] = {}
        tails: list[tuple[int, ...]] = [(step,) for step in range(self.steps)]
        while tails and len(tails[0]) <= depth:
            found |= zip(tails, self._after(predictor, np.asarray(tails)), strict=True)
            tails = [
                (*tail, step)
                for tail in tails
                for step in range(tail[-1] + 1, min(tail[-1] + self.widest + 1, self.steps))
                if self._expert(step) == self._expert(tail[-1])
            ]
        return found

    def _after(self, predictor: str, computed: np.ndarray) -> list[list[float]]:
        """The costs after each of ``computed [N, K]``, the sums over what would be reused."""
        newest = computed[:, -1]
        reused = newest[:, None] + np.arange(1, self.widest)  # [N, widest - 1], beyond the end cut off below
        inside = np.minimum(reused, self.steps - 1)
        errors = self.distances.errors(computed, self._weights(predictor, computed, inside), inside)
        sums = np.cumsum(errors * self.sensitivity[inside], axis=1)
        sums = np.concatenate([np.zeros((len(computed), 1)), sums], axis=1)
        following = newest[:, None] + np.arange(1, self.widest + 1)
        sums[(newest[:, None] < self.handover) & (following > self.handover)] = np.inf
        return [row[: self.steps - last] for row, last in zip(sums.tolist(), newest.tolist(), strict=True)]

    def _expert(self, step: int) -> bool:
        return step >= self.handover


def _lagrange(times: np.ndarray, now: np.ndarray) -> np.ndarray:
    """``[..., S, K]``: ``cachedit.predictors.lagrange`` through all of ``times [..., K]`` at ``now [..., S]``."""
    count = times.shape[-1]
    rows = np.ones((*now.shape, count))
    for k, j in itertools.permutations(range(count), 2):
        node, other = times[..., k, None], times[..., j, None]
        rows[..., k] *= (now - other) / (node - other)
    return rows
