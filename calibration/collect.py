"""Watch one full run and keep what the measures say about it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cachedit.calibration.measures import MEASURES
from cachedit.run import Step
from cachedit.strategy import FeatureStrategy
from cachedit.wrap import attach, unwrap


class Collector:
    """Observer of one run.

    Attributes:
        values: measure -> branch -> step -> value.
        sigmas: step -> noise level; None where it is unknown.
    """

    def __init__(self, measures: Sequence[str], on_step: Callable[[], None]) -> None:
        self.values: dict[str, dict[str, dict[int, float]]] = {name: {} for name in measures}
        self.sigmas: dict[int, float | None] = {}
        self._on_step = on_step
        self._previous: dict[tuple[str, str], tuple[torch.Tensor, ...]] = {}

    def __call__(self, step: Step, residual: tuple[torch.Tensor, ...]) -> None:
        """Measure a computed step against the one before; an expert's first step has none and counts as 1."""
        if step.index not in self.sigmas:
            self._on_step()
        self.sigmas[step.index] = step.sigma
        previous = self._previous.get((step.branch, step.expert))
        for name, branches in self.values.items():
            value = 1.0 if previous is None else MEASURES[name](previous, residual)
            branches.setdefault(step.branch, {})[step.index] = value
        self._previous[step.branch, step.expert] = residual


def collect(pipe: Any, measures: Sequence[str], arguments: dict[str, Any], on_step: Callable[[], None]) -> Collector:
    """Run ``pipe(**arguments)`` uncached and measure it; the pipeline is left as it was.

    The run stops before decoding where the pipeline offers that, since pixels are not measured.
    """
    collector = Collector(measures, on_step)
    accepted = inspect.signature(type(pipe).__call__).parameters
    if "output_type" in accepted:
        arguments = {"output_type": "latent", **arguments}
    attach(pipe, FeatureStrategy(), observer=collector)
    try:
        with torch.no_grad():
            pipe(**arguments)
    finally:
        unwrap(pipe)
    return collector
