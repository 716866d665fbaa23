"""A pipeline in which nothing moves."""

from __future__ import annotations

from diffusers import FlowMatchEulerDiscreteScheduler
from torch import nn


class Still:
    """As much of a pipeline as tells the step, so that a model can be called with one timestep throughout."""

    def __init__(self, model: nn.Module, steps: int) -> None:
        setattr(self, "unet" if hasattr(model, "down_blocks") else "transformer", model)
        self.scheduler = FlowMatchEulerDiscreteScheduler()
        self.scheduler.set_timesteps(steps)

    def __call__(self) -> None:
        """A pipeline class can be called; the caller drives the parts itself."""
