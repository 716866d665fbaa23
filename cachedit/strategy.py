"""What a strategy is, what it is asked and what it may look at."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from cachedit.profile import Profile


def canonical(name: str) -> str:
    """Spelling without case, ``-`` and ``_``: "PlainCache", "plain-cache" and "plain_cache" are one name."""
    return re.sub(r"[-_\s]", "", name).lower()


@dataclass(frozen=True)
class Stack:
    """Site: the residual of the whole block stack."""


@dataclass(frozen=True)
class Schedule:
    """The noise schedule of a run.

    Attributes:
        num_steps: number of steps; None when it cannot be known.
        timesteps: one value per step in the scheduler's units, in sampling order; None when unknown.
        sigmas: noise level in [0, 1] per step; None when unknown.
    """

    num_steps: int | None = None
    timesteps: tuple[float, ...] | None = None
    sigmas: tuple[float, ...] | None = None

    def position(self, step: int) -> float:
        """Place of ``step`` in the schedule, 0 for the first and 1 for the last."""
        return step / (self.num_steps - 1) if self.num_steps and self.num_steps > 1 else 0.0


@dataclass
class Context:
    """What a policy may look at. Read-only for strategies.

    Attributes:
        step: index in the schedule.
        timestep: in the scheduler's units; None when unknown.
        sigma: noise level in [0, 1]; None when unknown.
        schedule: the schedule of this run.
        computed_steps: steps at which this expert was computed in this run, oldest first.
        profile: what calibration stored; None for strategies that need none.
        branch: the guidance path that asks; the answer holds for all branches of the step.
        expert: name of the denoiser.
        expert_start: first step of the schedule that belongs to this expert.
        expert_steps: number of steps that belong to this expert; None when unknown.
    """

    step: int = 0
    timestep: float | None = None
    sigma: float | None = None
    schedule: Schedule = field(default_factory=Schedule)
    computed_steps: list[int] = field(default_factory=list)
    profile: Profile | None = None
    branch: str = ""
    expert: str = ""
    expert_start: int = 0
    expert_steps: int | None = None


@dataclass(frozen=True)
class Strategy:
    """Base of all strategies: a frozen dataclass whose fields are the options. Subclassing registers it."""

    registry: ClassVar[dict[str, type[Strategy]]] = {}
    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""

    def __init_subclass__(cls, abstract: bool = False, **kwargs: Any) -> None:
        """Enter the class into the registry under its name in snake case."""
        super().__init_subclass__(**kwargs)
        if abstract:
            return
        cls.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()
        known = cls.registry.get(cls.name)
        if known is not None and known.__module__ != cls.__module__:
            raise TypeError(f"strategy {cls.name!r} is already defined in {known.__module__}")
        cls.registry[cls.name] = cls

    @classmethod
    def find(cls, strategy: str | Strategy, options: dict[str, Any]) -> Strategy:
        """The strategy of that name (any spelling) with ``options``, or the instance with them replaced.

        Raises:
            ValueError: no strategy has that name.
            TypeError: an option that the strategy does not have.
        """
        if isinstance(strategy, str):
            by_name = {canonical(name): found for name, found in cls.registry.items()}
            if canonical(strategy) not in by_name:
                raise ValueError(
                    f"no strategy is called {strategy!r}. Allowed: {', '.join(sorted(cls.registry))}. "
                    "`cachedit strategies` describes them."
                )
            found = by_name[canonical(strategy)]
            found.check_options(options)
            return found(**options)
        if not isinstance(strategy, Strategy):
            raise TypeError(
                f"strategy is a {type(strategy).__name__}; allowed: a name ({', '.join(sorted(cls.registry))}) "
                f"or an instance such as {next(iter(cls.registry.values())).__name__}()."
            )
        strategy.check_options(options)
        return dataclasses.replace(strategy, **options)

    @classmethod
    def check_options(cls, options: dict[str, Any]) -> None:
        """Refuse options that are not fields of this strategy."""
        allowed = [f.name for f in dataclasses.fields(cls)]
        unknown = sorted(set(options) - set(allowed))
        if unknown:
            raise TypeError(
                f"{cls.__name__} has no option {', '.join(map(repr, unknown))}. "
                f"Allowed: {', '.join(allowed) or 'none'}; for every strategy: profile, blocks, timesteps, "
                "num_inference_steps, timestep_arg, few_step_guard, cache_device, cache_dtype."
            )


@dataclass(frozen=True)
class FeatureStrategy(Strategy, abstract=True):
    """Caching along one denoising trajectory: when to compute a site, and how to forecast it when not.

    Class attributes:
        site: what is cached.
        history: number of computed residuals that are kept for the forecast.
        profile_arrays: names of the calibrated arrays that the strategy reads; with none it needs no profile.
        needs_schedule: True if the policy must know the number of steps.
    """

    site: ClassVar[Stack] = Stack()
    history: ClassVar[int] = 1
    profile_arrays: ClassVar[tuple[str, ...]] = ()
    needs_schedule: ClassVar[bool] = False

    def should_compute(self, ctx: Context) -> bool | str:
        """True, or the reason as a string, to compute this step; False or "" to reuse.

        Asked once per step, and only when a residual is there to be reused.
        """
        return True

    def weights(self, ctx: Context) -> Sequence[float] | None:
        """One weight per kept residual, oldest first; None adds the newest residual as it is."""
        return None

    def configured(self, profile: Profile | None) -> FeatureStrategy:
        """This strategy with the options that were left open filled in from the profile."""
        return self
