"""Profiles for tests: arrays that a calibration could have made, for any strategy and any model of the zoo."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

import cachedit
from cachedit import FeatureStrategy, Profile, UnsupportedModelError
from cachedit.calibration.measure import Measure
from cachedit.calibration.trial import Watching
from cachedit.feature.attachment import watch
from cachedit.strategy import Module, Output, Site, Stack
from zoo.case import Case

GAPS = 10


class Seen:
    """What the sites of a model look like: the tensors of one computed call."""

    def __init__(self, model: nn.Module, case: Case, sites: Sequence[Site], blocks: Any) -> None:
        self.values: dict[Site, Sequence[torch.Tensor]] = {}

        def observe(step: Any, places: Any, captured: Any) -> None:
            self.values = {p.site: tuple(c) for p, c in zip(places, captured, strict=True) if c is not None}

        watch(model, Watching(tuple(sites)), observe, num_inference_steps=2, **blocks)
        case.call(model)
        cachedit.unwrap(model)

    def channels(self, site: Site) -> int:
        """Channels of a site's tensors, which must have as many."""
        widths = {x.shape[-1] for x in self.values[site]}
        if len(widths) > 1:
            raise UnsupportedModelError(f"streams of {widths} channels")
        return widths.pop()


def made(
    strategy: FeatureStrategy,
    model: nn.Module,
    case: Case,
    steps: int,
    blocks: Mapping[str, Any] | None = None,
) -> Profile:
    """A profile for the strategy: small errors, no correction, every other channel and block alike."""
    arrays: dict[str, dict[str, list[Any]]] = {}
    makers: dict[str, Callable[[], Any]] = {
        "magnitude_ratio": lambda: [1.0] * steps,
        "residual_error": lambda: errors(steps),
        "output_error": lambda: errors(steps),
        "amplification": lambda: [1.0] * steps,
        "sensitivity": lambda: [1.0] * steps,
        "residual_distance": lambda: [1e-4 * (j - i) ** 2 for i in range(steps) for j in range(i + 1, steps)],
        "residual_square": lambda: [1.0] * steps,
        "step_scale": lambda: [1.0] * steps,
        "indicator_polynomial": lambda: [0.0, 0.0, 0.0, 1.0, 0.0],
        "cluster_solver": lambda: [0, 1, 2],
        "block_drift": lambda: [0.1 * k for k in range(count_of(model, case))],
        "forecast_weights": lambda: [[0.0, 0.0, 1.0]] * steps,
        "correction_mask": lambda: [1] * steps,
        "correction_scale": lambda: [[1.0]] * steps,
        "correction_shift": lambda: [[0.0]] * steps,
    }
    for array in strategy.needed_arrays:
        if array in makers:
            arrays[array] = {"cond": makers[array]()}
        elif array == "channel_cluster":
            seen = Seen(model, case, [Stack()], blocks or {})
            arrays[array] = {"": [k % 3 for k in range(seen.channels(Stack()))]}
        elif array == "module_error":
            seen = Seen(model, case, [Module("attn"), Module("cross"), Module("mlp")], blocks or {})
            arrays[array] = {site.kind: errors(steps) for site in seen.values if isinstance(site, Module)}
        elif array == "router":
            seen = Seen(model, case, [site for site in strategy.sites if isinstance(site, Module)], blocks or {})
            row = [k % 2 for k in range(count_of(model, case) * 8)]  # more than any model has modules of a kind
            rows = [[1.0] * len(row), *[[float(x) for x in row]] * (steps - 1)]
            arrays[array] = {site.kind: rows for site in seen.values if isinstance(site, Module)}
    axes = {array: list(Measure.registry[array].makes[array]) for array in arrays}
    defaults = {"cached": "output"} if strategy.sites == (Output(),) else {}  # Auto asks what was calibrated
    axes = {array: names for array, names in axes.items() if names != ["step"]}
    return Profile(arrays=arrays, axes=axes, defaults=defaults)


def errors(steps: int) -> list[list[float]]:
    """A table over (step, gap) in which every step of a gap adds as much."""
    return [[0.01 * gap for gap in range(GAPS + 1)] for _ in range(steps)]


def count_of(model: nn.Module, case: Case) -> int:
    return len(case.blocks(model)) or 1
