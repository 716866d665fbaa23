"""What every tab asks for: a model, a profile, and how a call of the pipeline is to be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gradio as gr

from cachedit.app.options import number

MOST_STEPS = 200


@dataclass(frozen=True)
class Source:
    """The fields above the tabs, which all of them read.

    Attributes:
        model: a folder or a hub id; empty for the one that the app was started with.
        profile: file or name; empty for the one that is found for the model.
    """

    model: Any
    profile: Any


class CallFields:
    """The controls of a pipeline's call: steps if it chooses them, guidance, size, seed.

    Args:
        steps: number of inference steps that is shown first; None where the strategy says how many.
    """

    def __init__(self, steps: int | None) -> None:
        self.steps = None if steps is None else gr.Slider(2, MOST_STEPS, steps, step=1, label="Steps")
        with gr.Accordion("Guidance, size, seed", open=False):
            with gr.Row():
                self.guidance = _field("Guidance scale", "how strongly the prompt counts")
                self.seed = gr.Number(0, label="Seed", info="of the noise", precision=0, min_width=120)
            with gr.Row():
                self.width, self.height = _field("Width", "pixels"), _field("Height", "pixels")

    @property
    def all(self) -> list[Any]:
        """The components."""
        steps = [] if self.steps is None else [self.steps]
        return [*steps, self.guidance, self.seed, self.width, self.height]

    def options(self, values: dict[Any, Any]) -> dict[str, Any]:
        """Arguments of the pipeline's call; what was left empty is the pipeline's own choice.

        Raises:
            ValueError: something in a field is no number.
        """
        named = (("guidance_scale", self.guidance, float), ("height", self.height, int), ("width", self.width, int))
        return {
            name: number(values[field], field.label, kind)
            for name, field, kind in named
            if (values[field] or "").strip()
        }


def prompts_of(text: str) -> list[str]:
    """One prompt per line.

    Raises:
        ValueError: there are none.
    """
    prompts = [line.strip() for line in (text or "").splitlines() if line.strip()]
    if not prompts:
        raise ValueError("got no prompt; allowed: one per line. Write one.")
    return prompts


def _field(label: str, info: str) -> Any:
    """A field for a number that may be left empty, which Gradio's own number field may not."""
    return gr.Textbox("", label=label, info=info, placeholder="the pipeline's", max_lines=1, min_width=120)
