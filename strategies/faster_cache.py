"""FasterCache: reuse attention at every other step, and what the unguided branch differs by from the guided one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from cachedit.predictors import damped_line
from cachedit.strategies.checks import check_count
from cachedit.strategies.clocks import check_timesteps, training_time
from cachedit.strategy import Bands, Context, FeatureStrategy, Guidance, Module, Site


@dataclass(frozen=True)
class FasterCache(FeatureStrategy):
    """Reuse attention at every other step, and in the late run the difference of the branches (arXiv 2410.19355).

    A reused attention output is ``y0 + weight * (y0 - y1)`` with the two newest that were computed. The unguided branch
    is what the guided one gives plus the difference of the two when both were last computed, low and high frequencies
    of it times a gain each. At the steps at which both branches are computed, attention is computed too. A model that
    is called once per step has no such difference, and attention alone is reused.

    Timesteps are counted as by PAB. The paper splits the frequencies of every frame in two dimensions; so do we, and
    along the tokens where a model gives packed tokens. Which branch is run and which is forecast follows from the
    pipeline: in two calls the first is run, in a batch of two the second half.

    Ours: both gains are 1, which keeps a difference that does not change; the paper's are 1.1, in diffusers' hook they
    multiply up from step to step. A weight of 0.5 is diffusers'.

    weight:            of the line through the computed attention outputs; None rises from 0 to 1 over the run (paper).
    attention:         timesteps between which attention is reused, exclusive (diffusers: -1 and 681).
    guidance:          timesteps between which the difference is reused, exclusive (diffusers: -1 and 641).
    guidance_interval: age at which both branches are computed again (paper: 5).
    low_gain:          factor on the low frequencies of the difference at timesteps above 99 (paper: 1.1).
    high_gain:         factor on the high ones at timesteps below 301 (paper: 1.1).
    """

    weight: float | None = 0.5
    attention: tuple[float, float] = (-1, 681)
    guidance: tuple[float, float] = (-1, 641)
    guidance_interval: int = 5
    low_gain: float = 1.0
    high_gain: float = 1.0

    paper: ClassVar[str] = "arXiv 2410.19355"
    history: ClassVar[int] = 2
    needs_schedule: ClassVar[bool] = True
    partition: ClassVar[Bands] = Bands(0.4)  # a radius of a fifth of the side, of the half at which frequencies end

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range.
        """
        if self.weight is not None:
            _check_number("weight", self.weight, 0, 1)
        _check_number("low_gain", self.low_gain, 0, 2)
        _check_number("high_gain", self.high_gain, 0, 2)
        check_timesteps("FasterCache", "attention", self.attention)
        check_timesteps("FasterCache", "guidance", self.guidance)
        check_count(self, "guidance_interval", lowest=1)

    @property
    def sites(self) -> tuple[Site, ...]:
        """The difference of the branches, and self-attention."""
        return Guidance(), Module("attn"), Module("temporal")

    def should_compute(self, ctx: Context) -> bool | str:
        """Everything in the early run, and when the difference is due."""
        time = training_time(ctx.schedule, ctx.step)
        if not (_within(self.attention, time) or _within(self.guidance, time)):
            return "outside of the timesteps"
        due = _within(self.guidance, time) and ctx.step - ctx.computed_steps[-1] >= self.guidance_interval
        return "both branches are due" if due else False

    def reuses(self, ctx: Context, site: Site) -> bool:
        """The difference until it is due, attention at the step after it was computed."""
        if not ctx.computed_steps:
            return False
        limits, interval = (self.guidance, self.guidance_interval) if site == Guidance() else (self.attention, 2)
        return _within(limits, training_time(ctx.schedule, ctx.step)) and ctx.step - ctx.computed_steps[-1] < interval

    def weights(self, ctx: Context) -> Sequence[Any] | None:
        """The damped line of attention; of the difference, the newest times the gain of each band."""
        if ctx.site != Guidance():
            gain = ctx.schedule.position(ctx.step) if self.weight is None else self.weight
            return damped_line(ctx.computed_steps, ctx.step, gain)
        time = training_time(ctx.schedule, ctx.step)
        low, high = self.low_gain if time > 99 else 1.0, self.high_gain if time < 301 else 1.0
        older = [0.0] * (len(ctx.computed_steps) - 1)
        return None if low == high == 1 else ([*older, low], [*older, high])


def _within(limits: tuple[float, float], time: float) -> bool:
    return limits[0] < time < limits[1]


def _check_number(name: str, value: Any, lowest: float, highest: float) -> None:
    if type(value) not in (int, float) or not lowest <= value <= highest:
        raise ValueError(f"FasterCache {name}={value!r}; allowed: a number from {lowest} to {highest}")
