"""The tab where one prompt is drawn without and with a cache, side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gradio as gr

from cachedit.app import markup
from cachedit.app.desk import Desk
from cachedit.app.job import Job
from cachedit.app.options import chosen, show_options
from cachedit.app.panel import Panel, Values
from cachedit.app.request import CallFields, Source, prompts_of
from cachedit.evaluate.comparison import BASELINE, Comparison, Row
from cachedit.evaluate.configuration import Configuration
from cachedit.evaluate.experiment import Experiment
from cachedit.evaluate.shot import Shot
from cachedit.evaluate.taking import judge, take
from cachedit.feature.attachment import find
from cachedit.samples import prompts as sample_prompts
from cachedit.strategy import FeatureStrategy, Strategy

TITLE, NAME = "Image", "image"
STEPS = 28
FIRST = "mag_cache"
WARM_UP = 2  # steps that are run first and not counted: the first call of a pipeline is slower


@dataclass(frozen=True)
class Drawing:
    """One prompt, and the cache that it is drawn with."""

    model: str
    configuration: Configuration
    prompt: str
    seed: int
    steps: int
    call_options: dict[str, Any]


def build(desk: Desk, source: Source) -> None:
    """Lay the tab out."""
    values = gr.State({})
    with gr.Row(elem_classes="ce-form"):
        with gr.Column():
            prompt = gr.Textbox(sample_prompts("image")[0], label="Prompt", lines=2, elem_id="image-prompt")
            fields = CallFields(STEPS)
            strategy = gr.Dropdown(_strategies(), value=FIRST, label="Strategy", elem_id="image-strategy")
            panel = Panel(desk, "Generate", NAME)
        with gr.Column():
            shown = gr.HTML('<p class="ce-empty">Baseline and cached picture appear here.</p>', elem_id="image-result")
        with gr.Column(), gr.Accordion("Options of the strategy", elem_id="image-options"):
            show_options(strategy, values, NAME, FeatureStrategy)

    def plan(given: Values, session: str) -> Any:
        name = given[strategy]
        options = chosen(FeatureStrategy.of_kind()[name], given[values].get(name, {}))
        (asked,) = prompts_of(" ".join(given[prompt].split()))
        drawing = Drawing(
            desk.settings.allowed_model(given[source.model]),
            Configuration(name, options, _profile(name, options, desk.settings.allowed_profile(given[source.profile]))),
            asked,
            int(given[fields.seed] or 0),
            int(given[fields.steps]),
            fields.options(given),
        )
        return lambda job: draw(job, desk, drawing)

    inputs = [source.model, source.profile, prompt, strategy, values, *fields.all]
    panel.connect(inputs, [shown], plan, lambda measured: {shown: markup.result(measured)})


def draw(job: Job, desk: Desk, drawing: Drawing) -> Comparison:
    """Draw the prompt bare and with the cache, from the same noise, and compare."""
    steps, cache, options = drawing.steps, drawing.configuration, drawing.call_options
    bare, cached = Shot(drawing.prompt, drawing.seed), Shot(drawing.prompt, drawing.seed)
    with desk.shelf.borrowed(drawing.model, job) as pipe:
        # It refuses what is impossible before the first step; whole warm-up runs would be too long to wait for here.
        plan = Experiment(pipe, [cache], [drawing.prompt], steps, seeds=[drawing.seed], call_options=options)
        job.tell("warming up", 0, 2 * steps)
        take(pipe, None, Shot(drawing.prompt, drawing.seed), min(WARM_UP, steps), options)
        take(pipe, None, bare, steps, options, _teller(job, pipe, BASELINE, 0, steps))
        take(pipe, cache, cached, steps, options, _teller(job, pipe, cache.name, steps, steps))
    judge(cached, bare)
    baseline = Row.of_baseline([bare], steps)
    return Comparison(plan.conditions, [baseline, Row.of_cache(cache.name, [cached], baseline)])


def _teller(job: Job, pipe: Any, name: str, before: int, steps: int) -> Callable[[], None]:
    """Tells that the run of that name begins, and when it is called that one of its steps is done."""
    count = 0

    def tell() -> None:
        nonlocal count
        count = min(count + 1, steps)  # samplers of a higher order call more often
        session = find(pipe)
        strip = session.run.strip() if session is not None and session.run is not None else ""
        job.tell(f"{name}, step {count} of {steps}", before + count, 2 * steps, strip)

    job.tell(f"{name}, {steps} steps", before, 2 * steps)
    return tell


def _strategies() -> list[str]:
    """What can be put on a pipeline."""
    from cachedit import strategies  # noqa: F401  (fills the registry)

    return [*FeatureStrategy.of_kind()]


def _profile(name: str, options: dict[str, Any], profile: str | None) -> str | None:
    """The profile, for a strategy that reads one."""
    found = Strategy.find(name, options)
    return profile if isinstance(found, FeatureStrategy) and found.profile_arrays else None
