"""The tab where several caches are measured on many prompts, and the report is shown and downloaded."""

from __future__ import annotations

import shlex
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gradio as gr

from cachedit.app import markup
from cachedit.app.desk import Desk
from cachedit.app.job import Job
from cachedit.app.panel import Panel, Values
from cachedit.app.request import CallFields, Source, prompts_of
from cachedit.evaluate.configuration import Configuration, parse_configuration
from cachedit.evaluate.report import measure
from cachedit.samples import prompts as sample_prompts
from cachedit.strategy import FeatureStrategy, Strategy

TITLE, NAME = "Report", "report"
STEPS = 28
PROMPTS = 4
CACHES = "mag_cache\ntaylor_seer:interval=3\nfirst_block_cache:threshold=0.1"


@dataclass(frozen=True)
class Plan:
    """What is to be compared, and the folder that the report is for."""

    model: str
    configurations: list[Configuration]
    prompts: list[str]
    seeds: list[int]
    steps: int
    repeats: int
    call_options: dict[str, Any]
    folder: Path


def build(desk: Desk, source: Source) -> None:
    """Lay the tab out."""
    with gr.Row(elem_classes="ce-form"):
        with gr.Column():
            caches = gr.Textbox(
                CACHES,
                label="Strategies, one per line",
                info="name, or name:option=value,option=value",
                lines=3,
                elem_id="report-strategies",
            )
            text = "\n".join(sample_prompts("image")[:PROMPTS])
            prompts = gr.Textbox(text, label="Prompts, one per line", lines=4, elem_id="report-prompts")
            fields = CallFields(STEPS)
            with gr.Row():
                seeds = gr.Number(1, label="Seeds per prompt", precision=0, minimum=1, min_width=120)
                repeats = gr.Number(1, label="Repeats", info="medians", precision=0, minimum=1, min_width=120)
            panel = Panel(desk, "Build the report", NAME)
        with gr.Column():
            download = gr.DownloadButton("Download the report (zip)", interactive=False, elem_id="report-download")
            shown = gr.HTML('<p class="ce-empty">The report appears here.</p>', elem_id="report-result")

    def plan(given: Values, session: str) -> Any:
        model = desk.settings.allowed_model(given[source.model])
        profile = desk.settings.allowed_profile(given[source.profile])
        lines = [line.strip() for line in given[caches].splitlines() if line.strip()]
        first = int(given[fields.seed] or 0)
        planned = Plan(
            model,
            [_configuration(desk, line, profile) for line in lines],
            prompts_of(given[prompts]),
            [first + k for k in range(int(given[seeds] or 1))],
            int(given[fields.steps]),
            int(given[repeats] or 1),
            fields.options(given),
            desk.folder(session, NAME),
        )
        return lambda job: compare(job, desk, planned)

    def show(folder: Path) -> Values:
        return {
            shown: markup.framed((folder / "report.html").read_text(encoding="utf-8"), "The report"),
            download: gr.update(value=shutil.make_archive(str(folder), "zip", folder), interactive=True),
        }

    inputs = [source.model, source.profile, caches, prompts, seeds, repeats, *fields.all]
    panel.connect(inputs, [shown, download], plan, show)


def compare(job: Job, desk: Desk, plan: Plan) -> Path:
    """Measure, and write the report into its folder."""
    with desk.shelf.borrowed(plan.model, job) as pipe:
        report = measure(
            pipe,
            plan.configurations,
            plan.prompts,
            plan.steps,
            seeds=plan.seeds,
            repeats=plan.repeats,
            call_options=plan.call_options,
            progress=lambda done, total, text: job.tell(text, done, total),
            folder=plan.folder,
            conditions={
                "model": plan.model or "the sample 'image' that comes with cachedit",
                "command": _command(plan),
            },
        )
    report.write(plan.folder)
    return plan.folder


def _configuration(desk: Desk, line: str, profile: str | None) -> Configuration:
    """One line of the field; the profile above the tabs is for the strategies that read one and name none."""
    found = parse_configuration(line)
    strategy = Strategy.find(found.strategy, {})
    if found.profile is not None:
        return replace(found, profile=desk.settings.allowed_profile(str(found.profile)))
    reads = isinstance(strategy, FeatureStrategy) and strategy.profile_arrays
    return replace(found, profile=profile) if reads else found


def _command(plan: Plan) -> str:
    """What makes the same report from the command line."""
    caches = []
    for cache in plan.configurations:
        named = f"profile={cache.profile}" if cache.profile is not None and "profile=" not in cache.name else ""
        caches.append(cache.name + (named and f"{',' if ':' in cache.name else ':'}{named}"))
    flags = {"guidance_scale": "--guidance", "height": "--height", "width": "--width"}
    words = ["cachedit", "report", *([plan.model] if plan.model else ["--sample", "image"]), "--strategies", *caches]
    words += ["--prompt", *plan.prompts]
    numbers = {"--steps": plan.steps, "--seed": plan.seeds[0], "--seeds": len(plan.seeds), "--repeats": plan.repeats}
    numbers |= {flags[name]: value for name, value in plan.call_options.items()}
    return shlex.join([*words, *(str(part) for pair in numbers.items() for part in pair)])
