"""Which run, step and branch a call of a denoiser belongs to. Calls are never counted.

Sources, best first: the pipeline's scheduler (its ``timesteps``, ``sigmas`` and ``step_index``), the timesteps that the
user announced, and the timestep argument alone. Branches of one step are told apart by diffusers' ``cache_context``
label, else by the identity of their conditioning, else by their order within the step.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from cachedit.feature.response import response
from cachedit.feature.sampler import planned_sigmas
from cachedit.strategy import Schedule

Form = tuple[float, float]
"""Shift and scale that turn the timestep which a model is called with into the scheduler's."""
UPRIGHT: tuple[Form, ...] = ((0.0, 1.0), (0.0, 1000.0))
FLIPPED: tuple[Form, ...] = ((1000.0, -1.0), (1000.0, -1000.0))


class Clock:
    """Position of the current call.

    Attributes:
        schedule: of the current run.
        step: index of the current step in the schedule.
        timestep: of the current step, in the scheduler's units; None when unknown.
        sigma: noise level of the current step; None when unknown.
        at_last_step: True if the schedule is known and this is its last step.
        branch: guidance path of the current call.
        known: branches that the previous step had.
    """

    def __init__(
        self, timesteps: Sequence[float] | None, num_steps: int | None, ascending: bool, responds: bool = False
    ) -> None:
        self._announced = _announced(timesteps, num_steps, ascending)
        self._ascending, self._responds = ascending, responds
        self.reset()

    def reset(self) -> None:
        """Forget the run; the next call starts one."""
        self.schedule = self._announced
        self.step, self.branch = -1, ""
        self.timestep: float | None = None
        self.sigma: float | None = None
        self.at_last_step = False
        self.known: list[str] = []
        self._called: list[str] = []
        self._conditions: dict[str, weakref.ref[torch.Tensor]] = {}
        self._value: float | None = None
        self._scheduler_timesteps: Any = None
        self._by_value = False
        self._form: Form | None = None
        self._slack = 0.0
        self._found: tuple[int, float | None] = (0, None)

    def locate(self, time: Any, label: str | None, condition: Any, scheduler: Any) -> bool:
        """Move to the position of a call. Returns True if it starts a new run.

        Args:
            time: the timestep argument, a number or a tensor of any shape; per-token timesteps count by their largest.
            label: of diffusers' cache_context; None without one.
            condition: the text tensor of the call, by whose identity unlabelled branches are recognised; may be None.
            scheduler: the pipeline's scheduler; None for a module driven by hand.
        """
        starts = self.find(time, scheduler)
        self.advance(label, condition, starts)
        return starts

    def find(self, time: Any, scheduler: Any) -> bool:
        """Find the step of a call without moving to it. Returns True if it starts a new run."""
        value: float | None
        if scheduler is not None:
            if scheduler.timesteps is not self._scheduler_timesteps:
                self.reset()
                self._scheduler_timesteps, self.schedule = scheduler.timesteps, _of_scheduler(scheduler)
                if self._responds:
                    self.schedule = replace(self.schedule, response=response(scheduler))
            step, value = self._scheduled_step(time, scheduler)
        elif self._announced.timesteps is not None:
            value = _number(time)
            found = self._look_up(value)
            if found is None:
                raise self._not_announced(value)
            step = found
        else:
            value = _mean(time)
            step = self._step_by_hand(value)
        self._found = step, value
        return step < self.step or self.step < 0

    def advance(self, label: str | None, condition: Any, starts: bool) -> None:
        """Move to the step that ``find`` has found; the arguments are those of ``locate``."""
        step, value = max(self._found[0], 0), self._found[1]
        if starts and self.step >= 0:
            kept = self.schedule, self._scheduler_timesteps, self._form, self._slack
            self.reset()
            self.schedule, self._scheduler_timesteps, self._form, self._slack = kept
        if step != self.step:
            self.known, self._called = self._called, []
        self.step, self._value = step, value
        schedule, steps = self.schedule, self.schedule.num_steps
        inside = steps is not None and step < steps
        self.timestep = schedule.timesteps[step] if inside and schedule.timesteps is not None else value
        self.sigma = schedule.sigmas[step] if inside and schedule.sigmas is not None else None
        self.at_last_step = steps is not None and step >= steps - 1
        self.branch = self._branch(label, condition)
        self._called.append(self.branch)
        if condition is not None:
            self._conditions[self.branch] = weakref.ref(condition)

    def retract(self) -> None:
        """Take back the last call, which failed; called again, it is the same branch."""
        if self._called:
            self._called.pop()

    def _step_by_hand(self, value: float) -> int:
        """Nothing is known but that noise falls along a run; -1 for the first step of the next one."""
        if self._value is None or value == self._value:
            return max(self.step, 0)
        return self.step + 1 if (value > self._value) is self._ascending else -1

    def _not_announced(self, value: float) -> ValueError:
        timesteps = self.schedule.timesteps or ()
        return ValueError(
            f"the model was called with timestep {value:g}, which the announced schedule does not have "
            f"({len(timesteps)} steps, {timesteps[0]:g} to {timesteps[-1]:g}). "
            "Pass the timesteps of this run: cachedit.wrap(..., timesteps=scheduler.timesteps)."
        )

    def _scheduled_step(self, time: Any, scheduler: Any) -> tuple[int, float | None]:
        """Step by the scheduler's own index, and the timestep argument where it had to be read."""
        index = getattr(scheduler, "step_index", None)
        if index is not None and not self._by_value:
            if index != self.step or isinstance(time, torch.Tensor) and not time.is_cpu:
                return int(index), None  # reading the argument would make the host wait for the device
            value = _number(time)
            if (self._look_up(value) or 0) <= index:
                return int(index), value
            self._by_value = True  # the pipeline steps copies of its scheduler, so the timestep itself must tell
        if index is None and self.step < 0 and getattr(scheduler, "begin_index", None) is not None:
            return int(scheduler.begin_index), None
        value = _number(time)
        found = self._look_up(value)
        if found is not None:
            return found, value
        # The model is told the time in units of its own, so all that can be seen is whether it moved.
        return (max(self.step, 0) if self._value in (None, value) else self.step + 1), value

    def _look_up(self, value: float) -> int | None:
        """Index of the step with this timestep; of equal ones, the first that has not passed. None if there is none.

        Models are called with the scheduler's timestep, a thousandth of it, or either of these upside down; the first
        call of a run tells which.
        """
        timesteps, step = self.schedule.timesteps or (), self.step
        form = self._form
        if form is None:
            self._slack = _tolerance(timesteps)
            forms = _forms(value, timesteps, self._ascending, self._slack)
            if not forms:
                return None
            form = forms[0]
            if len(forms) == 1:  # at the very ends of a schedule two forms may agree; a later call tells
                self._form = form
        shift, scale = form
        value = shift + scale * value
        if step >= 0 and abs(timesteps[step] - value) < self._slack:
            return step
        if step + 1 < len(timesteps) and abs(timesteps[step + 1] - value) < self._slack:
            return step + 1
        distances = [abs(t - value) for t in timesteps]
        closest = min(distances)
        if closest > self._slack:
            return None
        equal = [i for i, distance in enumerate(distances) if distance == closest]
        return next((i for i in equal if i >= self.step), equal[0])

    def _branch(self, label: str | None, condition: Any) -> str:
        if label is not None:
            return _free(label, self._called)
        if condition is not None:
            for branch, known in self._conditions.items():
                if known() is condition and branch not in self._called:
                    return branch
        order = len(self._called)
        while str(order) in self._called:
            order += 1
        return str(order)


def _forms(value: float, timesteps: Sequence[float], ascending: bool, slack: float) -> list[Form]:
    """How the model's timestep may become the scheduler's: the forms that bring ``value`` closest to one of them.

    Of several that agree, the first is the one that is closest to the begin of the schedule, where runs begin.
    """
    falls = len(timesteps) < 2 or timesteps[0] > timesteps[-1]
    for forms in (FLIPPED, UPRIGHT) if ascending and falls else (UPRIGHT, FLIPPED):
        nearest = [
            min(((abs(t - shift - scale * value), i) for i, t in enumerate(timesteps)), default=(math.inf, 0))
            for shift, scale in forms
        ]
        least = min(distance for distance, _ in nearest)
        if least <= slack:
            agreeing = [(i, form) for form, (distance, i) in zip(forms, nearest, strict=True) if distance == least]
            return [form for _, form in sorted(agreeing, key=lambda pair: pair[0])]
    return []


def _tolerance(timesteps: Sequence[float]) -> float:
    """How far a timestep may be off through rounding, in bf16 for instance: half the smallest gap, at most 1/250."""
    largest = max(map(abs, timesteps), default=1.0)
    gaps = [abs(a - b) for a, b in zip(timesteps, timesteps[1:], strict=False) if a != b]
    return min([largest / 250, *[gap / 2 for gap in gaps]])


def _free(label: str, taken: Sequence[str]) -> str:
    """``label``, or ``label/2`` ... for further calls under the same label in one step."""
    count = 1
    name = label
    while name in taken:
        count += 1
        name = f"{label}/{count}"
    return name


def _number(time: Any) -> float:
    """Timestep argument as a number; the largest of a tensor (frames that are clean already have smaller ones)."""
    if isinstance(time, torch.Tensor):
        return float(time.item() if time.numel() == 1 else time.max())
    return float(time)


def _mean(time: Any) -> float:
    """Timestep argument as a number that moves with every step, even if the frames of a video move in turn."""
    if isinstance(time, torch.Tensor):
        return float(time.item() if time.numel() == 1 else time.double().mean())
    return float(time)


def _announced(timesteps: Sequence[float] | None, num_steps: int | None, ascending: bool) -> Schedule:
    """The schedule that the user announced for a module driven by hand."""
    if timesteps is None:
        return Schedule(num_steps)
    values = tuple(float(t) for t in timesteps)
    if not values or num_steps not in (None, len(values)):
        raise ValueError(
            f"timesteps has {len(values)} entries, num_inference_steps is {num_steps}. Allowed: one timestep per step, "
            "in the units and order in which the model is called; pass one of the two."
        )
    scale = 1000.0 if max(values) > 1.5 else 1.0
    return Schedule(len(values), values, tuple(1 - v / scale if ascending else v / scale for v in values))


def _of_scheduler(scheduler: Any) -> Schedule:
    """The schedule of a diffusers scheduler, with noise levels that agree between schedulers of one model.

    Flow models: sigma itself. Variance-preserving models: ``sqrt(1 - alpha_bar)``, which is ``s / sqrt(1 + s^2)`` for
    schedulers that count in the ratio s of noise to signal.
    """
    timesteps = tuple(float(t) for t in scheduler.timesteps.tolist())
    count, config = len(timesteps), scheduler.config
    sigmas = planned_sigmas(scheduler)
    if sigmas is not None and len(sigmas) >= count:
        levels = [float(s) for s in sigmas[:count].tolist()]
        if config.get("invert_sigmas"):
            levels = [1 - s for s in levels]
        elif not _is_flow(scheduler):
            levels = [s / math.sqrt(1 + s * s) for s in levels]
    elif getattr(scheduler, "alphas_cumprod", None) is not None:
        levels = [math.sqrt(1 - float(scheduler.alphas_cumprod[int(t)])) for t in timesteps]
    else:
        levels = [t / config.get("num_train_timesteps", 1000) for t in timesteps]
    return Schedule(count, timesteps, tuple(levels))


def _is_flow(scheduler: Any) -> bool:
    config = scheduler.config
    return (
        type(scheduler).__name__.startswith("FlowMatch")
        or bool(config.get("use_flow_sigmas"))
        or config.get("prediction_type") == "flow_prediction"
    )
