"""The tab where a model is measured, and its profile is shown and downloaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

from cachedit.app import markup
from cachedit.app.desk import Desk
from cachedit.app.job import Job
from cachedit.app.panel import Panel, Values
from cachedit.app.request import CallFields, Source, prompts_of
from cachedit.calibration import calibrate
from cachedit.cli.description import describe, listed
from cachedit.evaluate.frontier_plot import frontier_svg
from cachedit.evaluate.sweep import halves, measure_frontier
from cachedit.evaluate.writing import name_of
from cachedit.profile import Profile
from cachedit.samples import prompts as sample_prompts
from cachedit.strategies.auto import Auto
from cachedit.strategy import FeatureStrategy, Strategy

TITLE, NAME = "Calibrate", "calibrate"
STEPS = 28
PROMPTS = 4


@dataclass(frozen=True)
class Measuring:
    """One calibration, and the file that it is for."""

    model: str
    strategy: Strategy
    prompts: list[str]
    seed: int
    steps: int
    call_options: dict[str, Any]
    file: Path


def build(desk: Desk, source: Source) -> None:
    """Lay the tab out."""
    with gr.Row(elem_classes="ce-form"):
        with gr.Column():
            strategy = gr.Dropdown(
                _strategies(),
                value="auto",
                label="Strategy",
                info="what the profile is for; auto also measures what every budget of steps gains and costs",
                elem_id="calibrate-strategy",
            )
            text = "\n".join(sample_prompts("image")[:PROMPTS])
            prompts = gr.Textbox(text, label="Prompts, one per line", lines=4, elem_id="calibrate-prompts")
            fields = CallFields(STEPS)
            name = gr.Textbox("", label="Name of the profile", placeholder="that of the model", max_lines=1)
            panel = Panel(desk, "Calibrate", NAME)
        with gr.Column():
            shown = gr.HTML('<p class="ce-empty">What was measured appears here.</p>', elem_id="calibrate-result")
            download = gr.DownloadButton("Download the profile", interactive=False, elem_id="calibrate-download")

    def plan(given: Values, session: str) -> Any:
        model = desk.settings.allowed_model(given[source.model])
        found = Strategy.find(given[strategy], {})
        chosen = prompts_of(given[prompts])
        if isinstance(found, Auto) and len(chosen) < 2:
            raise ValueError("got 1 prompt; allowed: 2 or more, as the frontier is measured on every second one.")
        called = (given[name] or "").strip() or (name_of(model) if model else "image")
        file = desk.folder(session, called) / f"{called}.json"
        seed, steps = int(given[fields.seed] or 0), int(given[fields.steps])
        measuring = Measuring(model, found, chosen, seed, steps, fields.options(given), file)
        return lambda job: measure(job, desk, measuring)

    def show(measured: tuple[Profile, Path]) -> Values:
        profile, file = measured
        return {
            shown: _described(profile),
            download: gr.update(value=str(file), interactive=True),
            source.profile: str(file),
        }

    inputs = [source.model, strategy, prompts, name, *fields.all]
    panel.connect(inputs, [shown, download, source.profile], plan, show)


def measure(job: Job, desk: Desk, measuring: Measuring) -> tuple[Profile, Path]:
    """Calibrate, measure the frontier where the strategy has one, and write the profile."""
    has_frontier = isinstance(measuring.strategy, Auto)
    watched, held_out = halves(measuring.prompts) if has_frontier else (measuring.prompts, [])

    def progress(what: str) -> Any:
        return lambda done, total, text: job.tell(f"{what}: {text}", done, total)

    with desk.shelf.borrowed(measuring.model, job) as pipe:
        profile = calibrate(
            pipe,
            measuring.strategy,
            prompts=watched,
            num_inference_steps=measuring.steps,
            seed=measuring.seed,
            progress=progress("calibrating"),
            call_options=measuring.call_options,
            name=measuring.file.stem,
            command="cachedit app",
        )
        if has_frontier:
            profile = measure_frontier(
                pipe,
                profile,
                held_out,
                [measuring.steps],
                seed=measuring.seed + len(measuring.prompts),
                call_options=measuring.call_options,
                progress=progress("measuring the frontier"),
            )
    profile.save(measuring.file)
    return profile, measuring.file


def _described(profile: Profile) -> str:
    """The frontier, where there is one, and what else the profile holds."""
    parts, told = [], describe(profile)
    if told["frontier"]:
        columns = profile.arrays["frontier"]
        plot = frontier_svg(columns, f"Frontier of {profile.name}")
        parts.append(markup.plot(plot, "Quality over computed steps and over speed-up; the table has the numbers"))
        cells = zip(*told["frontier"].values(), strict=True)
        rows = [[value if isinstance(value, str) else f"{value:.4g}" for value in row] for row in cells]
        parts.append(markup.table([*columns], rows, "The measured frontier: one row per number of computed steps"))
    arrays = [
        [name, ", ".join(array["axes"]), f"{array['min']:.6g}", f"{array['max']:.6g}"]
        for name, array in told["arrays"].items()
    ]
    parts.append(markup.table(["array", "of", "smallest", "largest"], arrays, "What the profile holds"))
    facts = {"name": told["name"] or "-", "prompts": str(profile.provenance.get("prompts"))}
    facts |= {"model": listed(told["model"] or {}), "sampler": listed(told["sampler"])}
    parts.append(markup.facts(facts))
    return "\n".join(parts)


def _strategies() -> list[str]:
    """Those that read a profile."""
    from cachedit import strategies  # noqa: F401  (fills the registry)

    every = Strategy.registry.items()
    return sorted(name for name, cls in every if issubclass(cls, FeatureStrategy) and cls.profile_arrays)
