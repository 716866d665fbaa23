"""How much the residual grows or shrinks from step to step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from cachedit.calibration.measure import Arrays, Measure
from cachedit.errors import ProfileError
from cachedit.feature.place import Residual
from cachedit.run import Step
from cachedit.strategy import Site, Stack


class MagnitudeRatio(Measure):
    """MagCache's ratio of consecutive residuals, averaged over prompts as logarithms (arXiv 2506.09045).

    Profiles are read as cumulative products, so the geometric mean is the one to take.
    """

    makes: ClassVar[dict[str, tuple[str, ...]]] = {"magnitude_ratio": ("step",)}

    @property
    def sites(self) -> tuple[Site, ...]:
        """The whole stack."""
        return (Stack(),)

    def start(self, k: int) -> None:
        """Nothing to compare with yet."""
        self._previous: dict[tuple[str, str], Residual] = {}
        self._ratios: dict[str, dict[int, list[float]]] = {}

    def watch(self, step: Step, values: Mapping[Site, Residual]) -> None:
        """Measure a step against the one before; an expert's first step has none and counts as 1."""
        residual = values[Stack()]
        previous = self._previous.get((step.branch, step.expert))
        ratio = 1.0 if previous is None else magnitude_ratio(previous, residual)
        self._ratios.setdefault(step.branch, {}).setdefault(step.index, []).append(ratio)
        self._previous[step.branch, step.expert] = residual

    def stop(self) -> dict[str, dict[int, list[float]]]:
        """Branch -> step -> ratios."""
        return self._ratios

    def arrays(self, parts: list[Any]) -> Arrays:
        """Geometric mean over the runs, per branch and step; 1 where a branch was not called."""
        ratios: dict[str, dict[int, list[float]]] = {}
        for part in parts:
            for branch, row in part.items():
                for step, seen in row.items():
                    ratios.setdefault(branch, {}).setdefault(step, []).extend(seen)
        steps = range(1 + max(step for row in ratios.values() for step in row))
        rows: dict[str, list[float]] = {}
        for branch, row in ratios.items():
            rows[branch] = []
            for step in steps:
                values = row.get(step, [1.0])
                if not all(math.isfinite(value) and value > 0 for value in values):
                    raise ProfileError(
                        f"magnitude_ratio of step {step}, branch {branch!r}, is {values}; allowed: positive numbers. "
                        "The model gives non-finite or zero residuals there; try another dtype."
                    )
                rows[branch].append(math.exp(sum(map(math.log, values)) / len(values)))
        return {"magnitude_ratio": rows}


def magnitude_ratio(previous: Sequence[torch.Tensor], current: Sequence[torch.Tensor]) -> float:
    """Mean over tokens of ``|r_i| / |r_{i-1}|``, norms over channels.

    Args:
        previous: residuals of the step before, one tensor [..., C] per cached stream.
        current: residuals of this step, of the same shapes.

    Returns:
        The mean over all tokens of all streams; tokens whose previous residual is zero do not count.
    """
    before, now = _token_norms(previous), _token_norms(current)
    counted = before > 0
    return float((now[counted] / before[counted]).mean()) if bool(counted.any()) else 1.0


def _token_norms(residual: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([r.float().norm(dim=-1).flatten() for r in residual])
