"""One wrap: the strategy, the clock and the record of the run, shared by all experts of a pipeline."""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections.abc import Callable
from threading import Lock, get_ident
from typing import TYPE_CHECKING, Any

from cachedit.feature.clock import Clock
from cachedit.feature.options import Options
from cachedit.feature.sampler import Sampler
from cachedit.profile import Profile
from cachedit.run import Run, Step
from cachedit.strategy import FEW_STEPS, SHORT_RUN, Context, FeatureStrategy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cachedit.feature.place import Place, Residual
    from cachedit.feature.plan import Plan
    from cachedit.feature.runner import Runner

_LOCK = Lock()
Observer = Callable[[Step, "Sequence[Place]", "Sequence[Residual | None]"], None]


class Pipeline:
    """The pipeline of a session, held so that neither keeps the other alive and a deep copy has its own."""

    def __init__(self, pipeline: Any) -> None:
        self._ref = weakref.ref(pipeline)

    def __deepcopy__(self, memo: dict[int, Any]) -> Pipeline | None:
        copied = memo.get(id(self._ref()))
        return None if copied is None else Pipeline(copied)

    @property
    def object(self) -> Any:
        """The pipeline; None if it is gone."""
        return self._ref()

    @property
    def scheduler(self) -> Any:
        """Its scheduler now; None if the pipeline is gone or has none with timesteps."""
        scheduler = getattr(self._ref(), "scheduler", None)
        return scheduler if getattr(scheduler, "timesteps", None) is not None else None

    @property
    def boundary(self) -> float | None:
        """Noise level at which the first expert hands over to the second (Wan2.2's ``boundary_ratio``)."""
        return getattr(getattr(self._ref(), "config", None), "boundary_ratio", None)


class Session:
    """Decides step by step, and keeps the record.

    Attributes:
        run: the record of the current run; None before the first and after the last has been closed.
        last: the last run that finished or was aborted.
        in_flight: thread that is inside a denoiser; None outside.
        run_start: first step of the schedule that the current run makes.
        decision: whether the current step is computed as such, and why; a branch may still have nothing to reuse.
        context: what the strategy saw when it last decided.
        sampler: adjusts the pipeline's scheduler; None if the strategy leaves it alone.
    """

    def __init__(
        self,
        strategy: FeatureStrategy,
        profile: Profile | None,
        options: Options,
        clock: Clock,
        pipeline: Pipeline | None,
        observer: Observer | None = None,
    ) -> None:
        self.strategy, self.profile, self.options = strategy, profile, options
        self.clock, self.pipeline, self.observer = clock, pipeline, observer
        self.runners: list[Runner] = []
        self.run: Run | None = None
        self.last: Run | None = None
        self.in_flight: int | None = None
        self.run_start = 0
        self._owner: int | None = None
        self._calling: int | None = None
        self.context = Context()
        self.decided_for: tuple[int, Runner] | None = None
        self.decision: tuple[bool, str] = (True, "")
        self._warned: set[str] = set()
        self.sampler: Sampler | None = None
        if strategy.adjusts_sampler and pipeline is not None:
            self.sampler = Sampler(strategy, profile)
            self.sampler.check(pipeline.scheduler)

    # -- a pipeline call ------------------------------------------------------------------------------------------

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a pipeline call; whatever ends it, the run is closed and every residual dropped."""
        me = get_ident()
        with _LOCK:
            if self._calling not in (None, me):
                raise RuntimeError(
                    "this pipeline is running in another thread, and its cache belongs to that run. "
                    "Give every thread its own copy (copy.deepcopy(pipe)) or take turns."
                )
            nested, self._calling = self._calling == me, me
        try:
            if self.sampler is not None and self.pipeline is not None:
                self.sampler.attach(self.pipeline.object)  # the pipeline may have been given another scheduler
            return function(*args, **kwargs)
        finally:
            if not nested:
                self.close()
                self._calling = None

    # -- a denoiser call ------------------------------------------------------------------------------------------

    def enter(self) -> int:
        """Note that this thread is inside a denoiser, and return its identity.

        Raises:
            RuntimeError: another thread is.
        """
        me = get_ident()
        with _LOCK:
            if self.in_flight is not None and self.in_flight != me:
                raise RuntimeError(
                    "this model is being called by another thread, and its cache belongs to that run. "
                    "Give every thread its own copy (copy.deepcopy) or take turns."
                )
            self.in_flight = me
        return me

    def leave(self) -> bool:
        """Note that this thread has left the denoiser. Returns False if it was never inside."""
        if self.in_flight != get_ident():
            return False
        self.in_flight = None
        return True

    def retract(self) -> None:
        """Take the record of the current call back, because it failed."""
        self.clock.retract()
        self.decided_for = None
        if self.run is not None and self.run.steps:
            self.run.steps.pop()
            self.run.status = "running"

    def locate(self, time: Any, label: str | None, condition: Any, thread: int) -> None:
        """Advance the clock to this call; a new run closes the one before.

        Raises:
            RuntimeError: the call belongs to the middle of a run that another thread has displaced.
        """
        starts = self.clock.find(time, self.pipeline.scheduler if self.pipeline is not None else None)
        if not starts and self._owner != thread:
            raise RuntimeError(
                "another thread has started a run on this model, so this run has lost its cache. "
                "Give every thread its own copy (copy.deepcopy) or take turns."
            )
        self.clock.advance(label, condition, starts)
        if starts:
            self.start()
        steps = self.clock.schedule.num_steps
        if steps is not None and self.clock.step >= steps:
            raise ValueError(
                f"the run has gone past its {steps} steps (timestep {self.clock.timestep}). Pass the number of steps "
                "that are run: cachedit.wrap(..., num_inference_steps=N) or timesteps=scheduler.timesteps."
            )

    def start(self) -> None:
        """Begin the record of a new run."""
        self._end()
        for runner in self.runners:
            runner.refresh()
        self._owner = get_ident()
        self.run = Run(str(self.strategy), self.clock.schedule.num_steps, response=self.clock.schedule.response)
        self.check_schedule("the model")
        self.strategy.check_run(self.clock.schedule, self.profile)
        self.run_start = self.clock.step
        _, steps = self.expert_span(self.runners[0].plan)
        ctx = Context(schedule=self.clock.schedule, run_start=self.run_start, profile=self.profile, expert_steps=steps)
        self.run.expected = dict(self.strategy.expected(ctx))

    def check_schedule(self, driven: str) -> None:
        """Raise ValueError if the strategy must know the number of steps and ``driven`` does not tell it."""
        if self.strategy.needs_schedule and self.clock.schedule.num_steps is None:
            raise ValueError(
                f"{type(self.strategy).__name__} must know the number of steps, and {driven} is driven by hand. Pass "
                "timesteps=scheduler.timesteps or num_inference_steps=N to cachedit.wrap, or wrap the pipeline."
            )

    def decide(self, runner: Runner) -> tuple[bool, str]:
        """(compute, reason) for the current call. The branches of a step share one decision."""
        if self.decided_for != (self.clock.step, runner):
            missing = runner.branch_missing
            self.decision = self._decide(runner) if missing is None else (True, missing)
            self.decided_for = (self.clock.step, runner)
        elif runner.branch_missing is not None:
            return True, runner.branch_missing
        return self.decision

    def _decide(self, runner: Runner) -> tuple[bool, str]:
        clock, steps = self.clock, self.clock.schedule.num_steps
        for branch in clock.known:
            if branch not in runner.kept.full:
                return True, "another branch has no residual"
        guarded, length = self.options.few_step_guard, clock.step + 1 if steps is None else steps
        if guarded and length <= FEW_STEPS:
            return (
                True,
                f"{FEW_STEPS} steps or fewer" if steps is not None else f"the run may have only {FEW_STEPS} steps",
            )
        self.context = runner.plan.context(clock, self.profile)
        listener = runner.plan.listener
        short = guarded and length <= SHORT_RUN
        if listener is None:
            reason = self.strategy.should_compute(self.context)
        else:  # the guard counts for every sample as if it were alone, too
            reason = listener.should_compute(self.context, 1 if short else None)
        if reason:
            return True, reason if isinstance(reason, str) else "schedule"
        if short and clock.step - runner.plan.computed[-1] > 1:
            return True, f"one reused step in a row up to {SHORT_RUN} steps"
        return False, ""

    def expert_span(self, plan: Plan) -> tuple[int, int | None]:
        """First step of the schedule that belongs to this expert, and how many do (None when unknown)."""
        schedule, boundary = self.clock.schedule, self.pipeline.boundary if self.pipeline is not None else None
        if len(self.runners) != 2 or boundary is None or schedule.sigmas is None or schedule.num_steps is None:
            return (0, schedule.num_steps) if len(self.runners) == 1 else (plan.first_step, None)
        first = sum(1 for sigma in schedule.sigmas if sigma >= boundary)
        return (0, first) if plan is self.runners[0].plan else (first, schedule.num_steps - first)

    def note_bytes(self) -> None:
        """Keep the peak of what the histories hold."""
        if self.run is not None:
            held = 0
            for runner in self.runners:
                held += runner.held_bytes
            self.run.cache_bytes_peak = max(self.run.cache_bytes_peak, held)

    # -- the end of a run -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the current run, if any, and drop everything it held."""
        self._end()
        self.clock.reset()
        self._owner, self.in_flight = None, None

    def _end(self) -> None:
        for runner in self.runners:
            runner.forget()
        self.decided_for = None
        run, self.run = self.run, None
        if run is None:
            return
        if run.status == "running":
            run.status = "finished" if run.num_steps is None else "aborted"
        self.last = run
        if run.steps and not run.reused_steps and not run.aborted and self.observer is None:
            reasons = ", ".join(sorted({step.reason for step in run.steps}))
            name = type(self.strategy).__name__
            self.warn("idle", f"{name} reused no step of this run (computed because: {reasons}).")

    def latest(self) -> Run | None:
        """The last run; a run of a module driven by hand counts once its last step was called, or nothing follows."""
        run = self.run
        if run is None or self._calling is not None or not run.steps:
            return self.last
        if run.status == "finished":
            return run
        return dataclasses.replace(run, status="finished" if run.num_steps is None else "aborted")

    def warn(self, kind: str, message: str) -> None:
        """Warn once per wrap and kind."""
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(f"cachedit: {message}", UserWarning, stacklevel=2)
