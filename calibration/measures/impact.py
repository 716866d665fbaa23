"""What a wrong value of one site at one step does to the final sample."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from cachedit.calibration.measure import Arrays, Measure, check_finite, rounded
from cachedit.calibration.measures.errors import StepErrors
from cachedit.errors import ProfileError
from cachedit.feature.place import Residual
from cachedit.run import Step
from cachedit.strategy import Site

RUNS = 8  # per site, on the first prompt


class Impact(Measure):
    """MixCache's impact: change of the final latents per relative L1 error of a site at a step (arXiv 2508.12691).

    The paper perturbs a site by Gaussian noise; ours reuses what it gave at the step before, which is the error that
    a run will make. Keys are the places of the sites in ``strategy.sites``; steps in between are interpolated. Costs
    up to ``RUNS`` further runs per site.
    """

    makes: ClassVar[dict[str, tuple[str, ...]]] = {"impact": ("step",)}

    @property
    def sites(self) -> tuple[Site, ...]:
        """Those of the strategy."""
        return self.strategy.sites

    @property
    def runs(self) -> int:
        """One per site and tried step."""
        return len(self.strategy.sites) * len(self._tried)

    def start(self, k: int) -> None:
        """The first prompt is the one that counts."""
        self._errors, self._first = StepErrors(), k == 0

    def watch(self, step: Step, values: Mapping[Site, Residual]) -> None:
        """Compare every site with what it gave at the step before."""
        if self._first:
            self._errors.watch(step, values)

    def stop(self) -> list[dict[int, float]]:
        """Step -> error, one for every site."""
        return [self._errors.of.get(site, {}) for site in self.strategy.sites]

    def arrays(self, parts: list[Any]) -> Arrays:
        """Run with one site reused at one step at a time; a site that a model lacks has no row."""
        errors: list[dict[int, float]] = parts[0]
        sites = self.strategy.sites
        tried = [(place, step) for place, seen in enumerate(errors) if seen for step in self._tried]
        if not tried:
            raise ProfileError("impact: no site was seen at two steps. Calibrate with more steps, such as 28.")
        changes = self.trial.map("impact", tried, lambda at: self.trial.change(0, at[1], (sites[at[0]],)))
        found: dict[int, dict[int, float]] = {place: {} for place, _ in tried}
        for (place, step), change in zip(tried, changes, strict=True):
            error = errors[place].get(step, 0.0)
            if change is not None and error:
                found[place][step] = change[0] / error
        return {"impact": {str(place): self._row(sites[place], row) for place, row in found.items()}}

    @property
    def _tried(self) -> range:
        """Steps at which a site is reused."""
        steps = self.trial.num_inference_steps
        return range(1, steps, math.ceil((steps - 1) / RUNS))

    def _row(self, site: Site, found: dict[int, float]) -> list[float]:
        """The impact of a site at every step."""
        steps = self.trial.num_inference_steps
        if not found:
            raise ProfileError(
                f"impact: in runs of {steps} steps {site} could not be reused at any. Calibrate with more steps, such "
                "as 28."
            )
        row = rounded(np.interp(range(steps), [*found], [*found.values()]))
        check_finite(row, "impact")
        return row
