"""What a wrong residual at one step does to the final sample."""

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
from cachedit.strategy import FeatureStrategy, Site, Stack
from cachedit.wrap import last_run

RUNS = 25  # per prompt: with 50 steps every second one is tried
PROMPTS = 2


class Amplification(Measure):
    """``amplification[t]`` = mean|x - x'| per relative L1 error of the residual at step t.

    x are the final latents of the uncached run, x' those of a run that reuses the residual of step t - 1 at step t and
    nowhere else; the error is mean|r_{t-1} - r_t| / mean|r_t| of the uncached run, of several branches the largest.
    Both are averaged over prompts before they are divided. What an error does is taken to be proportional to it.

    This costs up to ``RUNS`` further runs per prompt, on the first ``PROMPTS`` prompts: 50 runs at 50 steps. Steps in
    between are interpolated, and so is a step that could not be reused, such as the first of a second expert.
    """

    makes: ClassVar[dict[str, tuple[str, ...]]] = {"amplification": ("step",)}

    def __init__(self, strategy: FeatureStrategy) -> None:
        super().__init__(strategy)
        self._errors: list[StepErrors] = []

    @property
    def sites(self) -> tuple[Site, ...]:
        """The whole stack."""
        return (Stack(),)

    def start(self, k: int) -> None:
        """Nothing to compare with yet."""
        self._errors.append(StepErrors())

    def watch(self, step: Step, values: Mapping[Site, Residual]) -> None:
        """Compare the residual with that of the step before."""
        self._errors[-1].watch(step, values)

    def arrays(self) -> Arrays:
        """Run with one reused step at a time."""
        steps = self.trial.num_inference_steps
        stride = math.ceil((steps - 1) / RUNS)
        tried = sorted({*range(1, steps, stride), steps - 1})
        found: dict[int, float] = {}
        for step in tried:
            error = changed = 0.0
            for k, errors in enumerate(self._errors[:PROMPTS]):
                latents = self.trial.latents(k, ReusingOnce(step))
                record = last_run(self.trial.pipe)
                if record is not None and record.reused_steps == [step]:
                    error += errors.of[Stack()].get(step, 0.0)
                    changed += float((latents - self.trial.latents(k)).abs().mean())
                for _ in range(steps):
                    self.trial.advance()
            if error:
                found[step] = changed / error
        if not found:
            raise ProfileError(
                f"amplification: in runs of {steps} steps no step could be reused, or none changed. Allowed: runs of 5 "
                "steps or more. Calibrate with more steps, such as 28."
            )
        row = [float(f"{value:.6g}") for value in np.interp(range(steps), [*found], [*found.values()])]
        check_finite(row, "amplification")
        return {"amplification": {"all": row}}
