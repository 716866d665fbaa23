"""What one denoiser has kept of its computed steps, and the forecasts made from it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed

from cachedit.errors import ProfileError, UnsupportedModelError
from cachedit.feature.history import History
from cachedit.feature.options import Options
from cachedit.feature.place import Forecast, Place, Residual
from cachedit.profile import Profile
from cachedit.strategy import Bands, Channels, Context, FeatureStrategy, Site

ACCELERATOR_LAG = 2


class Kept:
    """Histories of the places of one denoiser.

    Attributes:
        full: branch -> newest step at which all that it reaches was computed.
        why_missing: branch -> why it has nothing to reuse although it was computed.
        changes: site -> relative L1 change per step between its two newest residuals, of what changed most.
        group: process group whose ranks run one model, and see one change; None for one process.
    """

    full: dict[str, int]
    why_missing: dict[str, str]
    _unchecked: deque[tuple[int, str, list[torch.Tensor]]]

    def __init__(
        self,
        places: Sequence[Place],
        strategy: FeatureStrategy,
        profile: Profile | None,
        options: Options,
    ) -> None:
        self.strategy, self.profile, self.places = strategy, profile, places
        self.group: Any = None
        self.histories = [History(strategy.depth, options.cache_device, options.cache_dtype) for _ in places]
        self._weighs = type(strategy).weights is not FeatureStrategy.weights
        self._corrects = type(strategy).correct is not FeatureStrategy.correct
        self.plain = not self._weighs and not self._corrects
        self._clusters: torch.Tensor | None = None
        self.forget()

    def forget(self) -> None:
        """Drop everything."""
        for history in self.histories:
            history.drop()
        self.full, self.why_missing, self._unchecked = {}, {}, deque()
        self.changes: dict[Site, float] = {}
        self._changed_at: dict[Site, int] = {}

    def drop(self, branch: str, why: str = "") -> None:
        """Drop what a branch has; ``why`` is told when it is missed."""
        for history in self.histories:
            history.drop(branch)
        self.full.pop(branch, None)
        if why:
            self.why_missing[branch] = why

    def steps(self, k: int, branch: str) -> list[int]:
        """Steps of what place ``k`` has of a branch, oldest first."""
        return self.histories[k].steps(branch)

    def push(self, k: int, branch: str, step: int, residual: Residual, halved: bool) -> None:
        """Keep what place ``k`` captured; of a halved batch the other half is taken from the newest kept."""
        if halved:
            newest = self.histories[k].newest(branch)
            if newest is None:
                return
            residual = tuple([torch.cat([old.chunk(2)[0], x]) for old, x in zip(newest, residual, strict=True)])
        if self._clusters is None and isinstance(self.strategy.partition, Channels):
            self._check_channels(residual)
        if self.strategy.measures_change:
            self._note_change(k, branch, step, residual)
        self._unchecked.append((step, branch, [r.sum(dtype=torch.float32) for r in residual]))
        self.histories[k].push(branch, step, residual)

    def _note_change(self, k: int, branch: str, step: int, residual: Residual) -> None:
        """Compare with the newest that is kept; of the branches of a step the one that changed most counts."""
        site, history = self.places[k].site, self.histories[k]
        before = history.newest(branch)
        if before is None:
            return
        gap = step - history.steps(branch)[-1]
        change = _largest_change(residual, before, self.group) / max(gap, 1)
        same_step = self._changed_at.get(site) == step
        self.changes[site] = max(change, self.changes[site]) if same_step else change
        self._changed_at[site] = step

    def not_finite(self, step: int) -> str | None:
        """Drop what was not finite; returns the branch that lost it, if any.

        On an accelerator the answer is read two steps later, when it has long been computed, so the host does not wait
        for the device.
        """
        lost = None
        while self._unchecked:
            then, branch, sums = self._unchecked[0]
            if then > step - (0 if sums[0].device.type == "cpu" else ACCELERATOR_LAG):
                break
            self._unchecked.popleft()
            if not all(map(math.isfinite, map(float, sums))):
                self.drop(branch, "the last residual was not finite")
                lost = branch
        return lost

    def has(self, k: int, branch: str) -> bool:
        """True if place ``k`` has something of a branch."""
        return branch in self.histories[k]

    def owner(self, k: int, branch: str) -> str | None:
        """The branch, or another of which place ``k`` has something; None without any."""
        return branch if self.has(k, branch) else next(iter(self.histories[k].branches), None)

    def forecast(self, k: int, ctx: Context, trends: Sequence[float], halved: bool) -> Forecast:
        """What place ``k`` gives on a reused pass of the branch of ``ctx``."""
        history = self.histories[k].of(ctx.branch)
        if halved:
            history = [tuple([x.chunk(2)[1] for x in residual]) for residual in history]
        device = history[-1][0].device
        weights, low, cut = self._weights(ctx, trends, device) if self._weighs else (None, None, 0.0)
        correction = self.strategy.correct(ctx) if self._corrects else None
        rows = None if correction is None else (torch.tensor(correction[0]), torch.tensor(correction[1]))
        return Forecast(history, weights, low, cut, rows)

    def _weights(self, ctx: Context, trends: Sequence[float], device: torch.device) -> tuple[Any, Any, float]:
        """(weights, difference of the low band's, cut) as tensors that broadcast to the residuals.

        They are tensors because torch.compile would build floats into the graph and make a new one at every step.
        """
        ctx.trend = trends[0]
        rows = self.strategy.weights(ctx)
        if rows is None:
            return None, None, 0.0
        if isinstance(self.strategy.partition, Channels):
            table = torch.tensor(rows).to(device, non_blocking=True)[self._clusters]  # [C, K]
            return table.T.contiguous().unbind(), None, 0.0
        if isinstance(self.strategy.partition, Bands) and isinstance(rows[0], Sequence):
            low, high = torch.tensor(rows)
            return high.unbind(), (low - high).unbind(), self.strategy.partition.cut
        if len(trends) > 1:  # every sample by its own trend, [K, B, 1, 1]
            each = [self.strategy.weights(replace(ctx, trend=trend)) for trend in trends]
            return torch.tensor(each).T[..., None, None].unbind(), None, 0.0
        return torch.tensor(rows).unbind(), None, 0.0

    def _check_channels(self, residual: Residual) -> None:
        """See that the profile's clusters are those of the channels that are kept, and take them to the device.

        Raises:
            UnsupportedModelError: the tensors of the site have different numbers of channels.
            ProfileError: the clusters are of another number of channels.
        """
        widths = sorted({x.shape[-1] for x in residual})
        if len(widths) > 1:
            raise UnsupportedModelError(
                f"its streams have {' and '.join(map(str, widths))} channels; allowed for clusters of channels: one "
                "number. Use a strategy without them."
            )
        partition, profile = self.strategy.partition, self.profile
        assert isinstance(partition, Channels)
        assert profile is not None
        (clusters, *_) = profile.arrays[partition.array].values()
        if len(clusters) != widths[0]:
            raise ProfileError(
                f"the profile has clusters for {len(clusters)} channels, and the model has {widths[0]}. Calibrate for "
                "this model."
            )
        self._clusters = torch.tensor(clusters, dtype=torch.long).to(residual[0].device)


def _largest_change(now: Residual, before: Residual, group: Any) -> float:
    """Relative L1 change of the tensor's row that changed most, of all ranks that run the model; infinite from zero."""
    changes = []
    for a, b in zip(now, before, strict=True):
        moved, level = (x.float().abs().flatten(1).mean(1) for x in (a - b, b))
        changes.append((moved / level).nan_to_num(math.inf, math.inf).max())
    change = torch.stack(changes).max()
    if group is not None:
        torch.distributed.all_reduce(change, torch.distributed.ReduceOp.MAX, group)
    return float(change)
