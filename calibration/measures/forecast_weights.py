"""Weights that forecast a skipped residual from the computed ones before it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from cachedit.calibration.measure import Arrays, Measure, check_finite
from cachedit.feature.place import Residual
from cachedit.run import Step
from cachedit.strategies.l2p import L2P
from cachedit.strategy import FeatureStrategy, Site, Stack

RIDGE = 0.1  # of the mean squared difference between computed residuals
ROUNDING = 1e-12  # squared differences up to this share of the squared residual are those of rounding in float32


class ForecastWeights(Measure):
    """``weights[t][k]``, oldest first: the sum over k of weights * residual k is nearest to the residual of step t.

    The residuals are the last ``terms`` that a run with the strategy's schedule would have computed by then; a row for
    fewer has zeros in front, and that of a computed step is the newest alone. The sum of squared errors runs over all
    branches and prompts together, each divided by the squared norm of its residual so that all count alike. With the
    weights summing to 1 it is a fit to the differences from the newest residual y0:
    ``y_t - y0 = sum over k of v_k * (y_k - y0)``, ridged. No residual is kept but those of the schedule.
    """

    makes: ClassVar[dict[str, tuple[str, ...]]] = {"forecast_weights": ("step", "term")}

    def __init__(self, strategy: FeatureStrategy) -> None:
        super().__init__(strategy)
        if not isinstance(strategy, L2P):
            raise TypeError(f"got {type(strategy).__name__}; allowed: L2P, whose schedule the weights are fitted for")
        self.l2p = strategy.configured(None)
        self.defaults = {"interval": self.l2p.interval, "warmup": self.l2p.warmup, "terms": self.l2p.terms}

    @property
    def sites(self) -> tuple[Site, ...]:
        """The whole stack."""
        return (Stack(),)

    def start(self, k: int) -> None:
        """Nothing is computed yet."""
        self._begun: dict[str, int] = {}
        self._kept: dict[tuple[str, str], deque[Residual]] = {}
        self._equations: list[tuple[int, list[list[float]], list[float]]] = []

    def watch(self, step: Step, values: Mapping[Site, Residual]) -> None:
        """Keep what a run would compute, and compare with what is kept where it would not."""
        begun = self._begun.setdefault(step.expert, step.index)
        kept = self._kept.setdefault((step.branch, step.expert), deque(maxlen=self.l2p.depth))
        if step.index == self.l2p.computed(begun, step.index)[-1]:
            kept.append(values[Stack()])
        elif len(kept) > 1:
            for series in zip(*kept, values[Stack()], strict=True):
                products, targets = normal_equations(series)
                self._equations.append((step.index, products.tolist(), targets.tolist()))

    def stop(self) -> list[tuple[int, list[list[float]], list[float]]]:
        """Step and normal equations of every tensor of every branch, as they came."""
        return self._equations

    def arrays(self, parts: list[Any]) -> Arrays:
        """Solve for every skipped step."""
        sums: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for step, products, targets in [equations for part in parts for equations in part]:
            products_before, targets_before = sums.get(step, (0.0, 0.0))
            sums[step] = products_before + np.array(products), targets_before + np.array(targets)
        plain = [0.0] * (self.l2p.depth - 1) + [1.0]
        rows = [plain] * len(self.trial.sigmas)
        for step, equations in sums.items():
            found = [round(float(v), 6) for v in solve(*equations)]
            check_finite(found, f"forecast_weights of step {step}")
            rows[step] = [0.0] * (self.l2p.depth - 1 - len(found)) + found + [round(1.0 - sum(found), 6)]
        return {"forecast_weights": {"all": rows}}


def normal_equations(series: tuple[torch.Tensor, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Inner products of the differences from the newest, and those with what is to be forecast.

    Args:
        series: K kept tensors of one shape, oldest first, and the one to be forecast.

    Returns:
        [K - 1, K - 1] and [K - 1], over the squared norm of the last.
    """
    *older, newest, wanted = [x.float().flatten() for x in series]
    differences = [x - newest for x in older]
    level = float(wanted @ wanted) or 1.0
    products = np.array([[float(a @ b) for b in differences] for a in differences])
    targets = np.array([float(a @ (wanted - newest)) for a in differences])
    return products / level, targets / level


def solve(products: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Ridge solution; zero where nothing differs."""
    size = len(targets)
    mean_square = np.trace(products) / size
    if mean_square <= ROUNDING:
        return np.zeros(size)
    return np.linalg.solve(products + RIDGE * mean_square * np.eye(size), targets)
