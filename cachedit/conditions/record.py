"""What happened in a run with a condition or edit cache: one record per call of the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cachedit.record import Record


@dataclass
class CallRecord:
    """One call that the pipeline made of its model.

    Attributes:
        step: position in the schedule of the run.
        branch: which call of the step it is, as guidance makes several.
        tokens: image tokens that the model computed, in all passes of the call.
        reused: image tokens whose keys and values were read from a bank.
        drift: largest relative change of a layer's keys since they were last recorded; None where they were not.
    """

    step: int
    branch: int
    tokens: int
    reused: int
    drift: float | None = None


@dataclass
class ConditionRun(Record):
    """One run of a pipeline.

    Attributes:
        strategy: the strategy as it was configured.
        steps: of the run's schedule.
        calls: one record per call of the model.
        cache_bytes_peak: most bytes that all banks held at once.
        status: "running", "finished" or "aborted".
    """

    strategy: str
    steps: int = 0
    calls: list[CallRecord] = field(default_factory=list)
    cache_bytes_peak: int = 0
    status: str = "running"

    @property
    def reused_steps(self) -> tuple[int, ...]:
        """Steps at which keys and values were read from a bank."""
        return tuple(dict.fromkeys(call.step for call in self.calls if call.reused))

    @property
    def drift(self) -> float | None:
        """Largest change of what was recorded anew; None if nothing was recorded twice."""
        return max((call.drift for call in self.calls if call.drift is not None), default=None)

    def summary(self) -> dict[str, Any]:
        """What follows from the calls."""
        return {"reused_steps": self.reused_steps, "drift": self.drift}

    def lines(self) -> list[tuple[str, str]]:
        """A small table: what was configured, what was read from banks and how far it had moved."""
        tokens, reused = (sum(getattr(call, name) for call in self.calls) for name in ("tokens", "reused"))
        drift = "not measured" if self.drift is None else f"{self.drift:.3f} at most, relative change of keys"
        return [
            ("strategy", self.strategy),
            ("status", self.status),
            ("steps", f"{self.steps}, {len(self.calls)} calls of the model"),
            ("reused", f"at {len(self.reused_steps)} steps"),
            ("image tokens", f"{tokens:,} computed, {reused:,} read from banks"),
            ("drift", drift),
            ("cache", f"{self.cache_bytes_peak:,} bytes at most"),
        ]
