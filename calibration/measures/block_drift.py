"""How far what a block adds drifts between the steps that compute it (for ProfilingDiT, arXiv 2504.03140)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from cachedit.calibration.measure import Arrays, Measure, check_finite
from cachedit.calibration.measures.channels import some_tokens
from cachedit.errors import ProfileError
from cachedit.feature.place import Residual
from cachedit.run import Step
from cachedit.strategy import Context, FeatureStrategy, Schedule, Site, Stack


class BlockDrift(Measure):
    """What a skipped block would get wrong: mean|delta_i - delta_a| over the mean size of all blocks' deltas at step i.

    Step a is the last computed one, and the mean is taken over the steps i that the strategy would skip. A cheap
    substitute for the paper's segmentation of attention maps, and ours: it needs no second model. Measured against all
    blocks and not against itself, since a block that adds little may drift. A sample of the tokens stands for all.
    """

    makes: ClassVar[dict[str, tuple[str, ...]]] = {"block_drift": ("block",)}

    def __init__(self, strategy: FeatureStrategy) -> None:
        super().__init__(strategy)
        self._rule = strategy.configured(None)

    @property
    def sites(self) -> tuple[Site, ...]:
        """Every block."""
        return tuple([Stack(block, block + 1) for block in range(self.trial.depth)])

    def start(self, k: int) -> None:
        """Nothing is computed yet."""
        self._computed: dict[tuple[str, str], tuple[list[int], list[list[torch.Tensor]]]] = {}
        self._drifts: dict[str, list[list[float]]] = {}

    def watch(self, step: Step, values: Mapping[Site, Residual]) -> None:
        """Keep a computed step; compare a step that would be skipped with the last computed one."""
        deltas = [some_tokens(values[site]) for site in self.sites]
        steps, kept = self._computed.setdefault((step.branch, step.expert), ([], []))
        schedule = Schedule(self.trial.num_inference_steps)
        if not steps or self._rule.should_compute(Context(step=step.index, schedule=schedule, computed_steps=steps)):
            steps.append(step.index)
            kept[:] = deltas
            return
        level = sum(map(_size, deltas)) / len(deltas)
        moved = [_size([b - a for a, b in zip(then, now, strict=True)]) for then, now in zip(kept, deltas, strict=True)]
        self._drifts.setdefault(step.branch, []).append([size / (level or 1.0) for size in moved])

    def stop(self) -> dict[str, list[list[float]]]:
        """Branch -> a row over the blocks for every skipped step."""
        return self._drifts

    def arrays(self, parts: list[Any]) -> Arrays:
        """Mean over skipped steps and prompts, per branch and block."""
        drifts: dict[str, list[list[float]]] = {}
        for part in parts:
            for branch, seen in part.items():
                drifts.setdefault(branch, []).extend(seen)
        if not drifts:
            raise ProfileError(
                f"in {self.trial.num_inference_steps} steps {self._rule} skips nothing, so no drift was seen. "
                "Calibrate on more steps, or with a smaller warm-up."
            )
        rows = {branch: [sum(d) / len(d) for d in zip(*seen, strict=True)] for branch, seen in drifts.items()}
        for branch, row in rows.items():
            check_finite(row, f"block_drift of branch {branch!r}")
        return {"block_drift": {branch: [round(drift, 6) for drift in row] for branch, row in rows.items()}}


def _size(streams: Sequence[torch.Tensor]) -> float:
    """Mean absolute value, every stream counted alike."""
    return sum(float(x.abs().mean()) for x in streams) / len(streams)
