"""Tiny video denoisers: a few latent frames of 4 tokens each, and a different number of text tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from diffusers import (
    AllegroTransformer3DModel,
    CogVideoXTransformer3DModel,
    HunyuanVideoTransformer3DModel,
    LatteTransformer3DModel,
    LTX2VideoTransformer3DModel,
    LTXVideoTransformer3DModel,
    MochiTransformer3DModel,
    SkyReelsV2Transformer3DModel,
    WanTransformer3DModel,
    WanVACETransformer3DModel,
)
from torch import nn

from .case import Case, ascending_thousands, discrete, thousands
from .draw import Draw, settle

WIDTH = 32
TEXT = 6
FRAMES = 3
FRAME_TOKENS = 4
WAN_SIZES = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 16,
    "ffn_dim": 48,
    "num_layers": 4,
    "rope_max_seq_len": 32,
}


def text_video(seed: int, batch: int) -> dict[str, Any]:
    """Latents ``[B, 4, 3, 4, 4]`` (channels, frames, height, width) and text."""
    draw = Draw(seed, batch)
    return {"hidden_states": draw(4, FRAMES, 4, 4), "encoder_hidden_states": draw(TEXT, 16)}


def build_wan() -> nn.Module:
    """Wan 2.1: cross attention to text."""
    return settle(WanTransformer3DModel(**WAN_SIZES))


def first_frame_given(sigma: float, batch: int) -> dict[str, Any]:
    """One timestep per token, zero for the tokens of a given first frame: Wan 2.2 TI2V."""
    timestep = torch.full((batch, FRAMES, FRAME_TOKENS), 1000.0 * sigma)
    timestep[:, 0] = 0
    return {"timestep": timestep.flatten(1)}


def build_wan_vace() -> nn.Module:
    """Wan VACE: a side branch makes hints that are added after blocks 0 and 2."""
    model = WanVACETransformer3DModel(**WAN_SIZES, vace_layers=[0, 2], vace_in_channels=6)
    return settle(model)


def wan_vace_inputs(seed: int, batch: int) -> dict[str, Any]:
    """Latents, text and the control video ``[B, 6, 3, 4, 4]``."""
    return {**text_video(seed, batch), **vace_control(seed + 1000, batch)}


def vace_control(seed: int, batch: int) -> dict[str, Any]:
    """A control video ``[B, 6, 3, 4, 4]``."""
    return {"control_hidden_states": Draw(seed, batch)(6, FRAMES, 4, 4)}


def build_skyreels() -> nn.Module:
    """SkyReels-V2: Wan with one timestep per frame under diffusion forcing."""
    return settle(SkyReelsV2Transformer3DModel(**WAN_SIZES))


def staggered(sigma: float, batch: int) -> dict[str, Any]:
    """One timestep per frame, each frame 0.1 noisier than the one before: diffusion forcing."""
    levels = torch.tensor([min(1.0, sigma + 0.1 * frame) for frame in range(FRAMES)])
    return {"timestep": 1000 * levels.expand(batch, FRAMES), "enable_diffusion_forcing": True}


def build_hunyuanvideo() -> nn.Module:
    """HunyuanVideo: double and single blocks that both return (video, text)."""
    model = HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=2,
        num_single_layers=3, num_refiner_layers=1, patch_size=2, text_embed_dim=16, pooled_projection_dim=16,
        rope_axes_dim=(4, 6, 6),
    )  # fmt: skip
    return settle(model)


def hunyuanvideo_inputs(seed: int, batch: int) -> dict[str, Any]:
    """Latents, text with its mask (the last token is padding), pooled text and guidance."""
    mask = torch.ones(batch, TEXT, dtype=torch.bool)
    mask[:, -1] = False
    return {
        **text_video(seed, batch),
        "encoder_attention_mask": mask,
        "pooled_projections": Draw(seed + 1000, batch)(16),
        "guidance": torch.full((batch,), 6000.0),
    }


def build_ltx() -> nn.Module:
    """LTX-Video: packed tokens, cross attention to text."""
    model = LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_layers=4, num_attention_heads=2, attention_head_dim=16,
        cross_attention_dim=WIDTH, caption_channels=16,
    )  # fmt: skip
    return settle(model)


def ltx_inputs(seed: int, batch: int) -> dict[str, Any]:
    """Packed latents ``[B, 12, 8]`` of 3 frames of 2 x 2 tokens, and text."""
    draw = Draw(seed, batch)
    return {
        "hidden_states": draw(FRAMES * FRAME_TOKENS, 8),
        "encoder_hidden_states": draw(TEXT, 16),
        "encoder_attention_mask": torch.ones(batch, TEXT),
        "num_frames": FRAMES,
        "height": 2,
        "width": 2,
    }


def build_ltx2() -> nn.Module:
    """LTX-2: a video and an audio stream through the same blocks."""
    model = LTX2VideoTransformer3DModel(
        in_channels=8, out_channels=8, num_layers=4, num_attention_heads=2, attention_head_dim=16,
        cross_attention_dim=WIDTH, audio_in_channels=8, audio_out_channels=8, audio_num_attention_heads=2,
        audio_attention_head_dim=8, audio_cross_attention_dim=16, caption_channels=16, rope_double_precision=False,
        vae_scale_factors=(8, 4, 4),
    )  # fmt: skip
    return settle(model)


def ltx2_inputs(seed: int, batch: int) -> dict[str, Any]:
    """Video tokens ``[B, 12, 8]``, audio tokens ``[B, 5, 8]`` and a text for each."""
    draw = Draw(seed, batch)
    return {
        "hidden_states": draw(FRAMES * FRAME_TOKENS, 8),
        "audio_hidden_states": draw(5, 8),
        "encoder_hidden_states": draw(TEXT, 16),
        "audio_encoder_hidden_states": draw(TEXT, 16),
        "num_frames": FRAMES,
        "height": 2,
        "width": 2,
        "audio_num_frames": 5,
    }


def build_cogvideox() -> nn.Module:
    """CogVideoX: joint attention, blocks return (video, text)."""
    model = CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=8,
        text_embed_dim=16, num_layers=4, sample_width=4, sample_height=4, sample_frames=9, patch_size=2,
        temporal_compression_ratio=4, max_text_seq_length=TEXT,
    )  # fmt: skip
    return settle(model)


def cogvideox_inputs(seed: int, batch: int) -> dict[str, Any]:
    """Latents ``[B, 3, 4, 4, 4]`` (frames before channels) and text."""
    draw = Draw(seed, batch)
    return {"hidden_states": draw(FRAMES, 4, 4, 4), "encoder_hidden_states": draw(TEXT, 16)}


def build_mochi() -> nn.Module:
    """Mochi: the last block has no text output; time runs upwards."""
    model = MochiTransformer3DModel(
        patch_size=2, num_attention_heads=2, attention_head_dim=16, num_layers=4, pooled_projection_dim=16,
        in_channels=4, text_embed_dim=16, time_embed_dim=16, max_sequence_length=TEXT,
    )  # fmt: skip
    return settle(model)


def mochi_inputs(seed: int, batch: int) -> dict[str, Any]:
    """Latents and text of full length."""
    return {**text_video(seed, batch), "encoder_attention_mask": torch.ones(batch, TEXT, dtype=torch.bool)}


def build_latte(out_channels: int = 4) -> nn.Module:
    """Latte: spatial and temporal blocks alternate, with a reshape between them."""
    model = LatteTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=out_channels, num_layers=2,
        cross_attention_dim=WIDTH, attention_bias=True, sample_size=4, patch_size=2,
        activation_fn="gelu-approximate", num_embeds_ada_norm=1000, norm_type="ada_norm_single",
        norm_elementwise_affine=False, caption_channels=16, video_length=FRAMES,
    )  # fmt: skip
    return settle(model)


def build_allegro() -> nn.Module:
    """Allegro: cross attention to text, one shared AdaLN."""
    model = AllegroTransformer3DModel(
        num_attention_heads=2, attention_head_dim=24, in_channels=4, out_channels=4, num_layers=4,
        cross_attention_dim=48, sample_height=4, sample_width=4, sample_frames=FRAMES, caption_channels=16,
    )  # fmt: skip
    return settle(model)


WAN = Case("wan", build_wan, text_video, thousands, ("blocks",))
SKYREELS = Case("skyreels_v2", build_skyreels, text_video, thousands, ("blocks",))
VIDEO_CASES = [
    WAN,
    replace(WAN, name="wan_ti2v", time=first_frame_given),
    Case("wan_vace", build_wan_vace, wan_vace_inputs, thousands, ("blocks",), control=vace_control),
    SKYREELS,
    replace(SKYREELS, name="skyreels_v2_df", time=staggered),
    Case(
        "hunyuanvideo", build_hunyuanvideo, hunyuanvideo_inputs, thousands,
        ("transformer_blocks", "single_transformer_blocks"),
    ),
    Case("ltx", build_ltx, ltx_inputs, thousands, ("transformer_blocks",)),
    Case("ltx2", build_ltx2, ltx2_inputs, thousands, ("transformer_blocks",)),
    Case("cogvideox", build_cogvideox, cogvideox_inputs, discrete, ("transformer_blocks",)),
    Case("mochi", build_mochi, mochi_inputs, ascending_thousands, ("transformer_blocks",)),
    Case("latte", build_latte, text_video, discrete, ("transformer_blocks", "temporal_transformer_blocks")),
    Case("allegro", build_allegro, text_video, discrete, ("transformer_blocks",)),
]  # fmt: skip
