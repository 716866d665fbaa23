"""The tab where a causal video model rolls on: chunks are shown as they come, and the prompt may change meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gradio as gr
import torch

from cachedit.app import markup, reel
from cachedit.app.desk import Desk
from cachedit.app.job import Job
from cachedit.app.options import Known, chosen, show_options
from cachedit.app.panel import Panel, Values
from cachedit.app.reel import Reel
from cachedit.app.request import CallFields, Source, prompts_of
from cachedit.samples import call_options, sample_path
from cachedit.samples import prompts as sample_prompts
from cachedit.video.prompts import WAYS
from cachedit.video.strategy import VideoStrategy
from cachedit.wrap import wrap

TITLE, NAME = "Video", "video"
FRAMES, MOST_FRAMES = 96, 1920
FIRST = "rolling_kv"
FOR_SAMPLE: Known = {
    "rolling_kv": {"preset": "longlive", "rope": "sink_shift"},
    "magic_world": {"preset": "longlive", "rope": "sink_shift"},
    "recompute_window": {"preset": "longlive"},
}
"""What the options are set to at first: what the sample was trained for."""


@dataclass(frozen=True)
class Rolling:
    """One video, and how it is rolled out.

    Attributes:
        model: a folder or a hub id.
        strategy, options: for ``cachedit.wrap``.
        prompt: that it begins with.
        frames: its length.
        seed: of the noise.
        call_options: further arguments of ``stream``.
    """

    model: str
    strategy: str
    options: dict[str, Any]
    prompt: str
    frames: int
    seed: int
    call_options: dict[str, Any]


def build(desk: Desk, source: Source) -> None:
    """Lay the tab out."""
    values = gr.State(FOR_SAMPLE)
    with gr.Row(elem_classes="ce-form"):
        with gr.Column():
            prompt = gr.Textbox(
                sample_prompts("video")[0],
                label="Prompt",
                info="for the sample: a COLOUR SHAPE moves DIRECTION and bounces",
                lines=2,
                elem_id="video-prompt",
            )
            with gr.Row(elem_classes="ce-buttons"):
                how = gr.Dropdown(
                    list(WAYS), value=WAYS[0], label="What changes with the prompt", min_width=160, elem_id="video-how"
                )
                change = gr.Button("Change the prompt now", elem_id="video-change", min_width=160)
            told = gr.HTML("", elem_id="video-told", elem_classes="ce-live")
            frames = gr.Slider(12, MOST_FRAMES, FRAMES, step=12, label="Frames")
            fields = CallFields(None)
            strategy = gr.Dropdown(_strategies(), value=FIRST, label="Strategy", elem_id="video-strategy")
            panel = Panel(desk, "Generate", NAME)
        with gr.Column():
            shown = gr.HTML('<p class="ce-empty">The video appears here while it is made.</p>', elem_id="video-result")
        with gr.Column(), gr.Accordion("Options of the strategy", elem_id="video-options"):
            show_options(strategy, values, NAME, VideoStrategy)

    def plan(given: Values, session: str) -> Any:
        name, model = given[strategy], desk.settings.allowed_model(given[source.model])
        options = chosen(VideoStrategy.of_kind()[name], given[values].get(name, {}))
        called = fields.options(given)
        if not model:
            called = call_options("video") | called
        called.pop("num_frames", None)
        (asked,) = prompts_of(" ".join(given[prompt].split()))
        rolling = Rolling(model, name, options, asked, int(given[frames]), int(given[fields.seed] or 0), called)
        return lambda job: roll(job, desk, rolling)

    def another(text: str, way: str, request: gr.Request) -> str:
        try:
            (asked,) = prompts_of(" ".join(text.split()))
            desk.send(str(request.session_hash), (asked, way))
        except ValueError as error:
            return markup.error(str(error))
        return markup.message(f"From the next chunk on: {asked}")

    inputs = [source.model, prompt, strategy, values, frames, *fields.all]
    panel.connect(inputs, [shown], plan, lambda made: {shown: reel.shown(made)})
    change.click(another, [prompt, how], told, queue=False, show_progress="hidden", api_visibility="private")


def roll(job: Job, desk: Desk, rolling: Rolling) -> Reel:
    """Make the video chunk by chunk, tell of each, and take notice of other prompts between them."""
    with desk.shelf.borrowed(rolling.model or str(sample_path("video")), job) as pipe:
        wrap(pipe, rolling.strategy, **rolling.options)
        stream = pipe.stream(
            rolling.prompt,
            num_frames=rolling.frames,
            generator=torch.Generator().manual_seed(rolling.seed),
            output_type="pt",
            **rolling.call_options,
        )
        made = Reel((), stream.run)
        try:
            job.tell("first chunk", 0, rolling.frames)
            for chunk in stream:
                made = Reel((*made.chunks, chunk.frames[0].float().cpu()), stream.run)
                job.tell(f"chunk {chunk.index + 1}", made.frames, rolling.frames, part=made)
                for prompt, how in job.mail():
                    stream.change_prompt(prompt, how)
        finally:
            stream.close()
    return Reel(made.chunks, made.run, whole=True)


def _strategies() -> list[str]:
    """What rolls a video out."""
    from cachedit import strategies  # noqa: F401  (fills the registry)

    return [*VideoStrategy.of_kind()]
