"""How the recipes of ``further_*.py`` make a pipeline: parts by name, and nothing where a text encoder would be."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import diffusers
import torch

from .built import Built, pooled_text_embeds, text_embeds
from .draw import Draw

Recipes = dict[str, Callable[[], Built]]

PICTURE = {"height": 16, "width": 16, "output_type": "latent"}


def pipeline(name: str, /, **parts: Any) -> Any:
    """A pipeline of the class of that name. Parts that its constructor insists on and that are not given are None."""
    cls = getattr(diffusers, name)
    parameters = inspect.signature(cls.__init__).parameters
    needed = [
        key for key, one in parameters.items() if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD
    ]
    return cls(**{key: None for key in needed if key != "self"} | parts)


def texts() -> dict[str, torch.Tensor]:
    """A prompt and a negative one."""
    return {**text_embeds(), **text_embeds("negative_", seed=1)}


def pooled_texts() -> dict[str, torch.Tensor]:
    """A prompt and a negative one, with pooled embeddings."""
    return {**pooled_text_embeds(), **pooled_text_embeds("negative_", seed=1)}


def given(side: int = 16, seed: int = 2) -> torch.Tensor:
    """An image ``[1, 3, side, side]`` in 0..1."""
    return Draw(seed, 1)(3, side, side).sigmoid()


def mask(side: int = 16) -> torch.Tensor:
    """A mask ``[1, 1, side, side]`` whose right half is to be painted."""
    return torch.cat([torch.zeros(1, 1, side, side // 2), torch.ones(1, 1, side, side // 2)], dim=-1)
