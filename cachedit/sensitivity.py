"""What an error at each step of a run does to its final sample, from what was measured under another sampler."""

from __future__ import annotations

import numpy as np

from cachedit.profile import Profile
from cachedit.schedules import resample_amplification
from cachedit.strategy import Schedule

FAINT = 0.01  # of the mean response: less is taken for that much, as what is divided by it would be noise


def sensitivity_of(profile: Profile, schedule: Schedule) -> np.ndarray:
    """The profile's ``sensitivity`` at the steps of a run, ``[T]``.

    Two things make it: what the denoiser makes of a change at that noise level, which is a matter of the model, and how
    much of an output the sampler carries into the final sample, its response. So what was measured is divided by the
    calibrated sampler's response, interpolated over noise level, and multiplied by that of the run's own. Where one of
    the two is unknown a step counts by the part of the noise levels that it stands for, which is Euler's response.
    """
    measured = next(iter(profile.arrays["sensitivity"].values()))
    known, wanted = profile.levels(schedule, len(measured))
    calibrated = profile.arrays.get("response")
    if calibrated is None or schedule.response is None:
        return np.asarray(resample_amplification(measured, known, wanted))
    gain = np.asarray(measured) / magnitudes(next(iter(calibrated.values())))
    return np.interp(-np.asarray(wanted), -np.asarray(known), gain) * magnitudes(schedule.response)


def magnitudes(response: np.ndarray | tuple[float, ...] | list[float]) -> np.ndarray:
    """Absolute values of a response, none of them so small that nothing may be divided by it."""
    found = np.abs(np.asarray(response, dtype=float))
    return np.maximum(found, FAINT * found.mean() or 1.0)
