"""One prompt under one text strategy: what was answered, how long it took, and how far it is from the baseline."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from cachedit.evaluate.configuration import Configuration
from cachedit.evaluate.language import LanguageModel
from cachedit.evaluate.shot import finite
from cachedit.text import TextRun, TextStep, stream
from cachedit.wrap import last_run

UNCACHED = "no_cache"  # the strategy that the baseline is decoded with


@dataclass
class Answer:
    """One prompt under one text strategy.

    Attributes:
        prompt, seed: what was asked, and from which noise tokens are drawn where the temperature is above 0.
        latencies: seconds of every measured call.
        processor: CPU seconds of this process in every measured call, which other processes do not lengthen.
        tokens: of the answer.
        text: the answer in words.
        peak_memory: most bytes that torch held on the device at once during the call; None where it cannot be told.
        run: the record of the last call.
        exact_match: share of the baseline's tokens that are the same; None for the baseline.
        score: what a scorer says of the text; None without one.
    """

    prompt: str
    seed: int
    latencies: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    peak_memory: int | None = None
    run: TextRun | None = None
    exact_match: float | None = None
    score: float | None = None

    @property
    def latency_s(self) -> float | None:
        """Median of the calls; None if none was timed."""
        return statistics.median(self.latencies) if self.latencies else None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens that were decided, per second of the median call; None if none was timed."""
        if self.run is None or not self.latency_s:
            return None
        return self.run.tokens_committed / self.latency_s

    def compare(self, baseline: Answer) -> None:
        """Enter how many of the baseline's tokens are the same."""
        same = [a == b for a, b in zip(self.tokens, baseline.tokens, strict=True)]
        self.exact_match = sum(same) / len(same)

    def to_dict(self) -> dict[str, Any]:
        """JSON form, with the keys that a prompt of a picture has as well."""
        run = self.run
        return {
            "prompt": self.prompt,
            "seed": self.seed,
            "latency_s": self.latency_s,
            "latencies_s": self.latencies,
            "processor_s": self.processor,
            "peak_memory": self.peak_memory,
            "file": None,
            "nfe": None if run is None else run.nfe,
            "strip": None if run is None else run.strip(),
            "identical": None if self.exact_match is None else self.exact_match == 1,
            "text": {
                "answer": self.text,
                "exact_match": self.exact_match,
                "score": finite(self.score),
                "tokens_per_s": self.tokens_per_s,
                "tokens_per_step": None if run is None else run.tokens_per_step,
                "steps": None if run is None else run.nfe,
                "computed": [] if run is None else [step.computed for step in run.steps],
            },
        }

    def to_state(self) -> dict[str, Any]:
        """Plain data, from which ``from_state`` makes it again."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Answer:
        """The reverse of ``to_state``."""
        run = state["run"]
        if run is not None:
            run = TextRun(**{**run, "steps": [TextStep(**step) for step in run["steps"]]})
        return cls(**{**state, "run": run})


def ask(
    language: LanguageModel,
    configuration: Configuration | None,
    answer: Answer,
    options: dict[str, Any],
    on_step: Callable[[Any], None] | None = None,
) -> None:
    """One timed call for one prompt; the result is added to ``answer``.

    Args:
        language: the model.
        configuration: the cache; None for none.
        answer: what is asked.
        options: further arguments of ``cachedit.generate``.
        on_step: called with the event of every step; what it raises ends the call.
    """
    strategy = UNCACHED if configuration is None else configuration.strategy
    own = {} if configuration is None else {**configuration.options, "profile": configuration.profile}
    tokens = language.encode(answer.prompt)
    device = tokens.device
    generator = torch.Generator(device).manual_seed(answer.seed)
    sequence, prompt = tokens[0], tokens.shape[1]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    start, worked = time.perf_counter(), time.process_time()
    for event in stream(language.model, tokens, strategy, generator=generator, **language.options() | options | own):
        sequence = event.sequences[0]
        if on_step is not None:
            on_step(event)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        answer.peak_memory = max(answer.peak_memory or 0, torch.cuda.max_memory_allocated(device))
    answer.latencies.append(time.perf_counter() - start)
    answer.processor.append(time.process_time() - worked)
    answer.tokens, answer.text = sequence[prompt:].tolist(), language.text(sequence[prompt:])
    answer.run = last_run(language.model)
