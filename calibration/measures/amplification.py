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
from cachedit.sensitivity import magnitudes
from cachedit.strategy import Site

RUNS = 50  # of all prompts together
PROMPTS = 4  # what an early error does differs tenfold between prompts


class Amplification(Measure):
    """``amplification[t]`` = mean|x - x'| per relative L1 error of what the strategy caches, at step t.

    x are the final latents of the uncached run, x' those of a run that reuses what it was at step t - 1 at step t and
    nowhere else; the error is mean|r_{t-1} - r_t| / mean|r_t| of the uncached run, of several branches the largest.
    What an error does is taken to be proportional to it. ``sensitivity`` is the same in root mean squares, which is
    what PSNR sees. ``response`` is that of the sampler (``cachedit.feature.response``), where it is known.

    Both are geometric means over prompts, as a mean of PSNR is one of the errors; so no single prompt decides. A run
    costs as much as a picture, so at most ``RUNS`` of the first ``PROMPTS`` prompts are made: at 50 steps each prompt
    tries every fourth step, each one begins a step later, and steps in between are interpolated, in the logarithm and
    per unit of the response. So is a step that could not be reused, such as the first of a second expert.
    """

    makes: ClassVar[dict[str, tuple[str, ...]]] = {
        "amplification": ("step",),
        "sensitivity": ("step",),
        "response": ("step",),
    }

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

    def stop(self) -> dict[str, Any]:
        """Step -> error, in both norms, and the response of the sampler."""
        response = self.trial.response
        return {
            "errors": [errors.of.get(self.sites[0], {}) for errors in self._errors],
            "response": None if response is None else rounded(response),
        }

    def arrays(self, parts: list[Any]) -> Arrays:
        """Run with one reused step at a time."""
        tried = self._tried
        changes = self.trial.map("amplification", tried, lambda at: self.trial.change(at[1], at[0], self.sites))
        response = parts[0]["response"]
        known = response is not None and len(response) == self.trial.num_inference_steps
        scale = magnitudes(response) if known else np.ones(self.trial.num_inference_steps)
        arrays: Arrays = {}
        for norm, name in enumerate(("amplification", "sensitivity")):
            ratios: dict[int, dict[int, float]] = {}
            for (step, k), change in zip(tried, changes, strict=True):
                error = parts[k]["errors"][norm].get(step, 0.0)
                if change is not None and change[norm] > 0 and error > 0:
                    ratios.setdefault(k, {})[step] = change[norm] / error
            arrays[name] = {"all": self._row([*ratios.values()], scale)}
        return arrays | ({"response": {"all": response}} if known else {})

    def _row(self, prompts: list[dict[int, float]], scale: np.ndarray) -> list[float]:
        """The ratio at every step, from those that the prompts tried; ``scale`` is what they lie along."""
        steps = self.trial.num_inference_steps
        if not prompts:
            raise ProfileError(
                f"amplification: in runs of {steps} steps no step could be reused, or none changed. Allowed: runs of 5 "
                "steps or more. Calibrate with more steps, such as 28."
            )
        curves = [
            np.interp(range(steps), [*found], np.log([ratio / scale[step] for step, ratio in found.items()]))
            for found in prompts
        ]
        row = rounded(np.exp(np.mean(curves, axis=0)) * scale)
        check_finite(row, "amplification")
        return row

    @property
    def _tried(self) -> list[tuple[int, int]]:
        """Steps that are reused, and of which prompts: each begins a step later than the one before."""
        steps, prompts = self.trial.num_inference_steps, len(self.trial.prompts[:PROMPTS])
        stride = math.ceil((steps - 1) * prompts / RUNS)
        return sorted((step, k) for k in range(prompts) for step in range(1 + k % stride, steps, stride))
