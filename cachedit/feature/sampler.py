"""The adjusted sampler: steps of the pipeline's scheduler made shorter where what is reused there is less true.

Only for a sampler whose step needs nothing but two noise levels, so that it may go from any to any other: Euler's on a
flow model. A multistep solver holds what it knows at the noise levels of the past, and a stochastic one adds noise by
the level that it goes to.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from cachedit.disguise import disguised
from cachedit.errors import UnsupportedModelError
from cachedit.profile import Profile
from cachedit.strategy import FeatureStrategy, Schedule

ATTRIBUTE, PLANNED = "_cachedit", "_cachedit_planned"


class Sampler:
    """Adjusts the schedule of a pipeline's scheduler every time it is set, as the strategy's ``step_scales`` say.

    The class of the scheduler is swapped for one of the same name that overrides ``set_timesteps`` alone, so its
    configuration, its saved form and a deep copy of it are as ever. Policies keep seeing the noise levels as they were
    planned (``planned_sigmas``), for these are what profiles are read at; the model is told the adjusted ones.
    """

    def __init__(self, strategy: FeatureStrategy, profile: Profile | None) -> None:
        self.strategy, self.profile = strategy, profile
        self._scheduler: Any = None

    def check(self, scheduler: Any) -> None:
        """Raise UnsupportedModelError unless the steps of this scheduler can be made shorter.

        The step itself decides, not the name: a scheduler that inherits Euler's step is allowed, one that inherits
        from it and steps otherwise is not.
        """
        from diffusers import FlowMatchEulerDiscreteScheduler as euler

        stochastic = False
        if getattr(type(scheduler), "step", None) is euler.step:
            stochastic = bool(scheduler.config.get("stochastic_sampling"))
            if not stochastic:
                return
        raise UnsupportedModelError(
            f"{type(self.strategy).__name__} cannot adjust the timesteps of {type(scheduler).__name__}"
            f"{' with stochastic_sampling' if stochastic else ''}. Allowed: {euler.__name__} without "
            "stochastic_sampling. Set pipe.scheduler to one before wrapping, or leave the adjustment off."
        )

    def attach(self, pipeline: Any) -> None:
        """Take over the scheduler that the pipeline has now; one that it had before gets its own class back.

        Does nothing if that is the one already, so it may be called before every run.

        Raises:
            UnsupportedModelError: its steps cannot be made shorter.
        """
        scheduler = pipeline.scheduler
        if scheduler is self._scheduler and vars(scheduler).get(ATTRIBUTE) is self:
            return
        self.check(scheduler)
        self.detach()
        other = vars(scheduler).get(ATTRIBUTE)
        if other is not None:  # of another pipeline that shares the scheduler; each takes it back for its own runs
            other.detach()
        vars(scheduler)[ATTRIBUTE] = self
        cls: Any = type(scheduler)
        scheduler.__class__ = _adjusting(cls)
        self._scheduler = scheduler

    def detach(self) -> None:
        """Give the scheduler its own class back, and its own schedule unless a run is in the middle of the other."""
        scheduler, self._scheduler = self._scheduler, None
        if scheduler is None or vars(scheduler).get(ATTRIBUTE) is not self:
            return
        del vars(scheduler)[ATTRIBUTE]
        scheduler.__class__ = type(scheduler).__base__
        planned = vars(scheduler).pop(PLANNED, None)
        if planned is not None and scheduler.step_index in (None, len(scheduler.timesteps)):
            scheduler.sigmas, scheduler.timesteps = planned

    def adjust(self, scheduler: Any) -> None:
        """Adjust the schedule that has just been set; the model is told the time that belongs to each noise level."""
        vars(scheduler).pop(PLANNED, None)
        sigmas, timesteps = scheduler.sigmas, scheduler.timesteps
        planned, times = sigmas.tolist(), timesteps.tolist()
        rising = planned[-1] > planned[0]  # Mochi's count the signal
        levels = tuple([1 - sigma if rising else sigma for sigma in planned[:-1]])
        scales = self.strategy.step_scales(Schedule(len(times), tuple(times), levels), self.profile)
        if scales is None or all(scale == 1 for scale in scales):
            return
        adjusted, sign = adjusted_sigmas(planned, scales), 1 if rising else -1
        told = np.interp(np.multiply(sign, adjusted[:-1]), np.multiply(sign, planned[:-1]), times)
        scheduler.sigmas = torch.tensor(adjusted, dtype=sigmas.dtype, device=sigmas.device)
        scheduler.timesteps = torch.tensor(told, dtype=timesteps.dtype, device=timesteps.device)
        vars(scheduler)[PLANNED] = sigmas, timesteps


def planned_sigmas(scheduler: Any) -> Any:
    """The scheduler's sigmas as they were before they were adjusted; None if it has none."""
    planned = getattr(scheduler, PLANNED, None)
    return planned[0] if planned is not None else getattr(scheduler, "sigmas", None)


def adjusted_sigmas(sigmas: Sequence[float], scales: Sequence[float]) -> list[float]:
    """The schedule in which every step is shorter than planned by its factor.

    Before every step, what is left to go is divided among the steps that are left in their planned proportions; the
    step then goes ``scale`` of its share. The last one goes all the way, so both ends stay. Equal to ``sigmas``, to the
    bit, up to the first factor that is not 1.

    Args:
        sigmas: ``[T + 1]`` noise levels as planned, the last one where the run ends.
        scales: ``[T]`` factors in [0, 1]; that of the last step does not count.

    Raises:
        ValueError: another number of factors, or one out of range.
    """
    if len(scales) != len(sigmas) - 1 or not all(0 <= scale <= 1 for scale in scales):
        raise ValueError(
            f"step_scales are {list(scales)}; allowed: {len(sigmas) - 1} factors from 0 to 1, one per step. Calibrate "
            "again, or leave the adjustment off."
        )
    adjusted, end = [sigmas[0]], sigmas[-1]
    for i, scale in enumerate(scales[:-1]):
        here, planned = adjusted[-1], sigmas[i]
        if scale == 1 and here == planned:
            adjusted.append(sigmas[i + 1])
        else:
            share = (sigmas[i + 1] - planned) / (end - planned) if end != planned else 0.0
            adjusted.append(here + scale * share * (end - here))
    return [*adjusted, end]


@functools.cache
def _adjusting(cls: Any) -> Any:
    """A scheduler class that adjusts every schedule that is set, and is otherwise ``cls``."""

    @functools.wraps(cls.set_timesteps)
    def set_timesteps(self: Any, *args: Any, **kwargs: Any) -> None:
        cls.set_timesteps(self, *args, **kwargs)
        sampler = vars(self).get(ATTRIBUTE)
        if sampler is not None:  # one made from this one's configuration has none
            sampler.adjust(self)

    return disguised(cls, set_timesteps=set_timesteps)
