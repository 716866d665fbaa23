"""Tiny video denoisers beyond those that every strategy runs on: one row per class of diffusers."""

from __future__ import annotations

import torch

from .case import discrete, thousands
from .draw import Draw
from .rows import HEADS, TEXT, WIDTH, full, row
from .video_models import FRAMES, WAN_SIZES

VIDEO = (4, FRAMES, 4, 4)


def text_video(draw: Draw, batch: int) -> dict[str, torch.Tensor]:
    """Latents ``[B, 4, 3, 4, 4]`` and text."""
    return {"hidden_states": draw(*VIDEO), "encoder_hidden_states": draw(TEXT, 16)}


def frame_by_frame(sigma: float, batch: int) -> dict[str, torch.Tensor]:
    """One timestep per frame, all alike."""
    return {"timestep": torch.full((batch, FRAMES), 1000.0 * sigma)}


def minimax_time(sigma: float, batch: int) -> dict[str, torch.Tensor]:
    """The one noise level of the sequence."""
    return {"timestep": torch.tensor([sigma])}


def minimax(draw: Draw, batch: int) -> dict[str, torch.Tensor]:
    """Six words, four places of a video and two of a sound in one sequence."""
    rows = torch.arange(TEXT + 6)
    text, video, audio = rows.split((TEXT, 4, 2))
    return {
        "hidden_states": draw(4, 16),
        "audio_hidden_states": draw(2, 4),
        "encoder_hidden_states": draw(TEXT, 16),
        "timestep_indices": torch.zeros_like(rows),
        "token_tags": torch.tensor([1] * TEXT + [0] * 4 + [2] * 2),
        "position_ids": rows[:, None].expand(-1, 3),
        "video_indices": video,
        "audio_indices": audio,
        "text_indices": text,
    }


def framepack(draw: Draw, batch: int) -> dict[str, torch.Tensor]:
    """A window of three frames behind clean, half-size and quarter-size history."""
    return {
        **text_video(draw, batch),
        "encoder_attention_mask": full(batch),
        "pooled_projections": draw(16),
        "image_embeds": draw(2, 8),
        "indices_latents": torch.arange(20, 23),
        "guidance": torch.full((batch,), 6000.0),
        "latents_clean": draw(4, 2, 4, 4),
        "indices_latents_clean": torch.arange(18, 20),
        "latents_history_2x": draw(4, 2, 4, 4),
        "indices_latents_history_2x": torch.arange(16, 18),
        "latents_history_4x": draw(4, 16, 4, 4),
        "indices_latents_history_4x": torch.arange(16),
    }


def helios(draw: Draw, batch: int) -> dict[str, torch.Tensor]:
    """A window of three frames behind a short, a middle and a long history."""
    return {
        **text_video(draw, batch),
        "indices_hidden_states": torch.arange(19, 22).expand(batch, FRAMES),
        "latents_history_short": draw(4, 1, 4, 4),
        "indices_latents_history_short": torch.tensor([[18]]).expand(batch, 1),
        "latents_history_mid": draw(4, 2, 4, 4),
        "indices_latents_history_mid": torch.arange(16, 18).expand(batch, 2),
        "latents_history_long": draw(4, 16, 4, 4),
        "indices_latents_history_long": torch.arange(16).expand(batch, 16),
    }


def wan_animate_2(draw: Draw, batch: int) -> dict[str, object]:
    """A window of three frames of two by two tokens that reads a reference of two frames from a cache."""
    from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

    cache = WanAnimate2KVCache(2)
    for layer in cache.layer_caches:
        layer.store(draw(8, 2, 16), draw(8, 2, 16))
    return {
        "hidden_states": list(draw(4, FRAMES, 4, 4)),
        "encoder_hidden_states": list(draw(TEXT, 16)),
        "condition_latents": list(draw(2, FRAMES, 4, 4)),
        "kv_cache": cache,
        "kv_cache_mode": "cached",
        "seq_len": 12,
        "reference_grid_sizes": torch.tensor([[2, 2, 2]]).expand(batch, 3),
        "origin_len": 5,
        "origin_area": [32, 32],
    }


HUNYUAN = {**HEADS, "in_channels": 4, "out_channels": 4, "num_refiner_layers": 1, "text_embed_dim": 16,
           "rope_axes_dim": (4, 6, 6)}  # fmt: skip
JOY = {"in_channels": 4, "hidden_size": WIDTH, "num_attention_heads": 2, "text_dim": 16, "num_layers": 4,
       "rope_dim_list": [4, 6, 6]}  # fmt: skip

MORE_VIDEOS = [
    row(
        "AnyFlowTransformer3DModel", frame_by_frame,
        lambda d, b: {
            "hidden_states": d(FRAMES, 4, 4, 4), "encoder_hidden_states": d(TEXT, 16),
            "r_timestep": torch.zeros(b, FRAMES),
        },
        **WAN_SIZES,
    ),
    row(
        "AnyFlowFARTransformer3DModel", frame_by_frame,
        lambda d, b: {
            "hidden_states": d(FRAMES, 4, 4, 4), "encoder_hidden_states": d(TEXT, 16),
            "r_timestep": torch.zeros(b, FRAMES), "chunk_partition": [1, 1, 1],
        },
        **{**WAN_SIZES, "num_layers": 2}, chunk_partition=(1, 1, 1),
    ),
    row("ChronoEditTransformer3DModel", thousands, text_video, **WAN_SIZES),
    row(
        "ConsisIDTransformer3DModel", discrete,
        lambda d, b: {
            "hidden_states": d(FRAMES, 4, 4, 4), "encoder_hidden_states": d(TEXT, 16), "id_cond": d(8),
            "id_vit_hidden": [d(3, 8) for _ in range(2)],
        },
        **HEADS, in_channels=4, out_channels=4, time_embed_dim=8, text_embed_dim=16, num_layers=4, sample_width=4,
        sample_height=4, sample_frames=9, max_text_seq_length=TEXT, is_train_face=True, cross_attn_interval=2,
        cross_attn_dim_head=8, cross_attn_num_heads=2, LFE_id_dim=8, LFE_vit_dim=8, LFE_depth=2, LFE_dim_head=8,
        LFE_num_heads=2, LFE_num_id_token=2, LFE_num_querie=2, LFE_output_dim=21, LFE_ff_mult=1, LFE_num_scale=2,
    ),
    row(
        "CosmosTransformer3DModel", thousands,
        lambda d, b: {**text_video(d, b), "fps": 24},
        **HEADS, in_channels=4, out_channels=4, num_layers=4, text_embed_dim=16, adaln_lora_dim=8, max_size=(4, 8, 8),
        concat_padding_mask=False,
    ),
    row(
        "EasyAnimateTransformer3DModel", thousands, text_video,
        **HEADS, in_channels=4, out_channels=4, patch_size=2, sample_width=4, sample_height=4, num_layers=4,
        mmdit_layers=2, time_embed_dim=16, text_embed_dim=16,
    ),
    row(
        "HeliosTransformer3DModel", thousands, helios,
        **{key: value for key, value in WAN_SIZES.items() if key != "rope_max_seq_len"}, rope_dim=(4, 6, 6),
    ),
    row(
        "HunyuanVideo15Transformer3DModel", thousands,
        lambda d, b: {
            **text_video(d, b), "encoder_attention_mask": full(b), "encoder_hidden_states_2": d(2, 8),
            "encoder_attention_mask_2": torch.ones(b, 2, dtype=torch.bool), "image_embeds": d(2, 8),
        },
        **HUNYUAN, num_layers=4, text_embed_2_dim=8, image_embed_dim=8,
    ),
    row(
        "HunyuanVideoFramepackTransformer3DModel", thousands, framepack,
        **HUNYUAN, num_layers=2, num_single_layers=3, pooled_projection_dim=16, image_condition_type="image",
        has_image_proj=True, image_proj_dim=8, has_clean_x_embedder=True,
    ),
    row("JoyImageEditTransformer3DModel", thousands, text_video, **JOY),
    row(
        "JoyImageEditPlusTransformer3DModel", thousands,
        lambda d, b: {
            "hidden_states": d(8, 4, 1, 2, 2), "encoder_hidden_states": d(TEXT, 16),
            "shape_list": [[(1, 2, 2), (1, 2, 2)]] * b,
        },
        **JOY,
    ),
    row(
        "Kandinsky6Transformer3DModel", thousands,
        lambda d, b: {
            "hidden_states": d(FRAMES, 4, 4, 9), "encoder_hidden_states": d(TEXT, 16), "pooled_projections": d(8),
            "audio_hidden_states": d(5, 4),
        },
        in_visual_dim=4, out_visual_dim=4, in_text_dim=16, in_text_dim2=8, time_dim=16, model_dim=WIDTH, ff_dim=48,
        num_text_blocks=1, num_visual_blocks=4, axes_dims=(4, 6, 6), in_audio_dim=4, out_audio_dim=4,
    ),
    row(
        "Kandinsky6SRTransformer3DModel", thousands, lambda d, b: {"hidden_states": d(1, 8, 8, 9)},
        in_visual_dim=4, out_visual_dim=4, time_dim=16, model_dim=WIDTH, ff_dim=48, num_visual_blocks=4,
        axes_dims=(4, 6, 6),
    ),
    row(
        "MiniMaxH3Transformer3DModel", minimax_time, minimax,
        slow_time=False, **HEADS, hidden_size=WIDTH, num_layers=4, num_refiner_layers=1, ffn_dim=48, in_channels=4,
        audio_in_channels=4, text_dim=16, freq_dim=16, time_embed_hidden_dim=16, time_embed_dim=16, rope_freq_dim=2,
    ),
    row(
        "MotifVideoTransformer3DModel", thousands,
        lambda d, b: {**text_video(d, b), "encoder_attention_mask": full(b)},
        **HEADS, in_channels=4, out_channels=4, num_layers=2, num_single_layers=3, text_embed_dim=16,
        rope_axes_dim=(4, 6, 6),
    ),
    row(
        "SanaVideoTransformer3DModel", thousands, text_video,
        **HEADS, in_channels=4, out_channels=4, num_layers=4, num_cross_attention_heads=2, cross_attention_head_dim=16,
        cross_attention_dim=WIDTH, caption_channels=16, sample_size=4, rope_max_seq_len=32,
    ),
    row(
        "SanaWMLTX2RefinerTransformer3DModel", lambda sigma, batch: {"timestep": torch.full((batch, 12), sigma)},
        lambda d, b: {
            "hidden_states": d(12, 4), "encoder_hidden_states": d(TEXT, 16),
            "video_rotary_emb": (torch.ones(1, 12, WIDTH), torch.zeros(1, 12, WIDTH)),
        },
        slow_time=False, **HEADS, in_channels=4, out_channels=4, num_layers=4, cross_attention_dim=WIDTH,
        caption_channels=16, audio_in_channels=4, audio_out_channels=4, audio_num_attention_heads=2,
        audio_attention_head_dim=8, audio_cross_attention_dim=16,
    ),
    row(
        "SanaWMTransformer3DModel",
        lambda sigma, batch: {"timestep": torch.full((batch, 1, FRAMES), 1000.0 * sigma)},
        lambda d, b: {**text_video(d, b), "encoder_attention_mask": full(b)},
        in_channels=4, num_layers=4, hidden_size=WIDTH, num_attention_heads=2, linear_head_dim=16, caption_channels=16,
        chunk_plucker_post_attn_blocks=4, image_size=64,
    ),
    row(
        "TransformerTemporalModel", thousands, lambda d, b: {"hidden_states": d(FRAMES, 4, 4, 4).flatten(0, 1)},
        **HEADS, in_channels=4, num_layers=4, norm_num_groups=2,
    ),
    row(
        "WanAnimate2Transformer3DModel", thousands, wan_animate_2,
        text_len=TEXT, in_dim=6, dim=WIDTH, ffn_dim=48, freq_dim=16, text_dim=16, out_dim=4, num_heads=2, num_layers=2,
        use_img_emb=False,
    ),
    row(
        "WanAnimateTransformer3DModel", thousands,
        lambda d, b: {
            "hidden_states": d(12, FRAMES, 4, 4), "encoder_hidden_states": d(TEXT, 16),
            "encoder_hidden_states_image": d(2, 8), "pose_hidden_states": d(4, FRAMES - 1, 4, 4),
            "face_pixel_values": d(3, 5, 16, 16),
        },
        **{**WAN_SIZES, "in_channels": 12}, latent_channels=4, image_dim=8, motion_encoder_size=16, motion_style_dim=8,
        motion_dim=4, motion_encoder_dim=8, face_encoder_hidden_dim=16, face_encoder_num_heads=2,
        inject_face_latents_blocks=2, motion_encoder_channel_sizes={"4": 8, "8": 8, "16": 8},
    ),
]  # fmt: skip
