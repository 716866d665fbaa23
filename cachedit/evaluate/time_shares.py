"""Where the time of a call goes: what a computed and a reused step take, and what lies outside of the steps."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from cachedit.errors import ProfileError


def time_shares(seconds: Mapping[tuple[int, int], float]) -> dict[str, list[float]]:
    """The array "time" of a profile, by least squares of relative errors.

    A call takes: outside + computed steps * (c + keeping) + reused steps * reused, and keeps nothing without a cache.
    What would come out negative, because it is small, is 0, and the others are fitted anew.

    Args:
        seconds: (steps, computed steps) -> of a whole call; with all steps computed it had no cache.

    Returns:
        "outside", "reused" and "keeping", each in units of c.

    Raises:
        ProfileError: the time does not grow with the computed steps.
    """
    rows = np.array([[nfe, 1.0, steps - nfe, nfe if nfe < steps else 0.0] for steps, nfe in seconds])
    rows /= np.array([*seconds.values()])[:, None]
    counted, found = [*range(min(rows.shape))], np.zeros(4)
    while True:
        found[counted] = np.linalg.lstsq(rows[:, counted], np.ones(len(rows)), rcond=None)[0]
        positive = [k for k in counted if found[k] > 0]
        if positive == counted:
            break
        counted, found = positive, np.zeros(4)
    computed, outside, reused, keeping = found
    if computed == 0:
        raise ProfileError(
            "the time of a call does not grow with its computed steps; allowed: a model that takes time, on a machine "
            "that does nothing else. Measure the frontier again, or on more prompts."
        )
    shares = {"outside": outside, "reused": reused, "keeping": keeping}
    return {name: [float(f"{share / computed:.6g}")] for name, share in shares.items()}
