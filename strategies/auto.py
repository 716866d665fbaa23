"""Auto: ask for a speed or for a quality, and get the schedule that the profile knows to be best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from cachedit.errors import ProfileError
from cachedit.frontier import Frontier
from cachedit.paths import CRITERIA
from cachedit.planning import Plan, Planner
from cachedit.profile import Profile
from cachedit.registry import Strategy
from cachedit.solver import ARRAYS, PREDICTORS, check_measured
from cachedit.strategy import Axes, Context, FeatureStrategy, Output, Schedule, Site, Stack

SITES: dict[str, Site] = {"stack": Stack(), "output": Output()}
QUALITY = {"min_psnr": "psnr", "min_ssim": "ssim", "max_lpips": "lpips", "max_st_lpips": "st_lpips"}
TARGETS = ("target_speedup", "max_nfe", *QUALITY)


@dataclass(frozen=True)
class Auto(FeatureStrategy):
    """Solve for the schedule that reaches a speed or a quality, from what calibration measured (ours).

    A profile holds, over noise level, how far apart the features of any two steps are and what an error at a step does
    to the final sample. From that the cheapest schedule of every budget is solved for the very steps of a run: any
    number of them, of any sampler. The frontier that was measured with such schedules tells what a budget gains and
    costs. The schedule is static: no probe, no wait. Give one target; with none it is the profile's, else a speed-up
    of 2, or the highest that was measured.

    target_speedup: of a whole call, on the machine of the calibration; the nearest that whole steps allow.
    max_nfe:        computed steps.
    min_psnr:       dB against the uncached pipeline, mean over prompts, as it is expected; with the fewest steps.
    min_ssim, max_lpips, max_st_lpips: likewise, of the metrics that were measured.
    predictor:      "plain", "line", "quadratic", "fitted" or "damped" (fitted, with a stronger pull towards plain
                    reuse); None: what did best at that budget.
    criterion:      "min_sum" or "minimax" over the costs of gaps; None: what did best at that budget.
    terms:          most residuals that are kept for a forecast; None: as many as the predictor takes, or as the
                    frontier calls for.
    cached:         "stack", or "output" for models that have none; None: what was calibrated.
    """

    target_speedup: float | None = None
    max_nfe: int | None = None
    min_psnr: float | None = None
    min_ssim: float | None = None
    max_lpips: float | None = None
    max_st_lpips: float | None = None
    predictor: Literal["plain", "line", "quadratic", "fitted", "damped"] | None = None
    criterion: Literal["min_sum", "minimax"] | None = None
    terms: int | None = None
    cached: Literal["stack", "output"] | None = None

    profile_arrays: ClassVar[Axes] = ARRAYS
    also_calibrated: ClassVar[tuple[str, ...]] = (
        "magnitude_ratio",
        "residual_error",
        "channel_cluster",
        "cluster_solver",
        "indicator_polynomial",
    )
    needs_schedule: ClassVar[bool] = True
    by_default: ClassVar[bool] = True
    needs_response: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range, or more than one target.
        """
        given = {name: getattr(self, name) for name in TARGETS if getattr(self, name) is not None}
        if len(given) > 1:
            raise ValueError(f"Auto got {', '.join(f'{k}={v}' for k, v in given.items())}; allowed: one of them")
        for name, value in given.items():
            lowest = 1 if name in ("target_speedup", "max_nfe") else 0
            kinds = (int,) if name == "max_nfe" else (int, float)
            if type(value) not in kinds or not lowest <= value < math.inf:
                raise ValueError(f"Auto {name}={value!r}; allowed: a number, {lowest} or more")
        for name, allowed in (("predictor", PREDICTORS), ("criterion", CRITERIA), ("cached", SITES)):
            value = getattr(self, name)
            if value is not None and value not in [*allowed]:
                raise ValueError(f"Auto {name}={value!r}; allowed: {', '.join(map(repr, allowed))}, None")
        if self.terms is not None and (type(self.terms) is not int or not 1 <= self.terms <= max(PREDICTORS.values())):
            raise ValueError(f"Auto terms={self.terms!r}; allowed: 1 to {max(PREDICTORS.values())}, None")
        if self.predictor is not None and self.terms is not None and PREDICTORS[self.predictor] > self.terms:
            raise ValueError(
                f"Auto predictor={self.predictor!r}, terms={self.terms}; allowed: terms of "
                f"{PREDICTORS[self.predictor]} or more, which that predictor takes. Leave one of the two out."
            )

    @classmethod
    def serving(cls, target: Any) -> type[Strategy]:
        """For a language model, or a pipeline that has one, what a probe has found."""
        from cachedit.text.layouts import is_language_model

        (of_features, of_text) = cls.variants()
        return of_text if is_language_model(target) else of_features

    @classmethod
    def variants(cls) -> tuple[type[Strategy], ...]:
        """This one, and the one for text."""
        from cachedit.strategies.text_auto import TextAuto

        return cls, TextAuto

    @property
    def sites(self) -> tuple[Site, ...]:
        """The one that was calibrated, once that is known."""
        return (SITES[self.cached],) if self.cached is not None else ()

    @property
    def depth(self) -> int:
        """As many as a forecast may take."""
        return self.terms or 1

    def configured(self, profile: Profile | None) -> Auto:
        """Open options from what was calibrated, and from what the profile recommends.

        Raises:
            ProfileError: something else was, or a target was not measured.
        """
        if profile is None:
            return self._complete({}, None)
        check_measured(profile)
        cached = profile.defaults.get("cached", "stack")
        if self.cached not in (None, cached):
            raise ProfileError(
                f"Auto cached={self.cached!r}; allowed: {cached!r}, which the profile was calibrated for. Leave it "
                f"out, or calibrate with --option cached={self.cached}."
            )
        frontier = Frontier.of(profile)
        strategy = self._complete(profile.defaults, frontier)
        asked = [name for name in TARGETS if name != "max_nfe" and getattr(strategy, name) is not None]
        if frontier is None and asked:
            raise ProfileError(
                f"Auto {asked[0]} takes a measured frontier, and profile {profile.name or 'without a name'} has none. "
                "Allowed: max_nfe. Measure one: cachedit calibrate MODEL --strategy auto -o my.json"
            )
        return strategy

    def _complete(self, known: Mapping[str, Any], frontier: Frontier | None) -> Auto:
        """Every open option but the target filled in; the target too, where the profile recommends one."""
        given = any(getattr(self, name) is not None for name in TARGETS)
        target = {} if given else {name: known[name] for name in TARGETS if name in known}
        predictor, criterion = self.predictor or known.get("predictor"), self.criterion or known.get("criterion")
        Auto(predictor=predictor, criterion=criterion)  # refuses what a profile recommends and nothing can do
        if self.predictor is None and self.terms is not None and predictor and PREDICTORS[predictor] > self.terms:
            predictor = None
        most = PREDICTORS["fitted"] if frontier is None else max(map(_terms, frontier.points))
        terms = self.terms or (PREDICTORS[predictor] if predictor else known.get("terms", most))
        cached = self.cached or known.get("cached", "stack")
        return replace(self, predictor=predictor, criterion=criterion, terms=terms, cached=cached, **target)

    def should_compute(self, ctx: Context) -> bool:
        """The steps of the plan."""
        return ctx.step - ctx.run_start in self.plan(*_place(ctx)).computed

    def weights(self, ctx: Context) -> Sequence[float]:
        """Those of the plan's predictor for what is kept."""
        schedule, profile, handover = place = _place(ctx)
        (*kept, step) = steps = tuple(k - ctx.run_start for k in (*ctx.computed_steps, ctx.step))

        def solved() -> list[float]:
            return self.planner(*place).solver.weights(self.plan(*place).predictor, kept, step)

        return profile.once((self, "weights", schedule, handover, steps), solved)

    def expected(self, ctx: Context) -> Mapping[str, Any]:
        """The plan, and what the frontier says of it.

        Raises:
            ValueError, ProfileError: the steps of this run, or the frontier, do not allow the target.
        """
        place = _place(ctx)
        plan, planner = self.plan(*place), self.planner(*place)
        found: dict[str, Any] = {"computed_steps": len(plan.computed), "predictor": plan.predictor}
        if planner.frontier is not None:
            found["speedup"] = planner.frontier.speedup(planner.steps, len(plan.computed))
            for metric in planner.frontier.metrics if plan.cost > 0 else ():
                found[metric] = planner.frontier.quality(metric, planner.steps, plan.cost)
        return found

    def planner(self, schedule: Schedule, profile: Profile, handover: int | None = None) -> Planner:
        """What plans are taken from.

        Args:
            schedule: of the steps that the run makes, from 0.
            profile: what was calibrated.
            handover: the first of them that a second expert makes; None without one.
        """
        assert schedule.num_steps is not None
        last, terms = handover or schedule.num_steps, self.depth
        return profile.once(
            (Planner, schedule, last, terms, self.predictor, self.criterion),
            lambda: Planner(profile, schedule, last, terms, self.predictor, self.criterion),
        )

    def plan(self, schedule: Schedule, profile: Profile, handover: int | None = None) -> Plan:
        """The plan that meets the target, solved once."""
        return profile.once(
            (self, schedule, handover or schedule.num_steps),
            lambda: self._best(self.planner(schedule, profile, handover)),
        )

    def _best(self, planner: Planner) -> Plan:
        for option, metric in QUALITY.items():
            if getattr(self, option) is not None:
                return planner.reaching(metric, getattr(self, option))
        if self.max_nfe is not None:
            return planner.within(self.max_nfe)
        if planner.frontier is None:  # half of the steps, as no speed-up is known
            return planner.within(max(min(planner.every), math.ceil(planner.steps / 2)))
        return planner.near(self.target_speedup or min(2.0, max(planner.gains.values())))


def _terms(point: Any) -> int:
    return [*PREDICTORS.values()][point.predictor]


def _place(ctx: Context) -> tuple[Schedule, Profile, int | None]:
    """The schedule from the first step of the run on, the profile, and where a second expert takes over in it."""
    assert ctx.profile is not None
    handover = (ctx.expert_start or ctx.expert_steps or 0) - ctx.run_start
    return ctx.schedule.rest(ctx.run_start), ctx.profile, handover if handover > 0 else None
