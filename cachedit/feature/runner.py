"""One denoiser under a cache: before every call it decides, after it the residual is kept."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from cachedit.errors import UnsupportedModelError
from cachedit.feature.arguments import call_signature, changed_inputs, find_time, first_tensor, main_input
from cachedit.feature.kept import Kept
from cachedit.feature.network import Network
from cachedit.feature.outputs import second_half
from cachedit.feature.parts import Ask
from cachedit.feature.plan import Plan
from cachedit.feature.ranks import shared_group
from cachedit.feature.session import Session
from cachedit.run import Step
from cachedit.strategy import Module

ATTRIBUTE = "_cachedit"


class Runner:
    """Hooks of one denoiser.

    Attributes:
        expert: name of the denoiser in its pipeline.
        network: the places in it.
        kept: what was computed of them.
        plan: what the strategy is asked about it.
        branch_missing: why the branch of the current call has no residual; None if it has one.
    """

    _pending: Step | None
    _step: Step | None
    _signatures: dict[str, tuple[Any, ...]]
    _closed_calls: set[tuple[Any, ...]]

    def __init__(self, denoiser: nn.Module, expert: str, session: Session) -> None:
        self.expert, self.session = expert, session
        self.denoiser: Any = denoiser
        strategy, options = session.strategy, session.options
        self.network = Network(denoiser, strategy, options.blocks)
        self.kept = Kept(self.network.places, strategy, session.profile, options)
        self.plan = Plan(self.network, self.kept, session, expert)
        self.time_name, self.time_position = find_time(self.denoiser, options.timestep_arg)
        self.label: str | None = None
        self.branch_missing: str | None = None
        self._handles: list[Any] = []
        self._forget_run()

    # -- attach and detach ----------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Put the hooks in place."""
        denoiser = self.denoiser
        self.network.attach()
        after = self.after if self.network.traceable else self.after_untraced
        self._handles = [
            denoiser.register_forward_pre_hook(self.before, with_kwargs=True),
            denoiser.register_forward_hook(after, with_kwargs=True, always_call=True),
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
        self.network.detach()
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
    def before(self, denoiser: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Decide whether this call is computed or reused; never traced."""
        session, network = self.session, self.network
        thread = session.enter()
        if network.active:  # the last call was broken off in a way that no hook is told of (Ctrl-C)
            self._abandon()
        if torch.is_grad_enabled() or denoiser.training:
            if not denoiser.training:
                session.warn("grad", "bypassed, because grad is enabled: run the model under torch.no_grad().")
            return None
        if self._pending is not None:  # the last call was traced, and a CUDA graph will write over what it returned
            self._commit(self._pending, copy=True)
        self._locate(args, kwargs, thread)
        clock, run = session.clock, session.run
        step = self._step = Step(clock.step, clock.timestep, clock.sigma, clock.branch, self.expert, True)
        assert run is not None
        run.steps.append(step)
        if clock.at_last_step:
            run.status = "finished"
        ask = None if self.plan.simple else self._listen(step, args, kwargs)
        if ask is None:
            compute, step.reason = session.decide(self)
            self.plan.load(step, compute, self._leads)
        if step.computed:
            self._pending = step
        self._started = time.perf_counter()
        network.begin(ask, step.computed and self._signatures[step.branch] not in self._closed_calls)
        return self._halved(args, kwargs) if network.guidance is not None else None

    def after(self, denoiser: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Keep what was computed. Under torch.compile this is traced, so the next call keeps it."""
        if torch.compiler.is_dynamo_compiling():
            self.network.active = self.network.tap.active = False  # type: ignore[union-attr]
            self.session.in_flight = None
        elif self.session.inside:
            try:
                return self._finish(args, kwargs, output)
            finally:
                self.session.in_flight = None  # and not before: another thread may come in at once
        return None

    @torch.compiler.disable
    def after_untraced(self, denoiser: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """``after`` for places that torch.compile cannot trace; a method, so that a deep copy gets its own."""
        return self.after(denoiser, args, kwargs, output)

    def _finish(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        network = self.network
        network.end()
        step, self._step = self._step, None
        if step is None:
            return None
        step.ms = (time.perf_counter() - self._started) * 1e3
        given = None
        if output is None:
            self._abandon()
        else:
            if network.ends or self.plan.listener is not None:
                given = network.leave(main_input(args, kwargs, self.time_name), output)
                if self.plan.listener is not None and self._leads:
                    self.plan.listener.signal.observe(given)
            if step.computed and self._signatures[step.branch] not in self._closed_calls and not network.open:
                self._closed_calls.add(self._signatures[step.branch])
            if step.computed or self.plan.chooses:
                self._commit(step)
        last = self.session.clock.at_last_step
        if last:
            self.kept.drop(step.branch)
            if self.plan.listener is not None:
                self.plan.listener.release()
        if step.computed or last or not self.plan.simple:
            network.release()  # a simple reused pass holds nothing that is not kept anyway
        return given

    def _abandon(self) -> None:
        """Undo a call that failed: no record, no residual, and its branch may be called again."""
        self.network.end()
        self.network.release()
        self._pending = self._step = None
        if self.plan.listener is not None:
            self.plan.listener.release()
        self.session.retract()

    # -- what is decided ------------------------------------------------------------------------------------------

    def _listen(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ask | None:
        """Measure what can be measured now; returns what is to be asked inside the stack, if the signal lies there."""
        listener = self.plan.listener
        self._leads = self.session.decided_for != (step.index, self)
        if listener is None or not self._leads:
            return None
        latents = main_input(args, kwargs, self.time_name)
        if listener.where == "input":
            step.signal = listener.hear(latents, None, len(latents), step.branch)
            return None
        self._samples = len(latents)
        nothing = [False] * len(self.network.places)
        self.network.choose([*nothing], self._leads)
        self.network.load([None] * len(nothing))
        return self._asked

    @torch.compiler.disable
    def _asked(self, entered: Any, left: Any) -> bool:
        """Measure the signal inside the stack, decide, and say whether to reuse."""
        step, listener = self._step, self.plan.listener
        assert step is not None
        assert listener is not None
        step.signal = listener.hear(entered, left, self._samples, step.branch)
        compute, step.reason = self.session.decide(self)
        self.plan.load(step, compute, self._leads)
        if not step.computed:
            self._pending = None
        return not step.computed

    def _halved(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The second half of a batch of two branches, where the first is forecast from it."""
        if not self.network.halves:
            return None
        latents = main_input(args, kwargs, self.time_name)
        return second_half(args, latents), second_half(kwargs, latents)

    def _locate(self, args: tuple[Any, ...], kwargs: dict[str, Any], thread: int) -> None:
        """Find run, step and branch of the call, and whether the branch has a residual to reuse."""
        session, clock, plan, name = self.session, self.session.clock, self.plan, self.time_name
        time_value = kwargs[name] if name in kwargs else self._positional_time(args)
        condition = kwargs.get("encoder_hidden_states")
        if condition is not None and not isinstance(condition, torch.Tensor):
            condition = first_tensor(condition)
        session.locate(time_value, self.label, condition, thread)
        branch, signature = clock.branch, call_signature(args, kwargs, name)
        before = self._signatures.get(branch, signature)
        changed = before != signature
        if changed and before[0] != signature[0]:
            clock.reset()  # another shape, dtype or device of the main input is another run
            session.locate(time_value, self.label, condition, thread)
            branch, changed = clock.branch, False
        if plan.first_step < 0:
            plan.first_step = clock.step
        if self.network.guidance is not None:
            self.network.guidance.look_at(branch, main_input(args, kwargs, name))
        newest = self.kept.full.get(branch, -1)
        if changed:
            self.kept.drop(branch)
            self.branch_missing = f"input changed: {', '.join(changed_inputs(before, signature))}"
        elif newest < 0:
            self.branch_missing = self.kept.why_missing.get(branch, "no residual yet")
        elif newest < plan.computed[-1] < clock.step:
            self.branch_missing = "its residual is older than the other branches'"
        else:
            self.branch_missing = None
        self._signatures[branch] = signature

    def _positional_time(self, args: tuple[Any, ...]) -> Any:
        if self.time_position is not None and self.time_position < len(args):
            return args[self.time_position]
        raise UnsupportedModelError(
            f"{type(self.denoiser).__name__} was called without its timestep ({self.time_name!r}). Pass it, or name "
            "the argument that holds it: cachedit.wrap(..., timestep_arg=NAME)."
        )

    # -- what was computed ----------------------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """Bytes that are held for later steps."""
        held = 0 if self.plan.listener is None else self.plan.listener.nbytes
        for history in self.kept.histories:
            held += history.nbytes
        return held

    def _commit(self, step: Step, copy: bool = False) -> None:
        """Move what the last pass captured into the histories, unless it is not finite."""
        self._pending = None
        network = self.network
        captured = network.captured()
        if step.computed:
            if None in captured:
                network.check_reached(captured)
            if self.session.decision[0] and self.plan.computed[-1:] != [step.index]:
                self.plan.computed.append(step.index)
            if self.session.observer is not None:
                self.session.observer(step, network.places, captured)
            self.kept.full[step.branch] = step.index
            self.kept.why_missing.pop(step.branch, None)
        for k, residual in enumerate(captured):
            # Whatever else leaves a step that is reused in part is a forecast in part, or one branch's alone.
            if residual is not None and not (self.plan.partial and not isinstance(network.places[k].site, Module)):
                if copy:
                    residual = tuple([r.clone() for r in residual])
                self.kept.push(k, step.branch, step.index, residual, network.halves)
        self.session.note_bytes()
        if self.kept.not_finite(step.index):
            self.session.warn("finite", "a residual was not finite; it is dropped, and the next step is computed.")

    def refresh(self) -> None:
        """Look again at what may have changed since the last run: the blocks, and the ranks that share the model."""
        self.network.refresh()
        self.kept.group = self.session.options.process_group or shared_group(self.denoiser)
        if self.plan.listener is not None:
            self.plan.listener.group = self.kept.group

    def forget(self) -> None:
        """Drop everything that belongs to a run."""
        self.kept.forget()
        self.network.end()
        self.network.release()
        self.plan.forget()
        self._forget_run()

    def _forget_run(self) -> None:
        self._pending = self._step = None
        self._started, self._leads = 0.0, True
        self._signatures, self._closed_calls = {}, set()
