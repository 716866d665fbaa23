"""The tab where a language model answers one prompt with a cache, token by token, and then without one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gradio as gr

from cachedit.app import text_markup
from cachedit.app.desk import Desk
from cachedit.app.job import Job
from cachedit.app.options import chosen, number, show_options
from cachedit.app.panel import Panel, Values
from cachedit.app.request import Source
from cachedit.evaluate.answer import Answer, ask
from cachedit.evaluate.comparison import BASELINE
from cachedit.evaluate.configuration import Configuration
from cachedit.evaluate.language import LanguageModel
from cachedit.evaluate.text_comparison import TextComparison
from cachedit.evaluate.text_experiment import TextExperiment, text_strategies
from cachedit.samples import call_options
from cachedit.samples import prompts as sample_prompts
from cachedit.text import Event, TextStrategy

TITLE, NAME = "Text", "text"
FIRST = "fast_dllm"
LONGEST = 2048  # tokens of an answer


@dataclass(frozen=True)
class Question:
    """One prompt, and the cache that it is answered with."""

    model: str
    configuration: Configuration
    prompt: str
    seed: int
    call_options: dict[str, Any]


class AnswerFields:
    """The controls of an answer: its length, how many tokens a step decides, and how they are drawn."""

    def __init__(self) -> None:
        with gr.Row():
            self.length = gr.Number(
                call_options("text")["gen_length"],
                label="Tokens of the answer",
                precision=0,
                minimum=1,
                maximum=LONGEST,
                min_width=120,
                elem_id="text-length",
            )
            self.block = gr.Number(
                call_options("text")["block_length"], label="Tokens of a block", precision=0, minimum=1, min_width=120
            )
        with gr.Accordion("Commits, temperature, seed", open=False):
            with gr.Row():
                self.threshold = gr.Textbox(
                    "",
                    label="Confidence threshold",
                    info="a step decides all tokens that reach it",
                    placeholder="one token a step",
                    max_lines=1,
                    min_width=120,
                )
                self.order = gr.Dropdown(
                    ["confidence", "random"], value="confidence", label="Order", info="of the tokens", min_width=120
                )
            with gr.Row():
                self.temperature = gr.Number(0, label="Temperature", info="0: the likeliest token", min_width=120)
                self.seed = gr.Number(0, label="Seed", info="of tokens that are drawn", precision=0, min_width=120)

    @property
    def all(self) -> list[Any]:
        """The components."""
        return [self.length, self.block, self.threshold, self.order, self.temperature, self.seed]

    def options(self, values: Values) -> dict[str, Any]:
        """Arguments of ``cachedit.generate``.

        Raises:
            ValueError: something in a field is no number, or too large a one.
        """
        length = int(values[self.length] or 0)
        if length > LONGEST:
            raise ValueError(f"got {length} tokens of the answer; allowed: 1 to {LONGEST}.")
        options = {
            "gen_length": length,
            "block_length": int(values[self.block] or 0),
            "order": values[self.order],
            "temperature": float(values[self.temperature] or 0),
        }
        if (values[self.threshold] or "").strip():
            options["threshold"] = number(values[self.threshold], self.threshold.label)
        return options


def build(desk: Desk, source: Source) -> None:
    """Lay the tab out."""
    values = gr.State({})
    with gr.Row(elem_classes="ce-form"):
        with gr.Column():
            asked = sample_prompts("text")[0].replace("; ", "\n")
            prompt = gr.Textbox(asked, label="Prompt", lines=3, elem_id="text-prompt")
            fields = AnswerFields()
            strategy = gr.Dropdown(text_strategies(), value=FIRST, label="Strategy", elem_id="text-strategy")
            panel = Panel(desk, "Answer", NAME)
        with gr.Column():
            shown = gr.HTML('<p class="ce-empty">The answer appears here, token by token.</p>', elem_id="text-result")
        with gr.Column(), gr.Accordion("Options of the strategy", elem_id="text-options"):
            show_options(strategy, values, NAME, TextStrategy)

    def plan(given: Values, session: str) -> Any:
        cls = TextStrategy.of_kind()[given[strategy]]
        if not (given[prompt] or "").strip():
            raise ValueError("got no prompt; allowed: any text. Write one.")
        question = Question(
            desk.settings.allowed_model(given[source.model]),
            Configuration(
                cls.name,
                chosen(cls, given[values].get(cls.name, {})),
                desk.settings.allowed_profile(given[source.profile]) if cls.reads_profile else None,
            ),
            given[prompt],
            int(given[fields.seed] or 0),
            fields.options(given),
        )
        return lambda job: answer(job, desk, question)

    inputs = [source.model, source.profile, prompt, strategy, values, *fields.all]
    panel.connect(inputs, [shown], plan, lambda page: {shown: page})


def answer(job: Job, desk: Desk, question: Question) -> str:
    """Answer with the cache and then without one, and compare; the result as HTML."""
    cache, asked = question.configuration, question.prompt
    cached, bare = Answer(asked, question.seed), Answer(asked, question.seed)
    with desk.language_model(question.model, job) as language:
        plan = TextExperiment(language, [cache], [asked], seeds=[question.seed], call_options=question.call_options)
        job.tell("warming up")
        ask(language, None, Answer(asked, question.seed), {**question.call_options, "gen_length": 1})
        watching = Watch(job, language, cache.name, 0, question.call_options["gen_length"])
        ask(language, cache, cached, question.call_options, watching.see)
        told = Watch(job, language, BASELINE, 1, question.call_options["gen_length"])
        ask(language, None, bare, question.call_options, told.count)
    cached.compare(bare)
    comparison = TextComparison.of(plan.conditions, [cache.name], [[bare, cached]])
    return watching.page + text_markup.result(comparison)


class Watch:
    """Follows one answer, step by step.

    Args:
        job: is told how far the answer is.
        language: the model that answers.
        name: of the strategy.
        before: how many answers were given before; there are two in all.
        length: tokens of the answer.

    Attributes:
        page: the tokens as they are after the last step, and how many each step computed, as HTML.
    """

    def __init__(self, job: Job, language: LanguageModel, name: str, before: int, length: int) -> None:
        self._job, self._language, self._name, self._before, self._length = job, language, name, before, length
        self._computed: list[int] = []
        self.page = ""

    def see(self, event: Event) -> None:
        """Show what a step did."""
        tokens = event.sequences[0].tolist()
        self._computed.append(event.tokens_computed)
        view = text_markup.View(
            [self._piece(token) for token in tokens],
            [token == self._mask for token in tokens],
            event.computed[0].tolist(),
            event.committed[0].tolist(),
            event.prompt_length,
        )
        self.page = text_markup.tokens(view, event.step) + text_markup.steps(self._computed, len(tokens), self._name)
        self._tell(event, self.page)

    def count(self, event: Event) -> None:
        """Tell that a step is done, and show nothing new."""
        self._tell(event, "")

    def _tell(self, event: Event, shown: str) -> None:
        answered = event.sequences[0, event.prompt_length :]
        masked = 0 if self._mask is None else int((answered == self._mask).sum())
        done = answered.numel() - masked
        text = f"{self._name}, step {event.step + 1}, {done} of {self._length} tokens decided"
        self._job.tell(text, self._before * self._length + done, 2 * self._length, part=shown or None)

    @property
    def _mask(self) -> int | None:
        found = self._language.options().get("mask_token_id", None)
        return found if found is not None else getattr(self._language.model.config, "mask_token_id", None)

    def _piece(self, token: int) -> str:
        """A token in words; one that only marks something by its name."""
        tokenizer = self._language.tokenizer
        if token in tokenizer.all_special_ids:
            return str(tokenizer.convert_ids_to_tokens(token))
        return str(tokenizer.decode([token]))
