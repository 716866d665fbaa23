"""Tiny UNets beyond those that every UNet strategy runs on: one row per class of diffusers."""

from __future__ import annotations

import torch

from .case import discrete
from .draw import Draw
from .rows import TEXT, WIDTH, called, row
from .unet_models import FRAMES, SIDE

TWO_LEVELS = {"block_out_channels": (16, 32), "layers_per_block": 2, "norm_num_groups": 4}
VIDEO_LEVELS = {
    **TWO_LEVELS, "cross_attention_dim": 16, "attention_head_dim": 8,
    "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"), "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
}  # fmt: skip


def picture(draw: Draw, batch: int) -> dict[str, torch.Tensor]:
    """Latents ``[B, 4, 8, 8]`` and text."""
    return {"sample": draw(4, SIDE, SIDE), "encoder_hidden_states": draw(TEXT, 16)}


def video(draw: Draw, batch: int) -> dict[str, torch.Tensor]:
    """Latents ``[B, 4, 3, 8, 8]`` and text."""
    return {"sample": draw(4, FRAMES, SIDE, SIDE), "encoder_hidden_states": draw(TEXT, 16)}


MORE_UNETS = [
    row(
        "UNet1DModel", discrete, lambda d, b: {"sample": d(2, 64)},
        sample_size=64, block_out_channels=(32, 32, 64), extra_in_channels=64,
    ),
    row(
        "UNet2DModel", discrete, lambda d, b: {"sample": d(3, SIDE, SIDE)},
        **TWO_LEVELS, sample_size=SIDE, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ),
    row("UNet3DConditionModel", discrete, video, **VIDEO_LEVELS),
    row(
        "I2VGenXLUNet", discrete,
        lambda d, b: {
            **video(d, b), "fps": torch.full((b,), 16), "image_latents": d(4, FRAMES, SIDE, SIDE),
            "image_embeddings": d(16),
        },
        **VIDEO_LEVELS,
    ),
    row(
        "Kandinsky3UNet", discrete, lambda d, b: {**picture(d, b), "encoder_attention_mask": torch.ones(b, TEXT)},
        time_embedding_dim=WIDTH, groups=4, attention_head_dim=8, layers_per_block=2, 
        block_out_channels=(16, 16, 32, 32), cross_attention_dim=16, encoder_hid_dim=16,
    ),
    row(
        "DreamLiteUNetModel", discrete, picture,
        block_out_channels=(16, 32, 32), norm_num_groups=4, cross_attention_dim=16, attention_head_dim=8, ff_mult=2,
    ),
    row(
        "StableCascadeUNet", called("timestep_ratio"),
        lambda d, b: {"sample": d(4, SIDE, SIDE), "clip_text_pooled": d(1, 16)},
        in_channels=4, out_channels=4, timestep_ratio_embedding_dim=16, conditioning_dim=WIDTH,
        block_out_channels=(16, 32), num_attention_heads=(2, 2), down_num_layers_per_block=(1, 2),
        up_num_layers_per_block=(2, 1), clip_text_pooled_in_channels=16, clip_seq=2,
    ),
    row(
        "UVit2DModel", lambda sigma, batch: {},
        lambda d, b: {
            "input_ids": torch.arange(16).reshape(1, 4, 4).expand(b, 4, 4), "encoder_hidden_states": d(TEXT, 16),
            "pooled_text_emb": d(16), "micro_conds": torch.ones(b, 5),
        },
        hidden_size=WIDTH, cond_embed_dim=16, micro_cond_encode_dim=8, micro_cond_embed_dim=40, encoder_hidden_size=16,
        vocab_size=32, codebook_size=24, in_channels=16, block_out_channels=16, num_res_blocks=1, block_num_heads=2,
        num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, sample_size=4,
    ),
]  # fmt: skip
