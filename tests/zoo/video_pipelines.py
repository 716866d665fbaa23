"""Tiny video pipelines."""

from __future__ import annotations

from typing import Any

from diffusers import (
    AutoencoderKLWan,
    CogVideoXDDIMScheduler,
    CogVideoXPipeline,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    LTXPipeline,
    MochiPipeline,
    WanPipeline,
    WanVideoToVideoPipeline,
)

from .built import Built, masked_text_embeds, text_embeds
from .draw import Draw, settle
from .video_models import build_cogvideox, build_ltx, build_mochi, build_wan


def video_vae() -> AutoencoderKLWan:
    """Wan's autoencoder: 8 times smaller frames, 4 times fewer of them."""
    model = AutoencoderKLWan(
        base_dim=3, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
    )  # fmt: skip
    return settle(model)


def wan_parts() -> dict[str, Any]:
    """The components that all Wan pipelines share."""
    return {
        "tokenizer": None,
        "text_encoder": None,
        "vae": None,
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0),
        "transformer": build_wan(),
    }


def wan_kwargs() -> dict[str, Any]:
    """A video of 9 frames of 32 x 32, which is 3 latent frames of 4 tokens."""
    return {
        **text_embeds(),
        **text_embeds("negative_", seed=1),
        "height": 32,
        "width": 32,
        "num_frames": 9,
        "guidance_scale": 5.0,
        "output_type": "latent",
    }


def wan() -> Built:
    """Wan 2.1: two calls per step in the cache contexts "cond" and "uncond"."""
    return Built(WanPipeline(**wan_parts()), wan_kwargs(), calls=20)


def wan22() -> Built:
    """Wan 2.2: ``transformer`` makes the first 3 of 10 steps, ``transformer_2`` the others."""
    second = settle(build_wan(), seed=1)
    pipe = WanPipeline(**wan_parts(), transformer_2=second, boundary_ratio=0.875)
    return Built(pipe, wan_kwargs(), denoisers=("transformer", "transformer_2"), calls=20)


def wan_heun() -> Built:
    """Wan with Heun's method: 2 N - 1 evaluations, timesteps repeat."""
    pipe = WanPipeline(**{**wan_parts(), "scheduler": FlowMatchHeunDiscreteScheduler(shift=3.0)})
    return Built(pipe, wan_kwargs(), calls=38)


def wan_v2v() -> Built:
    """Wan video to video: strength 0.5, two calls per step without cache contexts."""
    pipe = WanVideoToVideoPipeline(**{**wan_parts(), "vae": video_vae()})
    kwargs = {**wan_kwargs(), "video": Draw(2, 9)(3, 32, 32).sigmoid()[None], "strength": 0.5}
    del kwargs["num_frames"]
    return Built(pipe, kwargs, calls=10)


def ltx() -> Built:
    """LTX-Video: guidance as a batch of two in the cache context "cond_uncond"."""
    pipe = LTXPipeline(FlowMatchEulerDiscreteScheduler(), None, None, None, build_ltx())
    kwargs = {
        **masked_text_embeds(),
        **masked_text_embeds("negative_", seed=1),
        "height": 64,
        "width": 64,
        "num_frames": 17,
        "output_type": "latent",
    }
    return Built(pipe, kwargs)


def cogvideox() -> Built:
    """CogVideoX with its DDIM: guidance as a batch of two in the cache context "cond_uncond"."""
    scheduler = CogVideoXDDIMScheduler(prediction_type="v_prediction")
    pipe = CogVideoXPipeline(None, None, None, build_cogvideox(), scheduler)
    kwargs = {
        **text_embeds(),
        **text_embeds("negative_", seed=1),
        "height": 32,
        "width": 32,
        "num_frames": 9,
        "output_type": "latent",
    }
    return Built(pipe, kwargs)


def mochi() -> Built:
    """Mochi: guidance as a batch of two; the scheduler's own timesteps run upwards."""
    pipe = MochiPipeline(FlowMatchEulerDiscreteScheduler(invert_sigmas=True), None, None, None, build_mochi())
    kwargs = {
        **masked_text_embeds(),
        **masked_text_embeds("negative_", seed=1),
        "height": 32,
        "width": 32,
        "num_frames": 13,
        "output_type": "latent",
    }
    return Built(pipe, kwargs)


VIDEO_PIPELINES = [wan, wan22, wan_heun, wan_v2v, ltx, cogvideox, mochi]
