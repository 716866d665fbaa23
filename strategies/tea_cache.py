"""TeaCache: reuse the residual while the summed change of the modulated input stays small."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from cachedit.profile import Profile
from cachedit.strategies.checks import check_count, check_number
from cachedit.strategies.rules import over_budget
from cachedit.strategy import Axes, Context, FeatureStrategy, canonical

Polynomial = tuple[float, ...]

IDENTITY: Polynomial = (0.0, 0.0, 0.0, 1.0, 0.0)
UNCALIBRATED = 0.1  # threshold where there is no polynomial
PUBLISHED: dict[str, tuple[Polynomial, float]] = {
    "flux": ((498.651651, -283.781631, 55.8554382, -3.82021401, 0.264230861), 0.25),
    "hunyuanvideo": ((733.226126, -401.131952, 67.5869174, -3.149878, 0.0961237896), 0.1),
    "ltxvideo": ((21.4700694, -12.8016453, 2.31279151, 0.792487521, 0.00969274326), 0.03),
    "mochi": ((-3512.41319, 811.675948, -60.9400215, 2.42429681, 0.00305291719), 0.06),
    "cosmos": ((271.156237, -91.9775607, 2.2443725, 2.08355751, 0.14177633), 0.1),
    "lumina2": ((393.76566581, -603.50993606, 209.10239044, -23.00726601, 0.86377344), 0.2),
}
"""Name -> the authors' fit, highest power first, and their lowest threshold."""


@dataclass(frozen=True)
class TeaCache(FeatureStrategy):
    """Skip while the rescaled change of the first block's modulated input adds up to little (arXiv 2411.19108).

    The relative L1 change of what enters the first block's attention since the step before is mapped to the change of
    the output by a polynomial, fitted once per model, and summed from the last computed step on. A step is reused while
    the sum is below ``threshold``; the first steps and the last one are computed. The fits have an intercept, so every
    step counts, and a threshold holds for about as many steps in all as it was published for.

    The authors' fits for CogVideoX, ConsisID, HiDream and Wan are over the timestep embedding, which is not what is
    measured here, so they are not listed: calibrate for those models. Ours: negative values of the polynomial count as
    0 (``clamp``), so that one step cannot pay for another; the cap on reused steps in a row; every sample has its sum.

    coefficients:   five numbers, highest power first, or the name of a published fit ("flux", "hunyuanvideo",
                    "ltxvideo", "mochi", "cosmos", "lumina2"); None takes the profile's, or the change as it is.
    threshold:      sum that forces a computation; None takes the lowest published for the fit, the profile's, or 0.1.
    warmup:         leading steps that are always computed (1).
    max_skip_steps: most reused steps in a row.
    clamp:          False lets negative values count, as the authors' code does.
    """

    coefficients: Polynomial | str | None = None
    threshold: float | None = None
    warmup: int = 1
    max_skip_steps: int = 4
    clamp: bool = True

    paper: ClassVar[str] = "arXiv 2411.19108"
    signal: ClassVar[str] = "modulated_input"
    profile_arrays: ClassVar[Axes] = {"indicator_polynomial": ("power",)}
    needs_schedule: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range.
        """
        given = self.coefficients
        named = isinstance(given, str) and canonical(given) in PUBLISHED
        if not (named or given is None or isinstance(given, tuple) and len(given) == 5 and all(map(_is_number, given))):
            raise ValueError(
                f"TeaCache coefficients={given!r}; allowed: five numbers in a tuple, highest power first, or one of "
                f"{', '.join(PUBLISHED)}"
            )
        if self.threshold is not None:
            check_number(self, "threshold")
        check_count(self, "warmup", lowest=1)
        check_count(self, "max_skip_steps")
        if not isinstance(self.clamp, bool):
            raise ValueError(f"TeaCache clamp={self.clamp!r}; allowed: True or False")

    @property
    def needed_arrays(self) -> Axes:
        """None: a profile is used if one is given."""
        return {}

    def configured(self, profile: Profile | None) -> TeaCache:
        """Polynomial and threshold from the published fits or the profile, where they were left open."""
        coefficients, threshold = IDENTITY, UNCALIBRATED
        if isinstance(self.coefficients, str):
            coefficients, threshold = PUBLISHED[canonical(self.coefficients)]
        elif self.coefficients is not None:
            coefficients = self.coefficients
        elif profile is not None:
            (row, *_) = profile.arrays["indicator_polynomial"].values()
            coefficients, threshold = tuple(row), profile.defaults.get("threshold", UNCALIBRATED)
        if self.threshold is not None:
            threshold = self.threshold
        return replace(self, coefficients=coefficients, threshold=threshold)

    def should_compute(self, ctx: Context) -> bool | str:
        """The authors' rule; a later expert warms up anew."""
        assert self.threshold is not None
        if ctx.step - ctx.expert_start < self.warmup:
            return "warm-up"
        change = sum([self.rescaled(change) for change in ctx.signals])
        return over_budget(ctx, change, self.threshold, self.max_skip_steps)

    def rescaled(self, change: float) -> float:
        """The polynomial at ``change``."""
        assert isinstance(self.coefficients, tuple)
        value = 0.0
        for coefficient in self.coefficients:
            value = value * change + coefficient
        return max(value, 0.0) if self.clamp else value


def _is_number(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float)) and math.isfinite(value)
