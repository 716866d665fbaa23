"""The engine of a comparison of text strategies: which calls there are, and in which order they are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cachedit.calibration.work import Work
from cachedit.evaluate.answer import Answer, ask
from cachedit.evaluate.conditions import PROTOCOL, plain, surroundings
from cachedit.evaluate.configuration import Configuration, own_options
from cachedit.evaluate.experiment import check_plan, name_of, spread, stop_if
from cachedit.evaluate.language import LanguageModel
from cachedit.evaluate.text_comparison import TextComparison
from cachedit.registry import Strategy
from cachedit.text import TextStrategy
from cachedit.wrap import unwrap

Scorer = Callable[[str, str], float]
"""Takes a prompt and an answer, and says how good the answer is; 1 is right."""


class TextExperiment:
    """A language model without and with some caches on the same prompts.

    For every prompt and seed the uncached decoding and each cache run one after the other, so that a machine that slows
    down slows all of them. One call of each comes first in every process and is not counted.

    Args:
        language: the model.
        configurations: the caches.
        prompts: at least one.
        seeds: prompt ``i`` draws its tokens from the noise of ``seed + i`` for each of these.
        repeats: measured calls of each prompt and seed.
        call_options: further arguments of ``cachedit.generate``.
        scorer: judges the answers; None: they are only compared with the baseline's.
        cancelled: asked after every step; True ends everything with ``Cancelled``.

    Attributes:
        work: deals the calls to the processes and keeps what is done; by default this process does all and keeps none.
        conditions: of the calls.

    Raises:
        ValueError: nothing to compare, or a strategy that is none for text.
        TypeError: an option that a strategy does not have.
    """

    def __init__(
        self,
        language: LanguageModel,
        configurations: Sequence[Configuration],
        prompts: Sequence[str],
        *,
        seeds: Sequence[int] = (0,),
        repeats: int = 1,
        call_options: dict[str, Any] | None = None,
        scorer: Scorer | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> None:
        _check(configurations, prompts, seeds, repeats)
        unwrap(language.model)
        self.language, self.repeats, self.scorer, self.cancelled = language, repeats, scorer, cancelled
        self.configurations: tuple[Configuration | None, ...] = (None, *configurations)
        self.call_options = call_options or {}
        self.cells = [(prompt, seed + i) for i, prompt in enumerate(prompts) for seed in seeds]
        self.work = Work()
        self._warm = False
        self.conditions = {
            "model": language.name,
            "denoiser": type(language.model).__name__,
            "steps": self.call_options.get("steps"),
            "call_options": plain(self.call_options),
            "num_prompts": len(prompts),
            "prompts": list(prompts),
            "seeds": [seed for _, seed in self.cells],
            "repeats": repeats,
            "protocol": PROTOCOL,
            **surroundings(language.model),
        }

    @property
    def expected_calls(self) -> int:
        """Measured calls that ``run`` makes in all processes."""
        return len(self.configurations) * self.repeats * len(self.cells)

    def run(self) -> TextComparison:
        """Make all calls."""
        units = self.work.map("answers", range(len(self.cells)), self._unit)
        columns = [[Answer.from_state(state) for state in unit] for unit in units]
        comparison = TextComparison.of(self.conditions, [name_of(one) for one in self.configurations[1:]], columns)
        comparison.conditions = {
            **self.conditions,
            "processes": self.work.ranks.count,
            "baseline_calls": spread([time for answer in comparison.baseline.answers for time in answer.latencies]),
        }
        return comparison

    def _unit(self, k: int) -> list[dict[str, Any]]:
        """One prompt and seed: all configurations in turn, as often as wanted."""
        prompt, seed = self.cells[k]
        if not self._warm:
            for configuration in self.configurations:
                self._ask(configuration, Answer(*self.cells[0]), "warm-up")
            self._warm = True
        answers = [Answer(prompt, seed) for _ in self.configurations]
        for _ in range(self.repeats):
            for configuration, answer in zip(self.configurations, answers, strict=True):
                self._ask(configuration, answer, f"prompt {k + 1} of {len(self.cells)}")
                self.work.tally.add(1)
        for answer in answers[1:]:
            answer.compare(answers[0])
        if self.scorer is not None:
            for answer in answers:
                answer.score = float(self.scorer(prompt, answer.text))
        return [answer.to_state() for answer in answers]

    def _ask(self, configuration: Configuration | None, answer: Answer, what: str) -> None:
        self.work.tally.begin(f"{name_of(configuration)}, {what}")
        stop_if(self.cancelled)
        ask(self.language, configuration, answer, self.call_options, lambda event: stop_if(self.cancelled))


def _check(configurations: Sequence[Configuration], prompts: Sequence[str], seeds: Sequence[int], repeats: int) -> None:
    check_plan(configurations, prompts, seeds, repeats=repeats)
    allowed = text_strategies()
    others = [one.name for one in configurations if Strategy.named(one.strategy).name not in allowed]
    if others:
        raise ValueError(
            f"{', '.join(others)} caches no language model; allowed: {', '.join(allowed)}. "
            "`cachedit strategies` describes them."
        )
    kinds = TextStrategy.of_kind()
    for one in configurations:
        cls = kinds[Strategy.named(one.strategy).name]
        cls.check_options(own_options(cls, one.options))


def text_strategies() -> list[str]:
    """Names of the strategies for language models."""
    from cachedit import strategies  # noqa: F401  (fills the registry)

    return [*TextStrategy.of_kind()]
