"""Training of a router: which modules of which step may be left out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn

from cachedit.calibration.measure import Arrays, Measure
from cachedit.feature.attachment import find_denoisers
from cachedit.feature.families import block_lists, is_unet
from cachedit.feature.modules import find_modules
from cachedit.feature.outputs import tensors_of
from cachedit.strategy import Output, Site

LARGEST_LOGIT = 5.0
SAVE_EVERY = 200
STATE = "router-state"


class Router(Measure):
    """HarmoniCa's router by step-wise denoising training (arXiv 2410.01723), resumable.

    Every update is one denoiser call of a run: the pipeline's own forward is the teacher; the student's forward on the
    same inputs is what the pipeline goes on with.
    """

    makes: ClassVar[dict[str, tuple[str, ...]]] = {"router": ("step", "module")}

    @property
    def sites(self) -> tuple[Site, ...]:
        """The output, so that the noise levels of the steps are seen."""
        return (Output(),)

    @property
    def runs(self) -> int:
        """One for every step that is left out, and those of the training where a step is one call."""
        options: Any = self.strategy
        others = self.trial.num_inference_steps - 1
        return others + math.ceil(options.iterations / others)

    def arrays(self, parts: list[Any]) -> Arrays:
        """Train, and return the gates per kind of module, in (0, 1)."""
        options: Any = self.strategy
        student = _Student(self.trial.pipe, self.trial.num_inference_steps, options.learning_rate)
        others = range(1, self.trial.num_inference_steps)
        student.weigh(self.trial.map("left-out", others, lambda step: self._left_out_at(student, step)))
        (trained,) = self.trial.map("trained", ["router"], lambda _: self._trained(student))
        self.notes |= {"router_updates": trained["updates"], "router_loss": trained["loss"]}
        return {"router": trained["gates"]}

    def _trained(self, student: _Student) -> dict[str, Any]:
        """Gates, loss and number of updates after the training, which goes on where an earlier one was interrupted."""
        options: Any = self.strategy
        checkpoint = self.trial.work.checkpoint
        state = None if checkpoint is None else checkpoint.load(STATE)
        if state is not None:
            student.load(state)
            self.trial.work.tally.add(student.runs * self.trial.num_inference_steps)
        saved = student.updates
        while student.updates < options.iterations:
            with student.training(options.beta, options.threshold):
                self.trial.fresh_run(student.runs)
            student.runs += 1
            if checkpoint is not None and student.updates - saved >= SAVE_EVERY:
                saved = student.updates
                checkpoint.save(STATE, student.state())
        return {"gates": student.gates(), "loss": student.loss, "updates": student.updates}

    def _left_out_at(self, student: _Student, step: int) -> float:
        """Squared change of the final latent when all modules are left out at this step alone."""
        with student.leaving_out(step):
            changed = self.trial.rerun(0)
        return float((changed - self.trial.latents(0)).square().mean())


class _Student:
    """The modules of a denoiser with a gate per step in front of each."""

    def __init__(self, pipe: Any, steps: int, learning_rate: float) -> None:
        (self.denoiser,) = find_denoisers(pipe).values()
        self.pipe, self.steps = pipe, steps
        roots = None
        if not is_unet(self.denoiser):
            lists = [(name, self.denoiser.get_submodule(name)) for name in block_lists(self.denoiser)]
            roots = [f"{name}.{k}" for name, blocks in lists for k in range(len(blocks))]  # type: ignore[arg-type]
        found = [*find_modules(self.denoiser, roots)]
        self.kinds = [kind for _, _, kind, _ in found]
        self.modules = [module for _, _, _, module in found]
        self.logits = torch.zeros(steps, len(found), requires_grad=True)
        with torch.no_grad():
            self.logits[0] = LARGEST_LOGIT
        self.optimiser = torch.optim.AdamW([self.logits], lr=learning_rate, weight_decay=0.0)
        self.weights = [1.0] * steps
        self.updates = self.runs = 0
        self.loss = 0.0
        self._kept: dict[tuple[int, int, int], Any] = {}
        self._calls: dict[int, int] = {}
        self._at = (-1, 0)
        self._blends = False

    def weigh(self, changes: list[float]) -> None:
        """Weigh the steps by how much leaving out everything at them changes the result; on average by 1."""
        average = sum(changes) / len(changes)
        self.weights = [1.0, *[change / average if average > 0 else 1.0 for change in changes]]

    def gates(self) -> dict[str, list[list[float]]]:
        """Gates per kind, [steps][modules of the kind]."""
        table = self.logits.detach().sigmoid()
        chosen = {
            kind: [k for k, other in enumerate(self.kinds) if other == kind] for kind in dict.fromkeys(self.kinds)
        }
        return {
            kind: [[round(x, 4) for x in row] for row in table[:, units].tolist()] for kind, units in chosen.items()
        }

    def state(self) -> dict[str, Any]:
        """What a later session needs to go on."""
        return {
            "logits": self.logits.detach(),
            "optimiser": self.optimiser.state_dict(),
            "updates": self.updates,
            "runs": self.runs,
            "loss": self.loss,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        with torch.no_grad():
            self.logits.copy_(state["logits"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.updates, self.runs, self.loss = state["updates"], state["runs"], state["loss"]

    @contextmanager
    def training(self, beta: float, threshold: float) -> Iterator[None]:
        """A run in which every denoiser call updates the router and goes on with what the student gives."""

        def after(module: nn.Module, args: Any, kwargs: Any, teacher: Any) -> Any:
            step = self._advance()
            with torch.enable_grad():
                self._row = self.logits[step].sigmoid()
                self._keeps = (self._row > threshold).tolist()
                self._blends = True
                student = type(module).forward(module, *args, **kwargs)
                self._blends = False
                pairs = zip(tensors_of(student), tensors_of(teacher), strict=True)
                distance = sum(nn.functional.mse_loss(a.float(), b.float()) for a, b in pairs)
                loss = self.weights[step] * distance + beta * self._row.sum()
            if step > 0:  # the first step has nothing to reuse
                self.optimiser.zero_grad()
                loss.backward()
                self.optimiser.step()
                with torch.no_grad():
                    self.logits.clamp_(-LARGEST_LOGIT, LARGEST_LOGIT)
                    self.logits[0] = LARGEST_LOGIT
                self.updates, self.loss = self.updates + 1, float(loss)
            return _detached(student)

        with self._hooked(after):
            yield

    @contextmanager
    def leaving_out(self, step: int) -> Iterator[None]:
        """A run in which all modules give what they gave at the step before, at this step alone."""

        def before(module: nn.Module, args: Any) -> None:
            at = self._advance()
            self._row = torch.zeros(len(self.modules)) if at == step else torch.ones(len(self.modules))
            self._keeps, self._blends = [at != step] * len(self.modules), True

        with self._hooked(None, before):
            yield

    @contextmanager
    def _hooked(self, after: Any, before: Any = None) -> Iterator[None]:
        self._kept, self._at, self._blends = {}, (-1, 0), False
        hooks = [module.register_forward_hook(self._blend(k)) for k, module in enumerate(self.modules)]
        if after is not None:
            hooks.append(self.denoiser.register_forward_hook(after, with_kwargs=True))
        if before is not None:
            hooks.append(self.denoiser.register_forward_pre_hook(before))
        frozen = [p for p in self.denoiser.parameters() if p.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for parameter in frozen:
                parameter.requires_grad_(True)
            self._kept = {}

    def _advance(self) -> int:
        """Step of the call that begins; calls of one step are its branches."""
        index = self.pipe.scheduler.step_index
        step = 0 if index is None else int(index)
        self._at = (step, self._at[1] + 1 if step == self._at[0] else 0)
        self._calls = {}
        return step

    def _blend(self, k: int) -> Any:
        """Hook of module ``k``: ``(1 - s) * kept + s * fresh``, in whatever form the module returns."""

        def hook(module: nn.Module, args: Any, fresh: Any) -> Any:
            if not self._blends:
                return None
            call = self._calls[k] = self._calls.get(k, -1) + 1  # one feed-forward may serve two streams
            key = (k, self._at[1], call)
            kept = self._kept.get(key)
            out = fresh if kept is None else _mixed(kept, fresh, self._row[k])
            if kept is None or self._keeps[k]:
                self._kept[key] = _detached(fresh)
            return out

        return hook


def _mixed(kept: Any, fresh: Any, share: torch.Tensor) -> Any:
    if isinstance(fresh, torch.Tensor):
        return ((1 - share) * kept + share * fresh).to(fresh.dtype)
    return None if fresh is None else type(fresh)([_mixed(a, b, share) for a, b in zip(kept, fresh, strict=True)])


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, dict):
        return type(value)(**{key: _detached(item) for key, item in value.items()})
    return None if value is None else type(value)([_detached(item) for item in value])
