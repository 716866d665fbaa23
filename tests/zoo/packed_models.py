"""Tiny image denoisers on packed latents ``[B, 16, C]``: Flux and its relatives, with 6 text tokens, width 32."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    ChromaTransformer2DModel,
    Flux2Transformer2DModel,
    FluxTransformer2DModel,
    QwenImageTransformer2DModel,
)
from torch import nn

from .case import Case, unit
from .draw import Draw, settle

WIDTH = 32
TEXT = 6
SIDE = 4  # image tokens per side
TOKENS = SIDE * SIDE
TWO_LISTS = ("transformer_blocks", "single_transformer_blocks")


def grid_ids(axes: int = 3) -> torch.Tensor:
    """Positions ``[N, axes]`` of image tokens: row and column in axes 1 and 2."""
    ids = torch.zeros(SIDE, SIDE, axes)
    ids[..., 1] = torch.arange(SIDE)[:, None]
    ids[..., 2] = torch.arange(SIDE)
    return ids.reshape(TOKENS, axes)


def residuals(draw: Draw, count: int) -> list[torch.Tensor]:
    """ControlNet residuals ``[B, N, C]`` for ``count`` blocks."""
    return [draw(TOKENS, WIDTH, scale=0.5) for _ in range(count)]


def build_flux() -> nn.Module:
    """FLUX.1-dev: 2 double and 3 single blocks, embedded guidance."""
    model = FluxTransformer2DModel(
        in_channels=4, num_layers=2, num_single_layers=3, num_attention_heads=2, attention_head_dim=16,
        joint_attention_dim=16, pooled_projection_dim=16, guidance_embeds=True, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    return settle(model)


def flux_inputs(seed: int, batch: int) -> dict[str, Any]:
    """Packed latents ``[B, 16, 4]``, text, pooled text, positions and guidance."""
    draw = Draw(seed, batch)
    return {
        "hidden_states": draw(TOKENS, 4),
        "encoder_hidden_states": draw(TEXT, 16),
        "pooled_projections": draw(16),
        "img_ids": grid_ids(),
        "txt_ids": torch.zeros(TEXT, 3),
        "guidance": torch.full((batch,), 3.5),
    }


def flux_control(seed: int, batch: int) -> dict[str, Any]:
    """Residuals for both lists; Flux spreads a shorter list of them over its blocks."""
    draw = Draw(seed, batch)
    return {
        "controlnet_block_samples": residuals(draw, 2),
        "controlnet_single_block_samples": residuals(draw, 2),
    }


def build_chroma() -> nn.Module:
    """Chroma: Flux whose modulations come from one shared approximator, sliced per block."""
    model = ChromaTransformer2DModel(
        in_channels=4, num_layers=2, num_single_layers=3, num_attention_heads=2, attention_head_dim=16,
        joint_attention_dim=16, axes_dims_rope=(4, 4, 8), approximator_num_channels=32, approximator_hidden_dim=32,
        approximator_layers=1,
    )  # fmt: skip
    return settle(model)


def chroma_inputs(seed: int, batch: int) -> dict[str, Any]:
    """Packed latents ``[B, 16, 4]``, text and positions."""
    draw = Draw(seed, batch)
    return {
        "hidden_states": draw(TOKENS, 4),
        "encoder_hidden_states": draw(TEXT, 16),
        "img_ids": grid_ids(),
        "txt_ids": torch.zeros(TEXT, 3),
    }


def build_flux2() -> nn.Module:
    """FLUX.2: double blocks return (text, image), single blocks one joined stream."""
    model = Flux2Transformer2DModel(
        in_channels=4, num_layers=2, num_single_layers=3, num_attention_heads=2, attention_head_dim=16,
        joint_attention_dim=16, timestep_guidance_channels=16, axes_dims_rope=(4, 4, 4, 4),
    )  # fmt: skip
    return settle(model)


def flux2_inputs(seed: int, batch: int) -> dict[str, Any]:
    """Packed latents ``[B, 16, 4]``, text, four-axis positions and guidance."""
    draw = Draw(seed, batch)
    text_ids = torch.zeros(TEXT, 4)
    text_ids[:, 3] = torch.arange(TEXT)
    return {
        "hidden_states": draw(TOKENS, 4),
        "encoder_hidden_states": draw(TEXT, 16),
        "img_ids": grid_ids(4),
        "txt_ids": text_ids,
        "guidance": torch.full((batch,), 3.5),
    }


def build_qwenimage() -> nn.Module:
    """QwenImage: double blocks only, returning (text, image)."""
    model = QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=4, num_attention_heads=2, attention_head_dim=16,
        joint_attention_dim=16, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    return settle(model)


def qwenimage_inputs(seed: int, batch: int) -> dict[str, Any]:
    """Packed latents ``[B, 16, 16]`` and text."""
    draw = Draw(seed, batch)
    return {
        "hidden_states": draw(TOKENS, 16),
        "encoder_hidden_states": draw(TEXT, 16),
        "img_shapes": [[(1, SIDE, SIDE)]] * batch,
    }


PACKED_CASES = [
    Case("flux", build_flux, flux_inputs, unit, TWO_LISTS, control=flux_control),
    # Chroma adds the residuals of its single blocks in place, into the tensor that the block returned.
    Case("chroma", build_chroma, chroma_inputs, unit, TWO_LISTS, control=flux_control),
    Case("flux2", build_flux2, flux2_inputs, unit, TWO_LISTS),
    Case(
        "qwenimage", build_qwenimage, qwenimage_inputs, unit, ("transformer_blocks",),
        control=lambda seed, batch: {"controlnet_block_samples": residuals(Draw(seed, batch), 2)},
    ),
]  # fmt: skip
