"""What a wrong residual at one step does to the final sample."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from cachedit.calibration.measure import Arrays, Measure, check_finite, rounded
from cachedit.calibration.measures.errors import StepErrors, relative_l1, relative_l2
from cachedit.errors import ProfileError
from cachedit.feature.place import Residual
from cachedit.run import Step
from cachedit.strategy import Site

RUNS = 25  # per prompt: with 50 steps every second one is tried
PROMPTS = 2


class Amplification(Measure):
    """``amplification[t]`` = mean|x - x'| per relative L1 error of what the strategy caches, at step t.

    x are the final latents of the uncached run, x' those of a run that reuses what it was at step t - 1 at step t and
    nowhere else; the error is mean|r_{t-1} - r_t| / mean|r_t| of the uncached run, of several branches the largest.
    Both are averaged over prompts before they are divided. What an error does is taken to be proportional to it.
    ``sensitivity`` is the same in root mean squares, which is what PSNR sees.

    This costs up to ``RUNS`` further runs per prompt, on the first ``PROMPTS`` prompts: 50 runs at 50 steps. Steps in
    between are interpolated, and so is a step that could not be reused, such as the first of a second expert.
    """

    makes: ClassVar[dict[str, tuple[str, ...]]] = {"amplification": ("step",), "sensitivity": ("step",)}

    @property
    def sites(self) -> tuple[Site, ...]:
        """What the strategy caches."""
        return self.strategy.configured(None).sites[:1]

    @property
    def runs(self) -> int:
        """One per tried step and prompt."""
        return len(self._tried)

    def start(self, k: int) -> None:
        """Nothing to compare with yet."""
        self._errors = [StepErrors(relative_l1), StepErrors(relative_l2)]

    def watch(self, step: Step, values: Mapping[Site, Residual]) -> None:
        """Compare what is cached with that of the step before."""
        for errors in self._errors:
            errors.watch(step, {site: values[site] for site in self.sites})

    def stop(self) -> list[dict[int, float]]:
        """Step -> error, in both norms."""
        return [errors.of.get(self.sites[0], {}) for errors in self._errors]

    def arrays(self, parts: list[Any]) -> Arrays:
        """Run with one reused step at a time."""
        tried = self._tried
        changes = self.trial.map("amplification", tried, lambda at: self.trial.change(at[1], at[0], self.sites))
        seen = [(step, k, change) for (step, k), change in zip(tried, changes, strict=True) if change is not None]
        arrays: Arrays = {}
        for norm, name in enumerate(self.makes):
            errors: dict[int, float] = {}
            changed: dict[int, float] = {}
            for step, k, change in seen:
                errors[step] = errors.get(step, 0.0) + parts[k][norm].get(step, 0.0)
                changed[step] = changed.get(step, 0.0) + change[norm]
            arrays[name] = {"all": self._row({step: changed[step] / error for step, error in errors.items() if error})}
        return arrays

    def _row(self, found: dict[int, float]) -> list[float]:
        """The ratio at every step."""
        steps = self.trial.num_inference_steps
        if not found:
            raise ProfileError(
                f"amplification: in runs of {steps} steps no step could be reused, or none changed. Allowed: runs of 5 "
                "steps or more. Calibrate with more steps, such as 28."
            )
        row = rounded(np.interp(range(steps), [*found], [*found.values()]))
        check_finite(row, "amplification")
        return row

    @property
    def _tried(self) -> list[tuple[int, int]]:
        """Steps that are reused, each on the leading prompts."""
        steps = self.trial.num_inference_steps
        chosen = sorted({*range(1, steps, math.ceil((steps - 1) / RUNS)), steps - 1})
        return [(step, k) for step in chosen for k in range(len(self.trial.prompts[:PROMPTS]))]
