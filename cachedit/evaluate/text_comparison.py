"""The result of comparing text strategies: rows (one configuration over all prompts) and the whole."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cachedit.evaluate.answer import Answer
from cachedit.evaluate.comparison import BASELINE
from cachedit.evaluate.panel import STANDARD


@dataclass
class TextRow:
    """One configuration over all prompts.

    Attributes:
        strategy: "baseline", or the name of the configuration.
        answers: one for each prompt and seed.
        baseline: its row; None for the baseline itself.
    """

    strategy: str
    answers: list[Answer]
    baseline: TextRow | None = field(default=None, repr=False)

    @property
    def latency_s(self) -> float:
        """Median seconds of a call."""
        return statistics.median(latency for answer in self.answers for latency in answer.latencies)

    @property
    def speedup(self) -> float:
        """The baseline's latency over this one."""
        return 1.0 if self.baseline is None else self.baseline.latency_s / self.latency_s

    @property
    def steps(self) -> float | None:
        """Steps of a call, median over the prompts."""
        return self._median(lambda answer: None if answer.run is None else answer.run.nfe)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens that are decided per second, median over the prompts."""
        return self._median(lambda answer: answer.tokens_per_s)

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens that a step computes, mean over the prompts."""
        return self._mean(lambda answer: None if answer.run is None else answer.run.tokens_per_step)

    @property
    def token_ratio(self) -> float | None:
        """Tokens that would have been computed without a cache over those that were, mean over the prompts."""
        return self._mean(lambda answer: None if answer.run is None else answer.run.token_ratio)

    @property
    def exact_match(self) -> float | None:
        """Share of the baseline's tokens, mean over the prompts; None for the baseline."""
        return self._mean(lambda answer: answer.exact_match)

    @property
    def score(self) -> float | None:
        """Mean score of the prompts; None without a scorer."""
        return self._mean(lambda answer: answer.score)

    @property
    def identical(self) -> int | None:
        """Number of answers that are the baseline's; None for the baseline."""
        return None if self.baseline is None else sum(answer.exact_match == 1 for answer in self.answers)

    @property
    def cache_bytes(self) -> int | None:
        """Most bytes that the cache held at once; None for the baseline."""
        if self.baseline is None:
            return None
        return max((answer.run.cache_bytes_peak for answer in self.answers if answer.run), default=None)

    @property
    def strip(self) -> str:
        """One mark per step, of the first prompt."""
        run = self.answers[0].run
        return "" if run is None else run.strip()

    @property
    def configuration(self) -> str:
        """The strategy with all its options."""
        run = self.answers[0].run
        return "" if run is None or self.baseline is None else run.strategy

    @property
    def note(self) -> str:
        """In words, what the numbers would hide; "" if nothing."""
        if self.baseline is None:
            return ""
        notes = []
        if self.token_ratio is not None and self.token_ratio <= 1:
            notes.append("saved nothing: every step computed all tokens")
        elif self.identical == len(self.answers):
            notes.append("every answer equals the baseline's")
        if self.speedup < 1:
            notes.append(f"slower than the baseline: {self.speedup:.2f}x")
        return "; ".join(notes)

    def to_dict(self) -> dict[str, Any]:
        """JSON form, with the keys of a row of pictures; what is of pictures alone is null."""
        memory = [answer.peak_memory for answer in self.answers if answer.peak_memory is not None]
        of_pictures = (
            "reused",
            "rho",
            "rollout",
            "macs",
            "macs_ratio",
            *(metric.name for metric in STANDARD),
            "worst_psnr",
        )
        return {
            "strategy": self.strategy,
            "latency_s": self.latency_s,
            "speedup": self.speedup,
            "nfe": self.steps,
            "cache_bytes": self.cache_bytes,
            "peak_memory": max(memory, default=None),
            **dict.fromkeys(of_pictures),
            "plugins": {},
            "worst": {},
            "identical": None if self.identical is None else self.identical == len(self.answers),
            "identical_prompts": self.identical,
            "configuration": self.configuration or None,
            "strip": self.strip or None,
            "expected": None,
            "note": self.note or None,
            "text": {
                "exact_match": self.exact_match,
                "score": self.score,
                "tokens_per_s": self.tokens_per_s,
                "tokens_per_step": self.tokens_per_step,
                "token_ratio": self.token_ratio,
                "steps": self.steps,
            },
            "prompts": [answer.to_dict() for answer in self.answers],
        }

    def _values(self, of: Callable[[Answer], float | None]) -> list[float]:
        return [value for value in map(of, self.answers) if value is not None]

    def _median(self, of: Callable[[Answer], float | None]) -> float | None:
        values = self._values(of)
        return statistics.median(values) if values else None

    def _mean(self, of: Callable[[Answer], float | None]) -> float | None:
        values = self._values(of)
        return statistics.fmean(values) if values else None


@dataclass
class TextComparison:
    """Rows, and the conditions under which they hold.

    Attributes:
        conditions: name -> value, ready for JSON.
        rows: the baseline first.
    """

    conditions: dict[str, Any]
    rows: list[TextRow]

    @classmethod
    def of(cls, conditions: dict[str, Any], names: list[str], columns: list[list[Answer]]) -> TextComparison:
        """From the answers to every prompt, the baseline's first.

        Args:
            conditions: of the runs.
            names: of the caches.
            columns: for every prompt and seed, the baseline's answer and those with the caches.
        """
        baseline = TextRow(BASELINE, [column[0] for column in columns])
        caches = [TextRow(name, [column[place] for column in columns], baseline) for place, name in enumerate(names, 1)]
        return cls(conditions, [baseline, *caches])

    @property
    def baseline(self) -> TextRow:
        """The row without a cache."""
        return self.rows[0]

    @property
    def cached(self) -> list[TextRow]:
        """The rows of the caches."""
        return self.rows[1:]

    @property
    def scored(self) -> bool:
        """True if there was a scorer."""
        return self.baseline.score is not None

    def worst_first(self) -> list[int]:
        """Indices of the prompts, that with the fewest of the baseline's tokens under any cache first."""
        shares = [min((row.answers[i].exact_match or 0 for row in self.cached), default=1) for i in self._places]
        return sorted(self._places, key=lambda i: shares[i])

    @property
    def _places(self) -> range:
        return range(len(self.baseline.answers))
