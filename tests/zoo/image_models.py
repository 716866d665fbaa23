"""Tiny image denoisers on latents ``[B, C, H, W]``: 16 image tokens (Z-Image: 64) and 6 text tokens, width 32."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AuraFlowTransformer2DModel,
    CogView4Transformer2DModel,
    DiTTransformer2DModel,
    HunyuanDiT2DModel,
    Lumina2Transformer2DModel,
    PixArtTransformer2DModel,
    SanaTransformer2DModel,
    SD3Transformer2DModel,
    ZImageTransformer2DModel,
)
from torch import nn

from .case import Case, ascending_unit, discrete, thousands, unit
from .draw import Draw, settle
from .packed_models import SIDE, TEXT, WIDTH, residuals

ONE_LIST = ("transformer_blocks",)


def build_dit() -> nn.Module:
    """Class-conditional DiT; 8 output channels because it also predicts a variance."""
    model = DiTTransformer2DModel(
        sample_size=8, num_layers=4, patch_size=2, num_attention_heads=2, attention_head_dim=16, in_channels=4,
        out_channels=8,
    )  # fmt: skip
    return settle(model)


def dit_inputs(seed: int, batch: int) -> dict[str, Any]:
    """Latents ``[B, 4, 8, 8]`` and one class per sample."""
    return {
        "hidden_states": Draw(seed, batch)(4, 8, 8),
        "class_labels": torch.tensor([(seed + row) % 10 for row in range(batch)]),
    }


def build_pixart() -> nn.Module:
    """PixArt-Sigma: cross attention to text, one shared AdaLN."""
    model = PixArtTransformer2DModel(
        sample_size=8, num_layers=4, patch_size=2, num_attention_heads=2, attention_head_dim=16, in_channels=4,
        out_channels=8, cross_attention_dim=WIDTH, caption_channels=16, use_additional_conditions=False,
    )  # fmt: skip
    return settle(model)


def pixart_inputs(seed: int, batch: int) -> dict[str, Any]:
    """Latents ``[B, 4, 8, 8]`` and text."""
    draw = Draw(seed, batch)
    return {
        "hidden_states": draw(4, 8, 8),
        "encoder_hidden_states": draw(TEXT, 16),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def build_sd3() -> nn.Module:
    """SD3: the last block drops its text stream and returns (None, image)."""
    model = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=4, num_attention_heads=2,
        attention_head_dim=16, joint_attention_dim=16, caption_projection_dim=WIDTH, pooled_projection_dim=16,
        pos_embed_max_size=8, qk_norm="rms_norm",
    )  # fmt: skip
    return settle(model)


def sd3_inputs(seed: int, batch: int) -> dict[str, Any]:
    """Latents ``[B, 4, 8, 8]``, text and pooled text."""
    draw = Draw(seed, batch)
    return {
        "hidden_states": draw(4, 8, 8),
        "encoder_hidden_states": draw(TEXT, 16),
        "pooled_projections": draw(16),
    }


def build_cogview4() -> nn.Module:
    """CogView4: joint attention, blocks return (image, text)."""
    model = CogView4Transformer2DModel(
        patch_size=2, in_channels=4, out_channels=4, num_layers=4, num_attention_heads=2, attention_head_dim=16,
        text_embed_dim=16, time_embed_dim=16, condition_dim=8, pos_embed_max_size=8, sample_size=8,
        rope_axes_dim=(8, 8),
    )  # fmt: skip
    return settle(model)


def cogview4_inputs(seed: int, batch: int) -> dict[str, Any]:
    """Latents ``[B, 4, 8, 8]``, text and the size conditions."""
    draw = Draw(seed, batch)
    size = torch.full((batch, 2), 64.0)
    return {
        "hidden_states": draw(4, 8, 8),
        "encoder_hidden_states": draw(TEXT, 16),
        "original_size": size,
        "target_size": size,
        "crop_coords": torch.zeros(batch, 2),
    }


def build_sana() -> nn.Module:
    """Sana: linear attention and convolutional MLPs."""
    model = SanaTransformer2DModel(
        in_channels=4, out_channels=4, num_layers=4, num_attention_heads=2, attention_head_dim=16,
        num_cross_attention_heads=2, cross_attention_head_dim=16, cross_attention_dim=WIDTH, caption_channels=16,
        sample_size=SIDE,
    )  # fmt: skip
    return settle(model)


def sana_inputs(seed: int, batch: int) -> dict[str, Any]:
    """Latents ``[B, 4, 4, 4]`` and text."""
    draw = Draw(seed, batch)
    return {"hidden_states": draw(4, SIDE, SIDE), "encoder_hidden_states": draw(TEXT, 16)}


def build_lumina2() -> nn.Module:
    """Lumina2: refiners of one block each, then one joined stream; time runs upwards."""
    model = Lumina2Transformer2DModel(
        sample_size=8, in_channels=4, hidden_size=WIDTH, num_layers=4, num_refiner_layers=1, num_attention_heads=2,
        num_kv_heads=1, multiple_of=16, axes_dim_rope=(4, 6, 6), axes_lens=(32, 16, 16), cap_feat_dim=16,
    )  # fmt: skip
    return settle(model, slow_time=False)


def lumina2_inputs(seed: int, batch: int) -> dict[str, Any]:
    """Latents ``[B, 4, 8, 8]`` and text of full length."""
    draw = Draw(seed, batch)
    return {
        "hidden_states": draw(4, 8, 8),
        "encoder_hidden_states": draw(TEXT, 16),
        "encoder_attention_mask": torch.ones(batch, TEXT, dtype=torch.bool),
    }


def build_z_image() -> nn.Module:
    """Z-Image: takes and returns lists of samples; pads each stream to a multiple of 32 tokens."""
    model = ZImageTransformer2DModel(
        in_channels=4, dim=WIDTH, n_layers=4, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=16,
        axes_dims=[4, 6, 6], axes_lens=[128, 16, 16],
    )  # fmt: skip
    return settle(model)


def z_image_inputs(seed: int, batch: int) -> dict[str, Any]:
    """A list of latents ``[4, 1, 16, 16]`` and a list of texts ``[6, 16]``."""
    draw = Draw(seed, batch)
    return {"x": list(draw(4, 1, 16, 16)), "cap_feats": list(draw(TEXT, 16))}


def z_image_control(seed: int, batch: int) -> dict[str, Any]:
    """Residuals by layer for the joined stream of 64 image and 32 (padded) text tokens."""
    draw = Draw(seed, batch)
    return {"controlnet_block_samples": {layer: draw(96, WIDTH, scale=0.5) for layer in (0, 2)}}


def build_auraflow() -> nn.Module:
    """AuraFlow: joint blocks return (text, image), single blocks one joined stream with 8 register tokens."""
    model = AuraFlowTransformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_mmdit_layers=2, num_single_dit_layers=3,
        num_attention_heads=2, attention_head_dim=16, joint_attention_dim=16, caption_projection_dim=WIDTH,
        pos_embed_max_size=16,
    )  # fmt: skip
    return settle(model)


def text_latents(seed: int, batch: int) -> dict[str, Any]:
    """Latents ``[B, 4, 8, 8]`` and text."""
    draw = Draw(seed, batch)
    return {"hidden_states": draw(4, 8, 8), "encoder_hidden_states": draw(TEXT, 16)}


def build_hunyuandit() -> nn.Module:
    """HunyuanDiT: a U shape, the second half takes the outputs of the first as a ``skip`` argument."""
    model = HunyuanDiT2DModel(
        num_attention_heads=2, attention_head_dim=16, hidden_size=WIDTH, in_channels=4, patch_size=2, sample_size=8,
        num_layers=6, cross_attention_dim=16, cross_attention_dim_t5=16, pooled_projection_dim=16, text_len=TEXT,
        text_len_t5=TEXT - 1, activation_fn="gelu-approximate",
    )  # fmt: skip
    return settle(model)


def hunyuandit_inputs(seed: int, batch: int) -> dict[str, Any]:
    """Latents ``[B, 4, 8, 8]``, two texts with their masks, size and style."""
    draw = Draw(seed, batch)
    return {
        "hidden_states": draw(4, 8, 8),
        "encoder_hidden_states": draw(TEXT, 16),
        "encoder_hidden_states_t5": draw(TEXT - 1, 16),
        "text_embedding_mask": torch.ones(batch, TEXT),
        "text_embedding_mask_t5": torch.ones(batch, TEXT - 1),
        "image_meta_size": torch.full((batch, 6), 64.0),
        "style": torch.zeros(batch, dtype=torch.long),
    }


IMAGE_CASES = [
    Case("dit", build_dit, dit_inputs, discrete, ONE_LIST),
    Case("pixart", build_pixart, pixart_inputs, discrete, ONE_LIST),
    Case(
        "sd3", build_sd3, sd3_inputs, thousands, ONE_LIST,
        control=lambda seed, batch: {"block_controlnet_hidden_states": residuals(Draw(seed, batch), 2)},
    ),
    Case("cogview4", build_cogview4, cogview4_inputs, discrete, ONE_LIST),
    Case(
        "sana", build_sana, sana_inputs, thousands, ONE_LIST,
        control=lambda seed, batch: {"controlnet_block_samples": residuals(Draw(seed, batch), 2)},
    ),
    Case("lumina2", build_lumina2, lumina2_inputs, ascending_unit, ("layers",)),
    Case(
        "z_image", build_z_image, z_image_inputs, lambda sigma, batch: {"t": torch.full((batch,), 1.0 - sigma)},
        ("layers",), control=z_image_control,
    ),
    Case("auraflow", build_auraflow, text_latents, unit, ("joint_transformer_blocks", "single_transformer_blocks")),
    Case("hunyuandit", build_hunyuandit, hunyuandit_inputs, thousands, ("blocks",)),
]  # fmt: skip
