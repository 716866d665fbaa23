"""L2P: forecast a skipped residual with weights that were fitted for its step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from cachedit.errors import ProfileError
from cachedit.profile import Profile
from cachedit.schedules import every
from cachedit.strategies.checks import check_count
from cachedit.strategy import Axes, Context, FeatureStrategy, Schedule

DEFAULTS = {"interval": 4, "warmup": 5, "terms": 3}


@dataclass(frozen=True)
class L2P(FeatureStrategy):
    """Forecast by learned weights, one row per step, over the last computed residuals (arXiv 2604.26365).

    The steps are those of a fixed interval, so it is known beforehand from which computed residuals each skipped one is
    forecast. Its weights are fitted to what a few uncached runs give there, in seconds. They hold for the very steps
    and options of that calibration; a run with others is refused.

    The paper trains the weights on the squared error; how it starts and constrains them is not known to us. Ours: the
    solution in closed form, for all branches and streams together; the weights of a step sum to 1, so what does not
    change is kept; and a ridge pulls them towards plain reuse, because they are fitted to uncached runs and a forecast
    changes what the steps after it see. After a step that was computed out of turn the fit does not hold, and the
    newest residual is reused as it is.

    interval: one step in ``interval`` is computed after the warm-up, counted from its last step (4).
    warmup:   leading steps that are always computed (5). With 3, forecasts on our sample were worse than plain reuse.
    terms:    computed residuals that a forecast is made of (3); 1 is plain reuse.
    """

    interval: int | None = None
    warmup: int | None = None
    terms: int | None = None

    paper: ClassVar[str] = "arXiv 2604.26365"
    profile_arrays: ClassVar[Axes] = {"forecast_weights": ("step", "term")}
    needs_schedule: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range.
        """
        check_count(self, *[name for name in DEFAULTS if getattr(self, name) is not None], lowest=1)

    @property
    def depth(self) -> int:
        """As many as a forecast is made of."""
        return DEFAULTS["terms"] if self.terms is None else self.terms

    def configured(self, profile: Profile | None) -> L2P:
        """Open options as they were when the weights were fitted.

        Raises:
            ProfileError: an option that was another one then.
        """
        fitted = dict(DEFAULTS)
        if profile is not None:
            fitted |= {name: profile.defaults[name] for name in DEFAULTS if name in profile.defaults}
            fitted["terms"] = len(next(iter(profile.arrays["forecast_weights"].values()))[0])
        given = {name: getattr(self, name) for name in DEFAULTS if getattr(self, name) is not None}
        if profile is not None and not given.items() <= fitted.items():
            raise ProfileError(
                f"got {self}; allowed: {L2P(**fitted)}, which the profile's weights were fitted for. Leave these "
                "options out, or calibrate with them."
            )
        return replace(self, **(fitted | given))

    def check_run(self, schedule: Schedule, profile: Profile | None) -> None:
        """Raise ProfileError unless the run has the calibrated steps."""
        assert profile is not None
        profile.check_same_schedule(schedule, "L2P")

    def should_compute(self, ctx: Context) -> bool:
        """The warm-up, then one step in ``interval``; a later expert begins anew."""
        return ctx.step == self.computed(ctx.expert_start, ctx.step)[-1]

    def weights(self, ctx: Context) -> Sequence[float] | None:
        """Those of the step, if what is kept is what they were fitted to."""
        assert ctx.profile is not None
        steps = self.computed(ctx.expert_start, ctx.step)[-self.depth :]
        if steps != list(ctx.computed_steps):
            return None
        rows = next(iter(ctx.profile.arrays["forecast_weights"].values()))
        row: list[float] = rows[ctx.step][-len(steps) :]
        return row

    def computed(self, start: int, step: int) -> list[int]:
        """Computed steps up to ``step`` of a denoiser whose first step is ``start``."""
        assert self.interval is not None
        assert self.warmup is not None
        return [start + position for position in every(step - start + 1, self.interval, self.warmup)]
