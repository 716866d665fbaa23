"""Tiny audio denoisers: 8 frames of sound, one row per class of diffusers."""

from __future__ import annotations

import torch
from diffusers.models.embeddings import get_1d_rotary_pos_embed

from .case import thousands, unit
from .draw import Draw
from .rows import HEADS, TEXT, WIDTH, full, row

FRAMES = 8


def ace_step(draw: Draw, batch: int) -> dict[str, torch.Tensor]:
    """Latents, the latents that they are conditioned on, and text; no jump in time."""
    return {
        "hidden_states": draw(FRAMES, 4),
        "context_latents": draw(FRAMES, 8),
        "encoder_hidden_states": draw(TEXT, 16),
        "timestep_r": torch.zeros(batch),
    }


MORE_SOUNDS = [
    row(
        "AceStepTransformer1DModel", unit, ace_step,
        hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, in_channels=12, audio_acoustic_hidden_dim=4, sliding_window=2, encoder_hidden_size=16,
    ),
    row(
        "LongCatAudioDiTTransformer", unit,
        lambda d, b: {
            "hidden_states": d(FRAMES, 4), "encoder_hidden_states": d(TEXT, 16), "encoder_attention_mask": full(b),
            "latent_cond": d(FRAMES, 4),
        },
        dit_dim=WIDTH, dit_depth=4, dit_heads=2, dit_text_dim=16, latent_dim=4,
    ),
    row(
        "MiniMaxMusic3Transformer1DModel", unit,
        lambda d, b: {"hidden_states": d(4, FRAMES), "encoder_hidden_states": d(FRAMES, 16)},
        **HEADS, in_channels=4, condition_dim=16, num_layers=4, ff_inner_dim=48, rotary_dim=8,
        fourier_embedding_dim=16,
    ),
    row(
        "StableAudioDiTModel", thousands,
        lambda d, b: {
            "hidden_states": d(4, FRAMES), "encoder_hidden_states": d(TEXT, 16), "global_hidden_states": d(1, 16),
            "rotary_embedding": get_1d_rotary_pos_embed(8, FRAMES + 1, use_real=True, repeat_interleave_real=False),
        },
        **HEADS, sample_size=FRAMES, in_channels=4, out_channels=4, num_layers=4, num_key_value_attention_heads=2,
        cross_attention_dim=16, time_proj_dim=16, global_states_input_dim=16, cross_attention_input_dim=16,
    ),
    row(
        "StableAudio3DiTModel", unit,
        lambda d, b: {
            "hidden_states": d(4, FRAMES), "encoder_hidden_states": d(TEXT, 16), "global_hidden_states": d(16)
        },
        io_channels=4, embed_dim=WIDTH, depth=4, num_heads=2, cond_token_dim=16, global_cond_dim=16,
        local_add_cond_dim=5, timestep_features_dim=16, num_memory_tokens=2,
    ),
]  # fmt: skip
