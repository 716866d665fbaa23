"""ERTACache: reuse the output by a calibrated list of steps, correct it, and shorten the sampler's reused steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from cachedit.profile import Profile
from cachedit.schedules import scan
from cachedit.strategies.corrected import Corrected, worst
from cachedit.strategy import Axes, Output, Schedule, Site


@dataclass(frozen=True)
class ERTACache(Corrected):
    """Reuse what the output adds to the latent while its calibrated error is small (arXiv 2508.21091).

    A step is computed once the relative L1 error of ``v - x`` since the last computed step, averaged over prompts,
    reaches the threshold. At the other steps ``v~ = x + (v - x) of the computed step``, corrected per latent channel.
    (A model whose output has another shape than its latent reuses v itself.)

    The paper models the error ``v~ - v`` as ``sigmoid(K v~ + B)``, expands it as ``z / 4 + 1 / 2`` and solves for K and
    B by least squares. Factors 4 and 1/2 cancel: it is the line ``(1 - K / 4) v~ - (B / 4 + 1 / 2)``. Ours: the line is
    fitted to the reused ``v - x`` instead of v~, so the fresh latent is not scaled with it, and kept only if it brings
    the latents of a prompt that it was not fitted on nearer to the uncached ones; branches share one list, by the
    larger error; the list is made again for every number of steps, and ends at the widest gap that was measured.

    With ``adjust_timesteps`` a reused step of the sampler goes only the part ``1 - |v~ - v| / |v|`` of its share of the
    way that is left, as measured per step by calibration. Of the two denominators that the sources name this is the one
    that works: the other, |v_i - v_{i+1}|, makes the sampler stand still. It changes the trajectory, so the runs that
    result are no longer those of the plain schedule; it needs Euler's sampler of a flow model
    (FlowMatchEulerDiscreteScheduler); and a denoiser that is driven by hand has no sampler, so there it does nothing.

    threshold:        error from which on a step is computed (paper: 0.08 Wan2.1, 0.1 to 0.18 OpenSora, 0.3 CogVideoX,
                      0.6 FLUX; 0.1).
    correction:       apply the calibrated lines, which hold for the steps and the threshold of the calibration alone.
    adjust_timesteps: shorten reused steps of the sampler; the same limit holds.
    """

    threshold: float | None = None
    adjust_timesteps: bool = False

    paper: ClassVar[str] = "arXiv 2508.21091"
    fitted: ClassVar[tuple[str, ...]] = ("correction", "adjust_timesteps")
    site: ClassVar[Site] = Output(residual=True)
    profile_arrays: ClassVar[Axes] = {
        "output_error": ("step", "gap"),
        "step_scale": ("step",),
        **Corrected.profile_arrays,
    }

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range.
        """
        super().__post_init__()
        if self.threshold is not None and (
            type(self.threshold) not in (int, float) or not 0 <= self.threshold < math.inf
        ):
            raise ValueError(f"ERTACache threshold={self.threshold!r}; allowed: a number, 0 or more")

    @property
    def adjusts_sampler(self) -> bool:
        """As the option says."""
        return self.adjust_timesteps

    def configured(self, profile: Profile | None) -> ERTACache:
        """An open threshold from the profile, else 0.1."""
        recommended = profile.defaults.get("threshold", 0.1) if profile is not None else 0.1
        return self if self.threshold is not None else replace(self, threshold=recommended)

    def computed(self, schedule: Schedule, profile: Profile) -> tuple[int, ...]:
        """Those at which the error has reached the threshold."""
        assert self.threshold is not None
        threshold = self.threshold
        return profile.once(
            ("ERTACache", threshold, schedule),
            lambda: scan(worst(profile.errors("output_error", schedule)), threshold),
        )

    def check_run(self, schedule: Schedule, profile: Profile | None) -> None:
        """Raise ProfileError if something is to be applied that was fitted on other steps or another list."""
        super().check_run(schedule, profile)
        self.step_scales(schedule, profile)

    def step_scales(self, schedule: Schedule, profile: Profile | None) -> Sequence[float] | None:
        """The calibrated factors; of several branches the smallest."""
        if not self.adjust_timesteps:
            return None
        assert profile is not None
        self._check_fitted(schedule, profile)
        return [min(branches) for branches in zip(*profile.arrays["step_scale"].values(), strict=True)]
