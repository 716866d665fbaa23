"""What happened in a run: one record per step and branch, and the numbers people ask for."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cachedit.record import Record

COMPUTED, REUSED = "■", "□"


@dataclass(slots=True)
class Step:
    """One call of a denoiser.

    Attributes:
        index: position in the noise schedule (0 is the noisiest).
        timestep: the scheduler's timestep, in its own units; None when unknown.
        sigma: noise level in [0, 1]; None when unknown.
        branch: guidance path ("cond", "uncond", or "0", "1" ... in the order of the calls of a step).
        expert: name of the denoiser ("transformer", "transformer_2", ...).
        computed: True if everything was computed, False if something was reused.
        reason: why it was computed; "" for a reused step.
        sites: what was reused, of a strategy that chooses between several sites.
        signal: what a signal-driven policy measured; None for a schedule.
        ms: wall time of the call on the host, in milliseconds; None while it runs or under torch.compile.
    """

    index: int
    timestep: float | None
    sigma: float | None
    branch: str
    expert: str
    computed: bool
    reason: str = ""
    signal: float | None = None
    ms: float | None = None
    sites: str = ""


@dataclass
class Run(Record):
    """One trip through a noise schedule.

    Attributes:
        strategy: the strategy as it was configured.
        num_steps: length of the schedule; None when unknown.
        steps: one record per step and branch, in the order of the calls.
        cache_bytes_peak: most bytes that the histories of all branches and experts held at once.
        status: "running", "finished" or "aborted".
        expected: what the strategy expected of this run, such as its speed-up and its quality; mostly empty.
        response: of the sampler, one number per step of the schedule, for strategies that ask for it.
    """

    strategy: str
    num_steps: int | None = None
    steps: list[Step] = field(default_factory=list)
    cache_bytes_peak: int = 0
    status: str = "running"
    expected: dict[str, Any] = field(default_factory=dict)
    response: Sequence[float] | None = None

    @property
    def computed_steps(self) -> list[int]:
        """Indices of the steps at which any branch was computed."""
        return sorted({step.index for step in self.steps if step.computed})

    @property
    def reused_steps(self) -> list[int]:
        """Indices of the steps at which any branch was reused."""
        return sorted({step.index for step in self.steps if not step.computed})

    @property
    def nfe(self) -> int:
        """Number of computed steps."""
        return len(self.computed_steps)

    @property
    def rho(self) -> float | None:
        """Median time of a reused call over the median time of a computed one; None without both."""
        reused, computed = self._times(False), self._times(True)
        if not reused or not computed:
            return None
        return statistics.median(reused) / statistics.median(computed)

    @property
    def speedup(self) -> float | None:
        """Time of the denoiser with every call computed over what it took, by the medians; None without both kinds."""
        if self.rho is None:
            return None
        reused = sum(1 for step in self.steps if not step.computed)
        return len(self.steps) / (len(self.steps) - reused * (1 - self.rho))

    def _times(self, computed: bool) -> list[float]:
        return [step.ms for step in self.steps if step.ms is not None and step.computed is computed]

    def strip(self) -> str:
        """One mark per step: ``■`` computed, ``□`` reused."""
        computed = set(self.computed_steps)
        return "".join(COMPUTED if i in computed else REUSED for i in _unique(step.index for step in self.steps))

    def summary(self) -> dict[str, Any]:
        """What follows from the steps."""
        return {
            "strip": self.strip(),
            "nfe": self.nfe,
            "rho": self.rho,
            "speedup": self.speedup,
            "computed_steps": self.computed_steps,
            "reused_steps": self.reused_steps,
        }

    def lines(self) -> list[tuple[str, str]]:
        """A small table: what was configured, what was computed and reused, and why."""
        total = len(self.computed_steps) + len([i for i in self.reused_steps if i not in self.computed_steps])
        reasons: dict[str, int] = {}
        for step in self.steps:
            if step.computed:
                reasons[step.reason] = reasons.get(step.reason, 0) + 1
        rho = "-" if self.rho is None else f"{self.rho:.3f}"
        speedup = "-" if self.speedup is None else f"{self.speedup:.2f}x"
        rows = [
            ("strategy", self.strategy),
            ("status", self.status),
            ("steps", f"{self.strip()}  {self.nfe} of {total} computed"),
            ("rho", f"{rho}  (time of a reused call / a computed call)"),
            ("speed-up", f"{speedup}  (of the denoiser alone)"),
            ("cache", f"{self.cache_bytes_peak:,} bytes at most"),
            ("computed because", "; ".join(f"{reason} x{count}" for reason, count in reasons.items()) or "-"),
        ]
        if self.expected:
            rows.insert(1, ("expected", ", ".join(f"{name} {_short(value)}" for name, value in self.expected.items())))
        return rows


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _unique(values: Iterable[int]) -> list[int]:
    return list(dict.fromkeys(values))
