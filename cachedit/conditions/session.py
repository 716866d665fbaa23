"""One wrap of a pipeline: its calls, and the calls of its model in them, go through a session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cachedit.conditions.bank import KVBank
from cachedit.conditions.layouts import LAYOUTS
from cachedit.conditions.passes import Current, Pass
from cachedit.conditions.processors import check_model
from cachedit.conditions.record import CallRecord, ConditionRun
from cachedit.errors import UnsupportedModelError

Stock = Callable[..., Any]
Passed = Callable[[Pass, dict[str, Any]], torch.Tensor]


class ConditionSession:
    """Knows at which step and call the pipeline is, and keeps the record. What is reused is a subclass's.

    Attributes:
        current: what the processors on the model look at.
        run: the record of the last run; None before the first.
        banks: keys and values of the run; none outside of one.
    """

    def __init__(self, described: str, pipe: Any) -> None:
        self.described = described
        self.current = Current()
        self.layout = LAYOUTS[type(pipe.transformer).__name__]()
        self.run: ConditionRun | None = None
        self.banks: dict[Any, KVBank] = {}
        self.step, self.branch, self.steps = -1, 0, 0
        self._scheduler: Any = None

    def call(self, pipe: Any, stock: Stock, *arguments: Any, **named: Any) -> Any:
        """The pipeline's own call; outside of one the model is left alone."""
        self.run, self._scheduler = ConditionRun(self.described), pipe.scheduler
        self.step = -1
        try:
            found = stock(*arguments, **named)
            self.run.status = "finished"
            return found
        except BaseException:
            self.run.status = "aborted"
            raise
        finally:
            self.end()

    def end(self) -> None:
        """A run is over, however it ended: nothing of it is kept but the record."""
        self.banks, self._scheduler = {}, None

    def forward(self, model: Any, stock: Stock, **inputs: Any) -> Any:
        """A call of the model, in which the session may leave tokens out."""
        from diffusers.models.modeling_outputs import Transformer2DModelOutput

        if self._scheduler is None or torch.is_grad_enabled():
            return stock(**inputs)
        self._advance()

        def passed(now: Pass, given: dict[str, Any]) -> torch.Tensor:
            with self.current.during(now):
                return stock(**{**given, "return_dict": False})[0]

        found = self.predict(passed, inputs)
        if not inputs.get("return_dict", True):
            return (found,)
        return Transformer2DModelOutput(sample=found)

    def predict(self, passed: Passed, inputs: dict[str, Any]) -> torch.Tensor:
        """What the model would predict for all tokens of ``inputs``.

        Args:
            passed: calls the model in a pass.
            inputs: of the model's forward.
        """
        raise NotImplementedError

    def note(self, tokens: int, reused: int, drift: float | None = None) -> None:
        """Enter the call into the record."""
        assert self.run is not None
        self.run.calls.append(CallRecord(self.step, self.branch, tokens, reused, drift))
        held = sum(bank.nbytes for bank in self.banks.values())
        self.run.cache_bytes_peak = max(self.run.cache_bytes_peak, held)

    def _advance(self) -> None:
        """The scheduler counts steps on the host; calls within one step are the branches of guidance."""
        scheduler = self._scheduler
        begin = scheduler.begin_index or 0
        step = 0 if scheduler.step_index is None else scheduler.step_index - begin  # None before its first step
        self.branch = self.branch + 1 if step == self.step else 0
        self.step, self.steps = step, len(scheduler.timesteps) - begin
        assert self.run is not None
        self.run.steps = self.steps


def check_pipeline(pipe: Any) -> None:
    """Refuse what cannot be called through a session.

    Raises:
        UnsupportedModelError: with the reason.
    """
    name, model = type(pipe).__name__, getattr(pipe, "transformer", None)
    if model is None or not hasattr(getattr(pipe, "scheduler", None), "step_index"):
        raise UnsupportedModelError(
            f"{name} has no transformer with a scheduler that counts steps. Allowed: a Flux or QwenImage pipeline; "
            "cachedit.conditions.ConditionedNetwork drives a transformer by hand."
        )
    check_model(model)
