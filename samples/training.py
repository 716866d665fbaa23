"""What the training stages of the sample models share: budget, learning rate, loop, log and checkpoints."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass
class Budget:
    """How long a stage trains: a number of steps or of minutes, counted over all its sessions.

    Attributes:
        steps: optimizer steps, or None.
        minutes: wall time, or None. Exactly one of the two is given.
        taken: steps done so far.
        elapsed: seconds spent so far.
    """

    steps: int | None
    minutes: float | None
    taken: int = 0
    elapsed: float = 0.0

    @property
    def fraction(self) -> float:
        """Share of the budget that is spent, in [0, 1]."""
        share = self.taken / self.steps if self.steps is not None else self.elapsed / (60 * (self.minutes or 1e-9))
        return min(1.0, share)


def learning_rate(peak: float, budget: Budget, warm_up: int, decay_from: float) -> float:
    """Linear warm-up over some steps, a plateau, then a linear decay to 2 % of the peak.

    Args:
        peak: the rate of the plateau.
        budget: how much training is done.
        warm_up: steps until the peak.
        decay_from: share of the budget at which the decay begins, in [0, 1).
    """
    decay = max(0.02, min(1.0, (1 - budget.fraction) / (1 - decay_from)))
    return peak * min(1.0, (budget.taken + 1) / warm_up) * decay


class Trainer:
    """The loop all stages share: budget, learning rate, averaged weights, log, resumable checkpoint.

    Args:
        modules: what is trained, by name.
        loss: returns the loss of one step; called with the generator of the data.
        path: the checkpoint file; next to it a ``.log`` with one JSON line per report.
        budget: how long to train.
        peak: the highest learning rate.
        average: decay of the averaged weights per step.
        decay_from: share of the budget at which the learning rate begins to fall.
        seed: of the data, the noise and the dropout.
        every: steps between two reports.
    """

    def __init__(
        self,
        modules: dict[str, torch.nn.Module],
        loss: Callable[[torch.Generator], torch.Tensor],
        path: Path,
        budget: Budget,
        *,
        peak: float,
        average: float,
        decay_from: float,
        seed: int,
        every: int,
    ) -> None:
        self.modules, self.loss, self.path, self.budget = modules, loss, path, budget
        self.peak, self.average, self.decay_from, self.every = peak, average, decay_from, every
        self.generator = torch.Generator().manual_seed(seed)
        self.parameters = {
            f"{name}.{key}": parameter
            for name, module in modules.items()
            for key, parameter in module.named_parameters()
        }
        self.averaged = {key: parameter.detach().clone() for key, parameter in self.parameters.items()}
        self.optimizer = torch.optim.AdamW(self.parameters.values(), peak, betas=(0.9, 0.99), weight_decay=0.01)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            self._resume()

    def run(self) -> None:
        """Trains until the budget is spent and leaves the checkpoint."""
        began, reported, smooth = time.monotonic() - self.budget.elapsed, time.monotonic(), 0.0
        while self.budget.fraction < 1:
            rate = learning_rate(self.peak, self.budget, warm_up=100, decay_from=self.decay_from)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            loss = self.loss(self.generator)
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
            self.optimizer.step()
            self.budget.taken += 1
            self.budget.elapsed = time.monotonic() - began
            self._update_average()
            smooth = loss.item() if smooth == 0 else 0.98 * smooth + 0.02 * loss.item()
            if self.budget.taken % self.every == 0:
                seconds, reported = (time.monotonic() - reported) / self.every, time.monotonic()
                self._report(loss=smooth, rate=rate, seconds_per_step=seconds)
            if self.budget.taken % (10 * self.every) == 0:
                self.save()
        self.save()

    def save(self) -> None:
        """Writes the checkpoint atomically."""
        state = {
            "modules": {name: module.state_dict() for name, module in self.modules.items()},
            "averaged": self.averaged,
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "taken": self.budget.taken,
            "elapsed": self.budget.elapsed,
        }
        write_atomically(self.path, state)

    def use_average(self) -> None:
        """Replaces the trained weights by the averaged ones."""
        with torch.no_grad():
            for key, parameter in self.parameters.items():
                parameter.copy_(self.averaged[key])

    def _resume(self) -> None:
        state = torch.load(self.path, weights_only=True)
        for name, module in self.modules.items():
            module.load_state_dict(state["modules"][name])
        self.averaged = state["averaged"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        self.budget.taken, self.budget.elapsed = state["taken"], state["elapsed"]
        print(f"resumed {self.path} at step {self.budget.taken}", flush=True)

    def _update_average(self) -> None:
        keep = min(self.average, (self.budget.taken + 1) / (self.budget.taken + 20))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.averaged.values()), list(self.parameters.values()), 1 - keep)

    def _report(self, **values: float) -> None:
        line = {"step": self.budget.taken, "minutes": round(self.budget.elapsed / 60, 2)}
        line |= {key: float(f"{value:.4g}") for key, value in values.items()}
        print(json.dumps(line), flush=True)
        with self.path.with_suffix(".log").open("a") as log:
            log.write(json.dumps(line) + "\n")


def write_atomically(path: Path, state: dict[str, Any]) -> None:
    """Saves with :func:`torch.save` so that an interrupted write leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def read_checkpoint(path: Path, stage: str, script: str = "train_image") -> dict[str, Any]:
    """Reads what a stage wrote.

    Args:
        path: the file.
        stage: which one writes it, for the message.
        script: whose stage that is.

    Raises:
        FileNotFoundError: the stage has not run.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; run the stage first: python -m cachedit.samples.{script} {stage}")
    return torch.load(path, weights_only=True)
