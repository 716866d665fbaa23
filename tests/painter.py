"""A tiny pipeline with texts and several kinds of attention, fast enough to calibrate in a test."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from cachedit import Profile
from zoo.draw import Draw
from zoo.models import CASES

CASE = CASES["flux"]


class Painter:
    """Flux in Euler steps; each prompt has a text of its own. ``prompts`` tells what was run."""

    def __init__(self) -> None:
        self.transformer = CASE.build()
        self.scheduler = FlowMatchEulerDiscreteScheduler()
        self.prompts: list[str] = []

    def __call__(
        self,
        prompt: str,
        num_inference_steps: int,
        generator: torch.Generator,
        output_type: str = "latent",
        callback_on_step_end: Callable[..., dict[str, Any]] | None = None,
    ) -> tuple[torch.Tensor]:
        self.prompts.append(prompt)
        text = Draw(sum(map(ord, prompt)), 1)(6, 16)
        self.scheduler.set_timesteps(sigmas=np.linspace(1, 1 / num_inference_steps, num_inference_steps))
        x = torch.randn(1, 16, 4, generator=generator)
        for i, timestep in enumerate(self.scheduler.timesteps):
            inputs = {"hidden_states": x, "encoder_hidden_states": text}
            velocity = CASE.call(self.transformer, float(timestep) / 1000, **inputs)
            x = self.scheduler.step(velocity, timestep, x)[0]
            if callback_on_step_end is not None:
                callback_on_step_end(self, i, timestep, {"latents": x})
        return (x,)


def contents(profile: Profile) -> str:
    """The file of a profile without its date."""
    return json.dumps({key: value for key, value in json.loads(profile.to_json()).items() if key != "date"})
