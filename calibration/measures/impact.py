"""What a wrong value of one site at one step does to the final sample."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from cachedit.calibration.measure import Arrays, Measure, check_finite
from cachedit.calibration.measures.errors import StepErrors
from cachedit.calibration.trial import ReusingOnce
from cachedit.errors import ProfileError
from cachedit.feature.place import Residual
from cachedit.run import Step
from cachedit.strategy import FeatureStrategy, Site
from cachedit.wrap import last_run

RUNS = 8  # per site, on the first prompt


class Impact(Measure):
    """MixCache's impact: change of the final latents per relative L1 error of a site at a step (arXiv 2508.12691).

    The paper perturbs a site by Gaussian noise; ours reuses what it gave at the step before, which is the error that
    a run will make. Keys are the places of the sites in ``strategy.sites``; steps in between are interpolated. Costs
    up to ``RUNS`` further runs per site.
    """

    makes: ClassVar[dict[str, tuple[str, ...]]] = {"impact": ("step",)}

    def __init__(self, strategy: FeatureStrategy) -> None:
        super().__init__(strategy)
        self._errors, self._first = StepErrors(), True

    @property
    def sites(self) -> tuple[Site, ...]:
        """Those of the strategy."""
        return self.strategy.sites

    def start(self, k: int) -> None:
        """The first prompt is the one that counts."""
        self._first = k == 0

    def watch(self, step: Step, values: Mapping[Site, Residual]) -> None:
        """Compare every site with what it gave at the step before."""
        if self._first:
            self._errors.watch(step, values)

    def arrays(self) -> Arrays:
        """Run with one site reused at one step at a time; a site that a model lacks has no row."""
        rows = {str(k): self._row(site) for k, site in enumerate(self.strategy.sites) if self._errors.of.get(site)}
        if not rows:
            raise ProfileError("impact: no site was seen at two steps. Calibrate with more steps, such as 28.")
        return {"impact": rows}

    def _row(self, site: Site) -> list[float]:
        steps, truth = self.trial.num_inference_steps, self.trial.latents(0)
        found: dict[int, float] = {}
        for step in range(1, steps, math.ceil((steps - 1) / RUNS)):
            latents = self.trial.latents(0, ReusingOnce(step, (site,)))
            record, error = last_run(self.trial.pipe), self._errors.of[site].get(step, 0.0)
            if record is not None and record.reused_steps == [step] and error:
                found[step] = float((latents - truth).abs().mean()) / error
        if not found:
            raise ProfileError(
                f"impact: in runs of {steps} steps {site} could not be reused at any. Calibrate with more steps, such "
                "as 28."
            )
        row = [float(f"{value:.6g}") for value in np.interp(range(steps), [*found], [*found.values()])]
        check_finite(row, "impact")
        return row
