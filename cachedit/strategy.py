"""What a feature cache is asked and what it may look at."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from cachedit.registry import Strategy as Strategy
from cachedit.registry import canonical as canonical

if TYPE_CHECKING:
    from cachedit.profile import Profile


FEW_STEPS, SHORT_RUN = 4, 8  # runs of so many steps reuse nothing, or one step in a row, unless the guard is lifted


@dataclass(frozen=True)
class Stack:
    """Site: the residual of the blocks ``start`` up to ``stop`` of the stack, the whole of it by default.

    Blocks are counted over all lists of the stack in execution order. Negative numbers count from the end, and floats
    are shares of the depth (0.75 of 40 blocks: 30), at least one block. A signal that listens behind the leading blocks
    listens where the first site starts.
    """

    start: int | float = 0
    stop: int | float | None = None


@dataclass(frozen=True)
class Module:
    """Site: what the modules of one kind give before their gate.

    Kinds: "attn" (self or joint attention), "temporal" (self-attention along time, where the model has such modules),
    "cross" (cross-attention to text) and "mlp" (feed-forward).
    """

    kind: str


@dataclass(frozen=True)
class Output:
    """Site: the output of the denoiser; with ``residual`` minus the latent, where both have one shape."""

    residual: bool = False


@dataclass(frozen=True)
class Guidance:
    """Site: what the later branches of a step differ by from its first one, in two calls or in one batch."""


@dataclass(frozen=True)
class Skip:
    """Site: the feature that enters a layer on a UNet's way up; a reused pass runs only what lies above it.

    ``level`` is a block from the outside in, ``layer`` a layer of it from the outside in; (0, 0) runs least.
    """

    level: int = 0
    layer: int = 0


Site = Stack | Module | Output | Guidance | Skip
Axes = Mapping[str, tuple[str, ...]]  # calibrated array -> what it lies over, such as ("step", "gap")


@dataclass(frozen=True)
class Channels:
    """Partition: every channel belongs to a cluster, and every cluster has its own weights.

    array: profile array with the cluster of every channel.
    """

    array: str


@dataclass(frozen=True)
class Bands:
    """Partition: low and high frequencies along the tokens (or the two axes of a picture), with weights of their own.

    cut: share of the frequencies that is low, in (0, 1).
    """

    cut: float


@dataclass(frozen=True)
class Schedule:
    """The noise schedule of a run.

    Attributes:
        num_steps: number of steps; None when it cannot be known.
        timesteps: one value per step in the scheduler's units, in sampling order; None when unknown.
        sigmas: noise level in [0, 1] per step; None when unknown.
        response: what a unit of the denoiser's output at each step adds to the final sample, by the sampler alone
            (``cachedit.feature.response``); None when unknown, and for strategies that do not ask for it.
    """

    num_steps: int | None = None
    timesteps: tuple[float, ...] | None = None
    sigmas: tuple[float, ...] | None = None
    response: tuple[float, ...] | None = None

    def position(self, step: int) -> float:
        """Place of ``step`` in the schedule, 0 for the first and 1 for the last."""
        return step / (self.num_steps - 1) if self.num_steps and self.num_steps > 1 else 0.0

    def rest(self, first: int) -> Schedule:
        """The schedule from step ``first`` on."""
        if first == 0:
            return self
        return Schedule(
            None if self.num_steps is None else self.num_steps - first,
            None if self.timesteps is None else self.timesteps[first:],
            None if self.sigmas is None else self.sigmas[first:],
            None if self.response is None else self.response[first:],
        )


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
        site: whose weights are asked for; ``computed_steps`` are then those of its kept residuals.
        signals: what the strategy's signal measured at each step after the last computed one, this one included.
        changes: relative L1 change per step of each site between its two newest residuals, of the sample that changed
            most; for strategies that measure it.
        reused: the sites that the last reused step reused.
        trend: how far the probe has moved since the last computed step, over how far it moved between the last two.
        run_start: first step of the schedule that this run makes, later than 0 from image to image.
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
    site: Site | None = None
    signals: Sequence[float] = ()
    trend: float = 1.0
    changes: Mapping[Site, float] = field(default_factory=dict)
    reused: Sequence[Site] = ()
    run_start: int = 0


@dataclass(frozen=True)
class FeatureStrategy(Strategy, abstract=True):
    """Caching along one denoising trajectory: when to compute a site, and how to forecast it when not.

    Class attributes:
        site: what is cached. A strategy with several, or with a choice, overrides ``sites``.
        history: number of computed residuals that are kept for the forecast.
        profile_arrays: the calibrated arrays that the strategy reads, and their axes; a profile is held to them.
        also_calibrated: arrays that it does not read and that are measured along, where the model allows, for others.
        needs_schedule: True if the policy must know the number of steps.
        needs_response: True if the policy looks at the response of the sampler in the schedule.
        measures_change: True if the policy looks at how much each site changed between its two newest residuals.
        signal: name of what is measured at every step (``cachedit.feature.signals``); "" for a static schedule.
        partition: what the weights are split over; None for one weight per residual.
    """

    engine: ClassVar[str] = "cachedit.feature.attachment"
    common_options: ClassVar[tuple[str, ...]] = (
        *("blocks", "timesteps", "num_inference_steps", "timestep_arg"),
        *("few_step_guard", "cache_device", "cache_dtype", "process_group"),
    )
    site: ClassVar[Site] = Stack()
    history: ClassVar[int] = 1
    profile_arrays: ClassVar[Axes] = {}
    also_calibrated: ClassVar[tuple[str, ...]] = ()
    needs_schedule: ClassVar[bool] = False
    needs_response: ClassVar[bool] = False
    measures_change: ClassVar[bool] = False
    signal: ClassVar[str] = ""
    partition: ClassVar[Channels | Bands | None] = None

    @property
    def needed_arrays(self) -> Axes:
        """Those of ``profile_arrays`` without which it cannot run as it is configured; a profile is then looked for."""
        return self.profile_arrays

    @property
    def sites(self) -> tuple[Site, ...]:
        """What is cached, an outer site before those inside it."""
        return (self.site,)

    @property
    def depth(self) -> int:
        """Number of computed residuals that are kept for the forecast."""
        return self.history

    def should_compute(self, ctx: Context) -> bool | str:
        """True, or the reason as a string, to compute this step; False or "" to reuse.

        Asked once per step, and only when a residual is there to be reused.
        """
        return True

    def reuses(self, ctx: Context, site: Site) -> bool | Collection[int]:
        """Which of the sites a step that is not computed reuses; of a module site perhaps only some modules."""
        return True

    def weights(self, ctx: Context) -> Sequence[Any] | None:
        """One weight per kept residual, oldest first; None adds the newest residual as it is.

        With a partition, one such row per cluster, or two for the low and the high band.
        """
        return None

    def correct(self, ctx: Context) -> tuple[Sequence[float], Sequence[float]] | None:
        """Scale and shift per channel for what is forecast; None leaves it as it is."""
        return None

    @property
    def adjusts_sampler(self) -> bool:
        """True if ``step_scales`` is to be asked whenever the pipeline's scheduler is set."""
        return False

    def step_scales(self, schedule: Schedule, profile: Profile | None) -> Sequence[float] | None:
        """Factor on the length of every step of the sampler; None leaves the sampler alone."""
        return None

    def check_run(self, schedule: Schedule, profile: Profile | None) -> None:
        """Raise ValueError or ProfileError if a run with this schedule is impossible; asked before its first step."""

    def expected(self, ctx: Context) -> Mapping[str, Any]:
        """What is expected of a run, for its record; asked before its first step, after ``check_run``.

        ``ctx`` tells the schedule and the profile, as ``check_run`` does, and also where the run starts and the steps
        of the first expert, where they are known. What these make impossible raises ValueError or ProfileError here.
        """
        return {}

    def configured(self, profile: Profile | None) -> FeatureStrategy:
        """This strategy with the options that were left open filled in from the profile."""
        return self
