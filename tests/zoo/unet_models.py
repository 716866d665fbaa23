"""Tiny UNets: two or three levels of two layers, latents of 8 x 8 and 6 text tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from diffusers import (
    UNet2DConditionModel,
    UNetMotionModel,
    UNetSpatioTemporalConditionModel,
)
from torch import nn

from .case import Case, Inputs, discrete
from .draw import Draw, settle

SIDE = 8
TEXT = 6
FRAMES = 3
IMAGE_WIDTHS = (16, 24, 32)
MOTION_WIDTHS = (16, 32)


def build_sd() -> nn.Module:
    """Stable Diffusion 1: cross attention everywhere but in the innermost level."""
    model = UNet2DConditionModel(
        sample_size=SIDE, block_out_channels=IMAGE_WIDTHS, layers_per_block=2, norm_num_groups=4,
        cross_attention_dim=16, attention_head_dim=2,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    return settle(model)


def sd_inputs(seed: int, batch: int) -> dict[str, Any]:
    """Latents ``[B, 4, 8, 8]`` and text."""
    draw = Draw(seed, batch)
    return {"sample": draw(4, SIDE, SIDE), "encoder_hidden_states": draw(TEXT, 16)}


def build_sdxl() -> nn.Module:
    """SDXL: no cross attention in the outermost level, deeper transformers in the innermost, pooled text and sizes."""
    model = UNet2DConditionModel(
        sample_size=SIDE, block_out_channels=IMAGE_WIDTHS, layers_per_block=2, norm_num_groups=4,
        cross_attention_dim=16, attention_head_dim=(2, 3, 4), transformer_layers_per_block=(1, 1, 2),
        use_linear_projection=True, addition_embed_type="text_time", addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=16 + 6 * 8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    settle(model)
    weight = model.add_embedding.linear_1.weight  # it reads no time: not to be slowed down
    nn.init.normal_(weight, std=1 / math.sqrt(weight.shape[1]), generator=torch.Generator().manual_seed(1))
    return model


def sdxl_inputs(seed: int, batch: int) -> dict[str, Any]:
    """Latents, text, pooled text and ``[original size, crop, target size]``."""
    sizes = torch.tensor([[64.0, 64.0, 0.0, 0.0, 64.0, 64.0]])
    added = {"text_embeds": Draw(seed + 1000, batch)(16), "time_ids": sizes.repeat(batch, 1)}
    return {**sd_inputs(seed, batch), "added_cond_kwargs": added}


def build_motion() -> nn.Module:
    """AnimateDiff: Stable Diffusion with a motion module after each pair of a resnet and an attention."""
    model = UNetMotionModel(
        sample_size=SIDE, block_out_channels=MOTION_WIDTHS, layers_per_block=2, norm_num_groups=4,
        cross_attention_dim=16, num_attention_heads=2, motion_num_attention_heads=2, motion_max_seq_length=8,
        down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"),
        up_block_types=("UpBlockMotion", "CrossAttnUpBlockMotion"),
    )  # fmt: skip
    return settle(model)


def motion_inputs(seed: int, batch: int) -> dict[str, Any]:
    """Latents ``[B, 4, 3, 8, 8]`` (channels before frames) and the text once per frame ``[B * 3, 6, 16]``."""
    draw = Draw(seed, batch)
    return {
        "sample": draw(4, FRAMES, SIDE, SIDE),
        "encoder_hidden_states": draw(TEXT, 16).repeat_interleave(FRAMES, dim=0),
    }


def build_svd() -> nn.Module:
    """Stable Video Diffusion: resnets and attentions that mix a spatial and a temporal part; one layer further in.

    The class norms 32 groups, which are single channels at this width: they would cancel the time embedding, one number
    per channel. So there are fewer here, which the config does not say: a model loaded from a saved one has 32 again.
    """
    model = UNetSpatioTemporalConditionModel(
        sample_size=SIDE, block_out_channels=(32, 32), layers_per_block=(2, 1), cross_attention_dim=16,
        num_attention_heads=(2, 4), addition_time_embed_dim=8, projection_class_embeddings_input_dim=3 * 8,
        num_frames=FRAMES,
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
    )  # fmt: skip
    for module in model.modules():
        if isinstance(module, nn.GroupNorm):
            module.num_groups = 8
    return settle(model, slow_time=False)


def svd_inputs(seed: int, batch: int) -> dict[str, Any]:
    """Latents ``[B, 3, 8, 8, 8]`` (frames before channels, half of them the given image), an image embedding, ids."""
    draw = Draw(seed, batch)
    ids = torch.tensor([[6.0, 127.0, 0.02]])
    return {
        "sample": draw(FRAMES, 8, SIDE, SIDE),
        "encoder_hidden_states": draw(1, 16),
        "added_time_ids": ids.repeat(batch, 1),
    }


def log_noise(sigma: float, batch: int) -> dict[str, Any]:
    """A quarter of the logarithm of the noise-to-signal ratio, which is kept to SVD's range of 0.002 to 700."""
    ratio = min(max(sigma / max(1 - sigma, 1e-6), 0.002), 700.0)
    return {"timestep": torch.full((batch,), 0.25 * math.log(ratio))}


def skip_shapes(widths: Sequence[int], layers: int = 2) -> list[tuple[int, int, int]]:
    """Shape of every skip connection: of the first convolution, then of each layer and downsampler."""
    shapes = [(widths[0], SIDE, SIDE)]
    for level, width in enumerate(widths):
        side = SIDE >> level
        shapes += [(width, side, side)] * layers
        if level < len(widths) - 1:
            shapes.append((width, side // 2, side // 2))
    return shapes


def controlnet(seed: int, batch: int) -> dict[str, Any]:
    """What a ControlNet adds to every skip connection and to the middle."""
    draw = Draw(seed, batch)
    shapes = skip_shapes(IMAGE_WIDTHS)
    return {
        "down_block_additional_residuals": tuple(draw(*shape, scale=0.5) for shape in shapes),
        "mid_block_additional_residual": draw(*shapes[-1], scale=0.5),
    }


def motion_controlnet(seed: int, batch: int) -> dict[str, Any]:
    """What a ControlNet adds to a video, frames in the batch ``[B * 3, C, H, W]``."""
    draw = Draw(seed, batch)
    shapes = skip_shapes(MOTION_WIDTHS)
    return {
        "down_block_additional_residuals": tuple(draw(FRAMES, *shape, scale=0.5).flatten(0, 1) for shape in shapes),
        "mid_block_additional_residual": draw(FRAMES, *shapes[-1], scale=0.5).flatten(0, 1),
    }


def adapter(*shapes: tuple[int, int, int]) -> Inputs:
    """Make the list that a T2I adapter passes. Forward empties the list, so draw another for every call."""

    def residuals(seed: int, batch: int) -> dict[str, Any]:
        draw = Draw(seed, batch)
        return {"down_intrablock_additional_residuals": [draw(*shape, scale=0.5) for shape in shapes]}

    return residuals


_UNETS = [
    Case("unet-sd", build_sd, sd_inputs, discrete, (), control=controlnet),
    Case("unet-sdxl", build_sdxl, sdxl_inputs, discrete, (), control=controlnet),
    Case("unet-motion", build_motion, motion_inputs, discrete, (), control=motion_controlnet),
    Case("unet-svd", build_svd, svd_inputs, log_noise, ()),
]
UNETS: dict[str, Case] = {case.name: case for case in _UNETS}
ADAPTER_CONTROL: dict[str, Inputs] = {
    # Before the downsampler with cross attention, after it without. SDXL's last one is for the middle.
    "unet-sd": adapter((16, 8, 8), (24, 4, 4), (32, 2, 2)),
    "unet-sdxl": adapter((16, 4, 4), (24, 4, 4), (32, 2, 2), (32, 2, 2)),
}
