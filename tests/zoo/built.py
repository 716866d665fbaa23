"""A tiny pipeline together with the arguments of its call, and how to run it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from diffusers import DiffusionPipeline

from .draw import Draw

TEXT = 6  # text tokens


@dataclass(frozen=True)
class Built:
    """A pipeline ready to be called.

    pipe:      the pipeline.
    kwargs:    arguments of its call; the number of steps is left to ``run``.
    denoisers: attribute names of its denoisers.
    calls:     denoiser calls, over all denoisers, of a run of 10 steps.
    windows:   how many runs it makes one after the other, each with a schedule of its own.
    """

    pipe: DiffusionPipeline
    kwargs: dict[str, Any]
    denoisers: tuple[str, ...] = ("transformer",)
    calls: int = 10
    windows: int = 1


def run(built: Built, seed: int = 0, steps: int = 10, **overrides: Any) -> torch.Tensor:
    """Run the pipeline with a seeded generator and return its latents or pixels."""
    built.pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(seed)
    arguments = {**built.kwargs, "num_inference_steps": steps, "generator": generator, **overrides}
    torch.manual_seed(seed)  # some draw without the generator
    with torch.no_grad():
        output = built.pipe(**arguments)
    return torch.as_tensor(output[0])


def text_embeds(prefix: str = "", seed: int = 0) -> dict[str, torch.Tensor]:
    """Prompt embeddings ``[1, 6, 16]`` under the name that pipelines use."""
    return {f"{prefix}prompt_embeds": Draw(seed, 1)(TEXT, 16)}


def masked_text_embeds(prefix: str = "", seed: int = 0) -> dict[str, torch.Tensor]:
    """Prompt embeddings with a mask that hides nothing."""
    return {**text_embeds(prefix, seed), f"{prefix}prompt_attention_mask": torch.ones(1, TEXT, dtype=torch.bool)}


def pooled_text_embeds(prefix: str = "", seed: int = 0) -> dict[str, torch.Tensor]:
    """Prompt embeddings with a pooled one ``[1, 16]``."""
    return {**text_embeds(prefix, seed), f"{prefix}pooled_prompt_embeds": Draw(seed + 1000, 1)(16)}
