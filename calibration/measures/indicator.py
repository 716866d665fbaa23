"""How far the output moves when what enters the first block has moved so far (for TeaCache, arXiv 2411.19108)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, ClassVar

import numpy as np
import torch

from cachedit.calibration.measure import Arrays, Measure, check_finite
from cachedit.feature.place import Residual
from cachedit.run import Step
from cachedit.strategy import Output, Site

DEGREE = 4
REACH = 2.0  # times the largest change seen: half as many steps move twice as far


class IndicatorPolynomial(Measure):
    """Polynomial of degree 4 from the change of the modulated input to that of the output, highest power first.

    As in the paper: both are relative L1 changes from one step to the next, over all steps and prompts, and the fit is
    one of least squares. Ours: among the polynomials that are nowhere negative and nowhere fall up to twice the largest
    change seen (``rising_fit``), since few prompts leave the shape of a free fit to chance, and published ones turn
    negative; the first branch of a step stands for all, as it is the one that the strategy listens to.
    """

    makes: ClassVar[dict[str, tuple[str, ...]]] = {"indicator_polynomial": ("power",)}
    signal: ClassVar[str] = "modulated_input"

    @property
    def sites(self) -> tuple[Site, ...]:
        """The output."""
        return (Output(),)

    def start(self, k: int) -> None:
        """Nothing to compare with yet."""
        self._step, self._previous = -1, dict[str, Residual]()
        self._inputs: list[float] = []
        self._outputs: list[float] = []

    def watch(self, step: Step, values: Mapping[Site, Residual]) -> None:
        """Note how far input and output have moved since the step before."""
        if step.index == self._step:  # a later branch, which is not listened to
            return
        self._step = step.index
        output, before = values[Output()], self._previous.get(step.expert)
        self._previous[step.expert] = output
        if before is not None and step.signal is not None:
            self._inputs.append(step.signal)
            self._outputs.append(_loudest(before, output))

    def stop(self) -> tuple[list[float], list[float]]:
        """Changes of the input, and those of the output."""
        return self._inputs, self._outputs

    def arrays(self, parts: list[Any]) -> Arrays:
        """The coefficients, one row for all branches."""
        inputs, outputs = ([change for part in parts for change in part[side]] for side in (0, 1))
        check_finite(inputs, "the change of what enters the first block")
        check_finite(outputs, "the change of the output")
        row = rising_fit(inputs, outputs)
        misses = np.polyval(row, inputs) - outputs
        spread = float(np.var(outputs))
        self.notes = {
            "indicator": {
                "pairs": len(inputs),
                "largest_change": round(max(inputs), 6),
                "explained": round(1 - float(np.mean(misses**2)) / spread, 4) if spread > 0 else 1.0,
            }
        }
        return {"indicator_polynomial": {"all": row}}


def _loudest(before: Residual, now: Residual) -> float:
    """Relative L1 change of the sample of the batch that changed most, as the signal has it."""
    samples = [pair for then, x in zip(before, now, strict=True) for pair in zip(then, x, strict=True)]
    return max(_change(then.float(), x.float()) for then, x in samples)


def _change(before: torch.Tensor, now: torch.Tensor) -> float:
    moved, level = float((now - before).abs().mean()), float(before.abs().mean())
    return moved / level if level > 0 else math.inf if moved > 0 else 0.0


def rising_fit(x: Sequence[float], y: Sequence[float]) -> list[float]:
    """Least squares over polynomials of degree 4 that are not negative and do not fall, from 0 to twice the largest x.

    In Bernstein's form on that interval, rising coefficients from 0 on make such a polynomial, which is then a sum of
    five rising ones with factors of 0 or more. The best factors are the plain least-squares solution over some of the
    five, so all subsets are tried. Where the free fit has that form already, it is the result.

    Args:
        x: changes of the input, at least one, 0 or more.
        y: changes of the output, as many.

    Returns:
        Five coefficients, highest power first, as ``numpy.polyval`` reads them.
    """
    reach = REACH * max(x) or 1.0
    basis = _rising_basis()
    design = np.stack([np.polyval(row, np.asarray(x) / reach) for row in basis], 1)  # [points, 5]
    target = np.asarray(y, dtype=float)
    best, least = np.zeros(DEGREE + 1), float(target @ target)
    for size in range(1, DEGREE + 2):
        for subset in map(list, combinations(range(DEGREE + 1), size)):
            factors = np.linalg.lstsq(design[:, subset], target, rcond=None)[0]
            miss = design[:, subset] @ factors - target
            if factors.min() >= 0 and float(miss @ miss) < least * (1 - 1e-9):
                best, least = np.zeros(DEGREE + 1), float(miss @ miss)
                best[subset] = factors
    scale = reach ** -np.arange(DEGREE, -1.0, -1.0)
    return [float(value) for value in (best @ basis) * scale]


def _rising_basis() -> np.ndarray:
    """Row k: the sum of Bernstein's polynomials k .. 4 on [0, 1], coefficients highest power first."""
    s, rest = np.poly1d([1.0, 0.0]), np.poly1d([-1.0, 1.0])
    bernstein = [math.comb(DEGREE, k) * s**k * rest ** (DEGREE - k) for k in range(DEGREE + 1)]
    sums = [sum(bernstein[k:], np.poly1d([0.0])) for k in range(DEGREE + 1)]
    return np.stack([np.pad(row.coeffs, (DEGREE + 1 - len(row.coeffs), 0)) for row in sums])
