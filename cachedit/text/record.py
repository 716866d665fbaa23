"""What happened in a decoding: tokens computed and committed per step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cachedit.record import Record

FULL, PART = "■", "▪"


@dataclass(slots=True)
class TextStep:
    """One step, summed over the rows of the batch.

    Attributes:
        index: number of the step, from 0.
        computed: tokens that were computed.
        total: tokens that would have been computed without a cache.
        committed: tokens that were decided.
        refreshed: True if everything was computed in some row.
        ms: wall time on the host, in milliseconds, the commit rule included.
    """

    index: int
    computed: int
    total: int
    committed: int
    refreshed: bool
    ms: float


@dataclass
class TextRun(Record):
    """One decoding of a batch.

    Attributes:
        strategy: the strategy as it was configured.
        batch: number of rows.
        prompt_length: tokens of the longest prompt, padding included.
        gen_length: tokens of the answer; None where a pipeline decides.
        steps: one record per step.
        cache_bytes_peak: most bytes that were held at once.
        status: "running", "finished" or "aborted".
    """

    strategy: str
    batch: int
    prompt_length: int
    gen_length: int | None = None
    steps: list[TextStep] = field(default_factory=list)
    cache_bytes_peak: int = 0
    status: str = "running"

    @property
    def nfe(self) -> int:
        """Number of steps."""
        return len(self.steps)

    @property
    def tokens_computed(self) -> int:
        """Tokens that were computed, over all steps."""
        return sum(step.computed for step in self.steps)

    @property
    def tokens_total(self) -> int:
        """Tokens that would have been computed without a cache, over the same steps."""
        return sum(step.total for step in self.steps)

    @property
    def tokens_committed(self) -> int:
        """Tokens that were decided."""
        return sum(step.committed for step in self.steps)

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens computed per step; None before the first."""
        return self.tokens_computed / self.nfe if self.steps else None

    @property
    def token_ratio(self) -> float | None:
        """How many times fewer tokens were computed: what a step could gain at most, attention left aside."""
        return self.tokens_total / self.tokens_computed if self.tokens_computed else None

    @property
    def ms(self) -> float:
        """Wall time of all steps, in milliseconds."""
        return sum(step.ms for step in self.steps)

    def strip(self) -> str:
        """One mark per step: ``■`` everything computed in some row, ``▪`` a part."""
        return "".join(FULL if step.refreshed else PART for step in self.steps)

    def summary(self) -> dict[str, Any]:
        """What follows from the steps."""
        return {
            "strip": self.strip(),
            "nfe": self.nfe,
            "tokens_computed": self.tokens_computed,
            "tokens_total": self.tokens_total,
            "tokens_committed": self.tokens_committed,
            "tokens_per_step": self.tokens_per_step,
            "token_ratio": self.token_ratio,
            "ms": self.ms,
        }

    def lines(self) -> list[tuple[str, str]]:
        """A small table: what was configured, and what was computed of what."""
        ratio = "-" if self.token_ratio is None else f"{self.token_ratio:.2f} times fewer"
        per_step = "-" if self.tokens_per_step is None else f"{self.tokens_per_step:.1f} per step"
        rows = [
            ("strategy", self.strategy),
            ("status", self.status),
            ("steps", f"{self.nfe}, {self.tokens_committed} tokens committed"),
            ("tokens computed", f"{self.tokens_computed:,} of {self.tokens_total:,}, {per_step}, {ratio}"),
            ("cache", f"{self.cache_bytes_peak:,} bytes at most"),
            ("time", f"{self.ms:,.0f} ms"),
        ]
        return rows
