"""One denoiser under a cache: before every call it decides, after it the residual is kept."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from cachedit.errors import UnsupportedModelError
from cachedit.feature.arguments import call_signature, changed_inputs, find_time
from cachedit.feature.blocks import Tap
from cachedit.feature.clock import Clock
from cachedit.feature.history import History
from cachedit.feature.session import Session
from cachedit.profile import Profile
from cachedit.run import Step
from cachedit.strategy import Context, FeatureStrategy

ATTRIBUTE = "_cachedit"
ACCELERATOR_LAG = 2


class Runner:
    """Hooks of one denoiser.

    Attributes:
        expert: name of the denoiser in its pipeline.
        history: computed residuals of its branches.
        computed: steps of this run at which it was computed, all branches together.
        first_step: first step of this run at which it was called.
        branch_missing: why the branch of the current call has no residual; None if it has one.
    """

    computed: list[int]
    first_step: int
    _context: Context | None
    _pending: Step | None
    _step: Step | None
    _signatures: dict[str, tuple[Any, ...]]
    _closed_calls: set[tuple[Any, ...]]
    _why_missing: dict[str, str]
    _unchecked: deque[tuple[Step, list[torch.Tensor]]]

    def __init__(self, denoiser: nn.Module, expert: str, session: Session) -> None:
        self.expert, self.session = expert, session
        self.denoiser: Any = denoiser
        options = session.options
        self.tap = Tap(self.denoiser, options.blocks)
        self.history = History(session.strategy.history, options.cache_device, options.cache_dtype)
        self.time_name, self.time_position = find_time(self.denoiser, options.timestep_arg)
        self._weighs = type(session.strategy).weights is not FeatureStrategy.weights
        self.label: str | None = None
        self.branch_missing: str | None = None
        self._handles: list[Any] = []
        self._forget_run()

    # -- attach and detach ----------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Put the hooks in place."""
        denoiser = self.denoiser
        self.tap.attach()
        self._handles = [
            denoiser.register_forward_pre_hook(self.before, with_kwargs=True),
            denoiser.register_forward_hook(self.after, with_kwargs=True, always_call=True),
        ]
        if hasattr(denoiser, "cache_context"):
            denoiser.__dict__["cache_context"] = self.cache_context
        denoiser.__dict__[ATTRIBUTE] = self

    def detach(self) -> None:
        """Take the hooks off; nothing remains."""
        denoiser = self.denoiser
        for handle in self._handles:
            handle.remove()
        denoiser.__dict__.pop("cache_context", None)
        denoiser.__dict__.pop(ATTRIBUTE, None)
        self.tap.detach()
        self.forget()

    @contextmanager
    def cache_context(self, name: str, *args: Any, **kwargs: Any) -> Iterator[None]:
        """diffusers' ``cache_context``, whose label names the branch."""
        outer, self.label = self.label, name
        try:
            with type(self.denoiser).cache_context(self.denoiser, name, *args, **kwargs):
                yield
        finally:
            self.label = outer

    # -- one call -------------------------------------------------------------------------------------------------

    @torch.compiler.disable
    def before(self, denoiser: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Decide whether this call is computed or reused; never traced."""
        session, tap = self.session, self.tap
        thread = session.enter()
        if tap.active:  # the last call was broken off in a way that no hook is told of (Ctrl-C)
            self._abandon()
        if torch.is_grad_enabled() or denoiser.training:
            if not denoiser.training:
                session.warn("grad", "bypassed, because grad is enabled: run the model under torch.no_grad().")
            return
        if self._pending is not None:  # the last call was traced, and a CUDA graph will write over what it returned
            self._commit(self._pending, copy=True)
        self._locate(args, kwargs, thread)
        compute, reason = session.decide(self)
        clock, run = session.clock, session.run
        step = Step(clock.step, clock.timestep, clock.sigma, clock.branch, self.expert, compute, reason)
        assert run is not None
        run.steps.append(step)
        if clock.at_last_step:
            run.status = "finished"
        tap.reuse = not compute
        if compute:
            tap.watch_all = self._signatures[clock.branch] not in self._closed_calls
            self._pending = step
        else:
            weights = session.strategy.weights(self._context_of_branch()) if self._weighs else None
            tap.load(self.history.of(clock.branch), weights)
        self._step, self._started = step, time.perf_counter()
        tap.active = True

    def after(self, denoiser: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Keep what was computed. Under torch.compile this is traced, so the next call keeps it."""
        if torch.compiler.is_dynamo_compiling():
            self.tap.active = False
            self.session.in_flight = None
        elif self.session.leave():
            self._finish(failed=output is None)

    def _finish(self, failed: bool) -> None:
        self.tap.active = False
        step, self._step = self._step, None
        if step is None:
            return
        step.ms = (time.perf_counter() - self._started) * 1e3
        if failed:
            self._abandon()
        elif step.computed:
            if not self.tap.open:
                self._closed_calls.add(self._signatures[step.branch])
            self._commit(step)
        if self.session.clock.at_last_step:
            self.history.drop(step.branch)
        self.tap.release()

    def _abandon(self) -> None:
        """Undo a call that failed: no record, no residual, and its branch may be called again."""
        self.tap.active = False
        self.tap.release()
        self._pending = self._step = None
        self.session.retract()

    def _locate(self, args: tuple[Any, ...], kwargs: dict[str, Any], thread: int) -> None:
        """Find run, step and branch of the call, and whether the branch has a residual to reuse."""
        session, time_value, condition = self.session, self._time(args, kwargs), kwargs.get("encoder_hidden_states")
        session.locate(time_value, self.label, condition, thread)
        branch, signature = session.clock.branch, call_signature(args, kwargs, self.time_name)
        before = self._signatures.get(branch)
        if before is not None and before[0] != signature[0]:
            session.clock.reset()  # another shape, dtype or device of the main input is another run
            session.locate(time_value, self.label, condition, thread)
            branch, before = session.clock.branch, None
        if self.first_step < 0:
            self.first_step = session.clock.step
        newest = self.history.newest(branch)
        if before is not None and before != signature:
            self.history.drop(branch)
            self.branch_missing = f"input changed: {', '.join(changed_inputs(before, signature))}"
        elif newest < 0:
            self.branch_missing = self._why_missing.get(branch, "no residual yet")
        elif newest < self.computed[-1] < session.clock.step:
            self.branch_missing = "its residual is older than the other branches'"
        else:
            self.branch_missing = None
        self._signatures[branch] = signature

    def _time(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.time_name in kwargs:
            return kwargs[self.time_name]
        if self.time_position is not None and self.time_position < len(args):
            return args[self.time_position]
        raise UnsupportedModelError(
            f"{type(self.denoiser).__name__} was called without its timestep ({self.time_name!r}). Pass it, or name "
            "the argument that holds it: cachedit.wrap(..., timestep_arg=NAME)."
        )

    def context(self, clock: Clock, profile: Profile | None) -> Context:
        """What the strategy may look at: one object per run, moved along."""
        context = self._context
        if context is None:
            start, steps = self.session.expert_span(self)
            context = self._context = Context(
                schedule=clock.schedule,
                computed_steps=self.computed,
                profile=profile,
                expert=self.expert,
                expert_start=start,
                expert_steps=steps,
            )
        context.step, context.timestep, context.sigma = clock.step, clock.timestep, clock.sigma
        context.branch = clock.branch
        return context

    def _context_of_branch(self) -> Context:
        """What the strategy saw when it decided, with the steps of the residuals that its weights go with."""
        branch = self.session.clock.branch
        return replace(self.session.context, branch=branch, computed_steps=self.history.steps(branch))

    # -- what was computed ----------------------------------------------------------------------------------------

    def _commit(self, step: Step, copy: bool = False) -> None:
        """Move the residual of the last computed pass into the history, unless it is not finite."""
        self._pending = None
        residual = self.tap.captured()
        if residual is None:
            raise UnsupportedModelError(
                f"{type(self.denoiser).__name__} did not iterate its block lists ({', '.join(self.tap.names)}), so "
                "nothing can be reused. Name the lists that its forward iterates: cachedit.wrap(..., blocks=[...])."
            )
        if self.session.computes and self.computed[-1:] != [step.index]:
            self.computed.append(step.index)
        if self.session.observer is not None:
            self.session.observer(step, residual)
        if copy:
            residual = tuple([r.clone() for r in residual])
        on_cpu = residual[0].device.type == "cpu"
        self._unchecked.append((step, [r.sum(dtype=torch.float32) for r in residual]))
        self._why_missing.pop(step.branch, None)
        self.history.push(step.branch, step.index, residual)
        self.session.note_bytes()
        self._check_finite(0 if on_cpu else ACCELERATOR_LAG)
        for part in self.tap.parts:
            part.captured = None

    def _check_finite(self, lag: int) -> None:
        """Drop residuals that were not finite.

        On an accelerator the answer is read ``lag`` steps later, when it has long been computed, so the host does not
        wait for the device.
        """
        while self._unchecked and self._unchecked[0][0].index <= self.session.clock.step - lag:
            step, magnitudes = self._unchecked.popleft()
            if not all(map(math.isfinite, map(float, magnitudes))):
                self.history.drop(step.branch)
                self._why_missing[step.branch] = "the last residual was not finite"
                self.session.warn("finite", "a residual was not finite; it is dropped, and the next step is computed.")

    def forget(self) -> None:
        """Drop everything that belongs to a run."""
        self.history.drop()
        self.tap.release()
        self.tap.active = False
        self._forget_run()

    def _forget_run(self) -> None:
        self.computed, self.first_step = [], -1
        self._pending = self._step = None
        self._started = 0.0
        self._signatures, self._closed_calls, self._why_missing = {}, set(), {}
        self._unchecked = deque()
        self._context = None
