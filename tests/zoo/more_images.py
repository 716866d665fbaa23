"""Tiny image denoisers beyond those that every strategy runs on: one row per class of diffusers."""

from __future__ import annotations

import torch
from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina

from .case import discrete, thousands, unit
from .draw import Draw
from .packed_models import grid_ids
from .rows import HEADS, SIDE, TEXT, TOKENS, WIDTH, called, full, row

ROPE = {"axes_dims_rope": (4, 4, 8)}
PICTURE = 8  # latents [B, 4, 8, 8]


def packed(draw: Draw, batch: int, channels: int = 4) -> dict[str, torch.Tensor]:
    """Packed latents and text."""
    return {"hidden_states": draw(TOKENS, channels), "encoder_hidden_states": draw(TEXT, 16)}


def packed_ids(draw: Draw, batch: int) -> dict[str, torch.Tensor]:
    """Packed latents, text, and the positions of both."""
    return {**packed(draw, batch), "img_ids": grid_ids(), "txt_ids": torch.zeros(TEXT, 3)}


def picture(draw: Draw, batch: int) -> dict[str, torch.Tensor]:
    """Latents and text."""
    return {"hidden_states": draw(4, PICTURE, PICTURE), "encoder_hidden_states": draw(TEXT, 16)}


def sized_picture(draw: Draw, batch: int) -> dict[str, torch.Tensor]:
    """Latents, text, and the sizes that SDXL and its followers are told."""
    size = torch.full((batch, 2), 64.0)
    return {**picture(draw, batch), "original_size": size, "target_size": size, "crop_coords": torch.zeros(batch, 2)}


def positions(rows: int = TEXT, side: int = SIDE) -> torch.Tensor:
    """Positions ``[rows + side * side, 3]`` of text and then of an image."""
    return torch.cat([torch.zeros(rows, 3), grid_ids()])


def ideogram(draw: Draw, batch: int) -> dict[str, torch.Tensor]:
    """Text and image in one sequence, each silent where the other speaks."""
    rows = TEXT + TOKENS
    role = torch.tensor([3] * TEXT + [2] * TOKENS).expand(batch, rows)
    return {
        "hidden_states": draw(rows, 4),
        "encoder_hidden_states": draw(rows, 16),
        "position_ids": positions().long().expand(batch, rows, 3),
        "segment_ids": torch.ones(batch, rows, dtype=torch.long),
        "indicator": role,
    }


def omnigen(draw: Draw, batch: int) -> dict[str, object]:
    """Latents behind a prompt of six words and a time token."""
    rows = TEXT + 1 + TOKENS
    return {
        "hidden_states": draw(4, PICTURE, PICTURE),
        "input_ids": torch.arange(TEXT).expand(batch, TEXT),
        "input_img_latents": [],
        "input_image_sizes": {},
        "attention_mask": torch.ones(batch, rows, rows),
        "position_ids": torch.arange(rows).expand(batch, rows),
    }


FLUX_LIKE = {**HEADS, **ROPE, "num_layers": 2, "num_single_layers": 3, "joint_attention_dim": 16, "in_channels": 4}
NEXT_SIZES = {
    "hidden_size": WIDTH, "num_layers": 4, "num_attention_heads": 2, "in_channels": 4,
}  # fmt: skip

MORE_IMAGES = [
    row(
        "BriaTransformer2DModel", called("timestep", 1000), packed_ids,
        **{**FLUX_LIKE, "axes_dims_rope": [4, 4, 8]},
    ),
    row(
        "BriaFiboTransformer2DModel", called("timestep", 1000),
        lambda d, b: {**packed_ids(d, b), "text_encoder_layers": [d(TEXT, 8) for _ in range(5)]},
        **{**FLUX_LIKE, "axes_dims_rope": [4, 4, 8]}, text_encoder_dim=8,
    ),
    row(
        "BriaFibo2Transformer2DModel", unit,
        lambda d, b: {"hidden_states": d(4, PICTURE, PICTURE), "encoder_hidden_states": d(2, TEXT, 16)},
        in_channels=4, dim=WIDTH, n_layers=4, n_refiner_layers=1, n_heads=2, cap_feat_dim=16, injection_layer_ids=(1,),
        perceiver_num_layers=1, min_num_gist_tokens=4, max_num_gist_tokens=8, gist_step=4, gist_min_text_len=4,
        gist_max_text_len=16, axes_dims=(4, 6, 6), axes_lens=(32, 16, 16),
    ),
    row(
        "CogView3PlusTransformer2DModel", discrete, sized_picture,
        **HEADS, in_channels=4, out_channels=4, num_layers=4, text_embed_dim=16, time_embed_dim=16, condition_dim=8,
        pos_embed_max_size=8, sample_size=8,
    ),
    row(
        "ErnieImageTransformer2DModel", thousands,
        lambda d, b: {
            "hidden_states": d(4, SIDE, SIDE), "text_bth": d(TEXT, 16), "text_lens": torch.full((b,), TEXT)
        },
        hidden_size=WIDTH, num_attention_heads=2, num_layers=4, ffn_hidden_size=48, in_channels=4, out_channels=4,
        text_in_dim=16, rope_axes_dim=(4, 6, 6),
    ),
    row(
        "Flux3Transformer2DModel", unit,
        lambda d, b: {**packed(d, b), "img_ids": grid_ids(4), "txt_ids": torch.zeros(TEXT, 4)},
        **HEADS, in_channels=4, cond_in_channels=4, num_layers=2, num_single_layers=3, joint_attention_dim=16,
        timestep_channels=16, axes_dims_rope=(4, 4, 4, 4),
    ),
    row(
        "GlmImageTransformer2DModel", discrete,
        lambda d, b: {
            **picture(d, b), "prior_token_id": torch.arange(TOKENS).expand(b, TOKENS),
            "prior_token_drop": torch.zeros(b, TOKENS, dtype=torch.bool), "target_size": torch.full((b, 2), 64.0),
            "crop_coords": torch.zeros(b, 2),
        },
        **HEADS, in_channels=4, out_channels=4, num_layers=4, text_embed_dim=16, time_embed_dim=16, condition_dim=8,
        prior_vq_quantizer_codebook_size=32,
    ),
    row(
        "HiDreamImageTransformer2DModel", called("timesteps", 1000),
        lambda d, b: {
            "hidden_states": d(4, PICTURE, PICTURE), "encoder_hidden_states_t5": d(TEXT, 16),
            "encoder_hidden_states_llama3": d(4, TEXT, 16).transpose(0, 1), "pooled_embeds": d(8),
        },
        **HEADS, patch_size=2, in_channels=4, out_channels=4, num_layers=2, num_single_layers=3,
        caption_channels=[16, 16], text_emb_dim=8, axes_dims_rope=(4, 6, 6), max_resolution=(8, 8),
        llama_layers=[0, 1, 2, 3, 3], force_inference_output=True,
    ),
    row(
        "HunyuanImageTransformer2DModel", thousands,
        lambda d, b: {
            "hidden_states": d(4, SIDE, SIDE), "encoder_hidden_states": d(TEXT, 16), "encoder_attention_mask": full(b)
        },
        **HEADS, in_channels=4, out_channels=4, num_layers=2, num_single_layers=3, num_refiner_layers=1,
        text_embed_dim=16, rope_axes_dim=(8, 8),
    ),
    row(
        "Ideogram4Transformer2DModel", called("timestep", ascending=True), ideogram,
        **HEADS, in_channels=4, num_layers=4, intermediate_size=48, adaln_dim=16, llm_features_dim=16,
        mrope_section=(4, 2, 2),
    ),
    row(
        "Kandinsky5Transformer3DModel", thousands,
        lambda d, b: {
            "hidden_states": d(1, PICTURE, PICTURE, 4), "encoder_hidden_states": d(TEXT, 16),
            "pooled_projections": d(8), "visual_rope_pos": tuple(map(torch.arange, (1, SIDE, SIDE))),
            "text_rope_pos": torch.arange(TEXT),
        },
        in_text_dim=16, in_text_dim2=8, time_dim=16, model_dim=WIDTH, ff_dim=48, num_text_blocks=1,
        num_visual_blocks=4, axes_dims=(4, 6, 6),
    ),
    row(
        "Krea2Transformer2DModel", unit,
        lambda d, b: {
            "hidden_states": d(TOKENS, 4), "encoder_hidden_states": d(TEXT, 2, 16), "position_ids": positions()
        },
        **HEADS, in_channels=4, num_layers=4, num_key_value_heads=1, intermediate_size=48, timestep_embed_dim=16,
        text_hidden_dim=16, num_text_layers=2, text_num_attention_heads=2, text_num_key_value_heads=2,
        text_intermediate_size=24, num_layerwise_text_blocks=1, num_refiner_text_blocks=1, axes_dims_rope=(4, 6, 6),
    ),
    row(
        "LongCatImageTransformer2DModel", unit, packed_ids,
        **{**FLUX_LIKE, "axes_dims_rope": [4, 4, 8]}, pooled_projection_dim=16,
    ),
    row(
        "LuminaNextDiT2DModel", called("timestep", ascending=True),
        lambda d, b: {
            **picture(d, b), "encoder_mask": torch.ones(b, TEXT), "cross_attention_kwargs": {},
            "image_rotary_emb": get_2d_rotary_pos_embed_lumina(16, SIDE, SIDE),
        },
        **NEXT_SIZES, num_kv_heads=1, sample_size=PICTURE, multiple_of=16, cross_attention_dim=16,
    ),
    row(
        "NucleusMoEImageTransformer2DModel", unit,
        lambda d, b: {
            **packed(d, b, 16), "img_shapes": [(1, SIDE, SIDE)] * b, "encoder_hidden_states_mask": full(b)
        },
        **HEADS, in_channels=16, out_channels=4, num_layers=5, joint_attention_dim=16, axes_dims_rope=(4, 6, 6),
        mlp_ratio=12.0, num_experts=2, moe_intermediate_dim=16, capacity_factors=[2.0] * 5,
    ),
    row(
        "OmniGenTransformer2DModel", called("timestep", ascending=True), omnigen,
        slow_time=False, **NEXT_SIZES, num_key_value_heads=2, intermediate_size=48, pad_token_id=0, vocab_size=16,
        max_position_embeddings=64, original_max_position_embeddings=64, pos_embed_max_size=8, time_step_dim=16,
        rope_scaling={"short_factor": [1.0] * 8, "long_factor": [1.0] * 8, "type": "su"},
    ),
    row(
        "OvisImageTransformer2DModel", unit, packed_ids, **{**FLUX_LIKE, "out_channels": 4},
    ),
    row(
        "PRXTransformer2DModel", unit, picture,
        in_channels=4, context_in_dim=16, hidden_size=WIDTH, num_heads=2, depth=4, axes_dim=[8, 8],
    ),
    row(
        "QwenImage21Transformer2DModel", unit,
        lambda d, b: {
            "hidden_states": d(TOKENS, 16), "encoder_hidden_states": d(TEXT, 16), "img_shapes": [[(1, SIDE, SIDE)]] * b,
            "img_mask": torch.tensor([False] * TEXT + [True] * (TOKENS // 4)).expand(b, -1),
        },
        **HEADS, in_channels=16, out_channels=4, num_layers=4, context_in_dim=16, axes_dims_rope=(4, 6, 6),
    ),
    row(
        "Transformer2DModel", lambda sigma, batch: {"timestep": torch.tensor(round(999 * sigma))}, picture,
        **HEADS, in_channels=4, out_channels=4, num_layers=4, norm_num_groups=2, cross_attention_dim=16,
        norm_type="ada_norm", num_embeds_ada_norm=1000,
    ),
    row(
        "DreamLiteTransformer2DModel", discrete, picture,
        **HEADS, in_channels=4, out_channels=4, num_layers=4, norm_num_groups=2, cross_attention_dim=16,
    ),
    row(
        "PriorTransformer", discrete,
        lambda d, b: {"hidden_states": d(16), "proj_embedding": d(16), "encoder_hidden_states": d(TEXT, 16)},
        **HEADS, num_layers=4, embedding_dim=16, num_embeddings=TEXT,
    ),
]  # fmt: skip
