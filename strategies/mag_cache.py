"""MagCache: reuse the residual while the product of calibrated magnitude ratios stays near one."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

from cachedit.profile import Profile
from cachedit.strategies.checks import check_choice, check_count
from cachedit.strategy import Axes, Context, FeatureStrategy


@dataclass(frozen=True)
class MagCache(FeatureStrategy):
    """Skip while the accumulated magnitude error stays below a threshold (arXiv 2506.09045).

    The magnitude ratio of a step is the mean over tokens of ``|r_i| / |r_{i-1}|``, measured once per model. At gap u
    after a computed step the error is ``sum_{q=1..u} |1 - ratio_1 * ... * ratio_q|``; a step is reused while that is
    below ``threshold`` and at most ``max_skip_steps`` steps in a row have been. Options left at None take the
    profile's recommendation, else the first value named below.

    Ours, not the paper's: ratios are read at the noise level of the step, so one table serves any number of steps;
    branches decide together (the branch with the largest error decides), which changes nothing for the published
    tables; the warm-up of a later expert starts again at its own first step.

    threshold:          accumulated error that forces a computation (0.06).
    max_skip_steps:     most reused steps in a row (3).
    retention_ratio:    share of the leading steps that is always computed (0.2).
    inclusive:          reuse also when the error equals the threshold (True: FLUX, Hunyuan; False: Wan, Qwen).
    retention_rounding: "nearest" (FLUX, Hunyuan) or "floor" (Wan, Qwen) of steps * retention_ratio.
    always_compute:     step indices that are never reused (the reference's FLUX script: 11).
    resample:           "sigma" reads the cumulative ratios at the noise level; "nearest" is the reference's index rule.
    """

    threshold: float | None = None
    max_skip_steps: int | None = None
    retention_ratio: float | None = None
    inclusive: bool | None = None
    retention_rounding: Literal["nearest", "floor"] | None = None
    always_compute: tuple[int, ...] = ()
    resample: Literal["sigma", "nearest"] = "sigma"

    paper: ClassVar[str] = "arXiv 2506.09045"
    profile_arrays: ClassVar[Axes] = {"magnitude_ratio": ("step",)}
    needs_schedule: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range.
        """
        _check_number("threshold", self.threshold, 0.0, math.inf)
        _check_number("retention_ratio", self.retention_ratio, 0.0, 1.0)
        if self.max_skip_steps is not None:
            check_count(self, "max_skip_steps")
        if not isinstance(self.always_compute, tuple) or not all(type(step) is int for step in self.always_compute):
            raise ValueError(f"MagCache always_compute={self.always_compute!r}; allowed: a tuple of step indices")
        check_choice(self, "resample", ("sigma", "nearest"))
        if self.retention_rounding not in (None, "nearest", "floor"):
            raise ValueError(
                f"MagCache retention_rounding={self.retention_rounding!r}; allowed: 'nearest', 'floor', or None"
            )

    def configured(self, profile: Profile | None) -> MagCache:
        """Open options from the profile's recommendation, else the defaults of the field."""
        recommended: dict[str, Any] = {
            "threshold": 0.06,
            "max_skip_steps": 3,
            "retention_ratio": 0.2,
            "inclusive": True,
            "retention_rounding": "nearest",
        } | (dict(profile.defaults) if profile is not None else {})
        open_fields = [f.name for f in fields(self) if getattr(self, f.name) is None]
        return replace(self, **{name: recommended[name] for name in open_fields})

    def should_compute(self, ctx: Context) -> bool | str:
        """The reference's rule, as a function of the steps since the last computed one."""
        assert ctx.profile is not None
        assert self.threshold is not None
        assert self.max_skip_steps is not None
        if ctx.step - ctx.expert_start < self.warmup(ctx.expert_steps or ctx.schedule.num_steps or 0):
            return "warm-up"
        if ctx.step in self.always_compute:
            return "always computed"
        last = ctx.computed_steps[-1]
        if ctx.step - last > self.max_skip_steps:
            return "max_skip_steps reached"
        ratios_by_branch = ctx.profile.magnitude_ratios(ctx.schedule, self.resample)
        error = max(_error(ratios, last, ctx.step) for ratios in ratios_by_branch.values())
        if error < self.threshold or (self.inclusive and error == self.threshold):
            return False
        return "error reached the threshold"

    def warmup(self, steps: int) -> int:
        """Number of leading steps that are always computed in a run of ``steps``."""
        assert self.retention_ratio is not None
        return int(steps * self.retention_ratio + (0.5 if self.retention_rounding == "nearest" else 0.0))


def _check_number(name: str, value: Any, lowest: float, highest: float) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not lowest <= value <= highest:
        allowed = f"{lowest} or more" if highest == math.inf else f"a share from {lowest:g} to {highest:g}"
        raise ValueError(f"MagCache {name}={value!r}; allowed: {allowed}")


def _error(ratios: tuple[float, ...], last: int, step: int) -> float:
    """Accumulated magnitude error at ``step`` when the residual is that of step ``last``."""
    error, product = 0.0, 1.0
    for ratio in ratios[last + 1 : step + 1]:
        product *= ratio
        error += abs(1.0 - product)
    return error
