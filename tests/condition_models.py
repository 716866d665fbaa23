"""Tiny Flux and QwenImage transformers in float64, called on any part of their image and condition tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from zoo.draw import Draw
from zoo.packed_models import SIDE, TEXT, TOKENS, build_flux, build_qwenimage

CONDITION = 6  # tokens of a condition, two rows of three


@dataclass(frozen=True)
class Family:
    """A model, and what its forward takes besides the image tokens.

    build:    the model.
    channels: of a token.
    inputs:   of a pass over some of the tokens [image, condition]; ``rows`` are which.
    """

    build: Callable[[], Any]
    channels: int
    inputs: Callable[[torch.Tensor, torch.Tensor, float, torch.Tensor], dict[str, Any]]

    def model(self) -> Any:
        return self.build().double().requires_grad_(False)

    def tokens(self, count: int, seed: int = 0, batch: int = 1) -> torch.Tensor:
        return Draw(seed, batch)(count, self.channels).double()


def text(seed: int = 100, batch: int = 1) -> torch.Tensor:
    return Draw(seed, batch)(TEXT, 16).double()


def _flux(x: torch.Tensor, words: torch.Tensor, t: float, rows: torch.Tensor) -> dict[str, Any]:
    image = torch.cartesian_prod(torch.arange(1), torch.arange(SIDE), torch.arange(SIDE))
    condition = torch.cartesian_prod(torch.arange(1), torch.arange(2) + 64, torch.arange(3))
    batch = x.shape[0]
    return {
        "hidden_states": x,
        "encoder_hidden_states": words,
        "pooled_projections": Draw(5, batch)(16).double(),
        "img_ids": torch.cat([image, condition]).double()[rows],
        "txt_ids": torch.zeros(TEXT, 3).double(),
        "guidance": torch.full((batch,), 3.5).double(),
        "timestep": torch.full((batch,), t).double(),
    }


def _qwen(x: torch.Tensor, words: torch.Tensor, t: float, rows: torch.Tensor) -> dict[str, Any]:
    return {
        "hidden_states": x,
        "encoder_hidden_states": words,
        "img_shapes": [[(1, SIDE, SIDE), (1, 2, 3)]] * x.shape[0],
        "timestep": torch.full((x.shape[0],), t).double(),
        "rows": rows,  # of the table of positions, which a pass takes and the model does not
    }


FAMILIES = {"flux": Family(build_flux, 4, _flux), "qwenimage": Family(build_qwenimage, 16, _qwen)}
IMAGE = torch.arange(TOKENS)
REFERENCE = torch.arange(TOKENS, TOKENS + CONDITION)
EVERYTHING = torch.arange(TOKENS + CONDITION)


def far(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference over the largest value."""
    return float((ours - theirs).abs().max() / theirs.abs().max())
