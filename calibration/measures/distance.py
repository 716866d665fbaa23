"""How far apart the features of any two steps lie: all that the error of a forecast takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from cachedit.calibration.measure import Arrays, Measure, check_finite, mean, rounded
from cachedit.feature.place import Residual
from cachedit.run import Step
from cachedit.strategy import FeatureStrategy, Site

SAMPLED = 2**18  # numbers of a feature that stand for all of it, the same ones at every step


class Distance(Measure):
    """Squared distances between what the site gives at any two steps, per branch, see ``cachedit.distances``.

    Every run and branch is measured in units of its mean square over the steps; the mean over prompts is stored.
    """

    makes: ClassVar[dict[str, tuple[str, ...]]] = {"residual_distance": ("pair",), "residual_square": ("step",)}

    def __init__(self, strategy: FeatureStrategy) -> None:
        super().__init__(strategy)
        self.start(0)

    @property
    def sites(self) -> tuple[Site, ...]:
        """What the strategy caches."""
        return self.strategy.configured(None).sites[:1]

    def start(self, k: int) -> None:
        """Nothing is kept yet."""
        self._kept: dict[str, dict[int, torch.Tensor]] = {}

    def watch(self, step: Step, values: Mapping[Site, Residual]) -> None:
        """Keep the feature, or a sample of it."""
        if self.sites[0] in values:
            self._kept.setdefault(step.branch, {})[step.index] = _sampled(values[self.sites[0]])

    def stop(self) -> dict[str, dict[str, Any]]:
        """Distances and squares of this prompt, per branch."""
        steps = 1 + max(step for features in self._kept.values() for step in features)
        return {branch: _measured(features, steps) for branch, features in self._kept.items()}

    def arrays(self, parts: list[dict[str, dict[str, Any]]]) -> Arrays:
        """Means over the prompts."""
        found = {"residual_distance": _mean(parts, "pairs"), "residual_square": _mean(parts, "squares")}
        for name, rows in found.items():
            for branch, row in rows.items():
                check_finite(row, f"{name}.{branch}")
        return found


def _sampled(feature: Residual) -> torch.Tensor:
    flat = torch.cat([x.detach().flatten() for x in feature])
    if len(flat) > SAMPLED:
        chosen = torch.randint(len(flat), (SAMPLED,), generator=torch.Generator().manual_seed(0))
        flat = flat[chosen.to(flat.device)]
    return flat.float().cpu()


def _measured(features: Mapping[int, torch.Tensor], steps: int) -> dict[str, Any]:
    """A step at which the branch was not called has the feature of the step before, or of the first that there is."""
    at = [max((known for known in features if known <= step), default=min(features)) for step in range(steps)]
    rows = torch.stack([features[step] for step in at]).double()
    level = rows.square().sum(1)
    unit = float(level.mean()) or 1.0
    pairs = torch.cat([(rows[step] - rows[step + 1 :]).square().sum(1) for step in range(steps)])
    return {"pairs": rounded((pairs / unit).tolist()), "squares": rounded((level / unit).tolist())}


def _mean(parts: list[dict[str, dict[str, Any]]], name: str) -> dict[str, list[float]]:
    return {branch: rounded(mean([part[branch][name] for part in parts])) for branch in parts[0]}
