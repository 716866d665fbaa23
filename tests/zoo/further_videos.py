"""Tiny video pipelines around transformers, beyond those that every strategy runs on: a recipe each."""

from __future__ import annotations

from typing import Any

import diffusers
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from .built import Built, masked_text_embeds, pooled_text_embeds
from .draw import Draw, settle
from .further import Recipes, given, pipeline, texts
from .more_videos import MORE_VIDEOS
from .video_models import (
    WAN_SIZES,
    build_allegro,
    build_hunyuanvideo,
    build_latte,
    build_ltx,
    build_skyreels,
)
from .video_pipelines import video_vae, wan_kwargs, wan_parts

FLOW = FlowMatchEulerDiscreteScheduler
VIDEO = {"height": 32, "width": 32, "num_frames": 9, "output_type": "latent"}


def flow_unipc() -> UniPCMultistepScheduler:
    """The solver of SkyReels-V2."""
    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=8.0)


def wan_i2v() -> Built:
    """Wan image to video: the image and its mask are channels beside the latents."""
    model = settle(diffusers.WanTransformer3DModel(**{**WAN_SIZES, "in_channels": 12}))
    pipe = pipeline("WanImageToVideoPipeline", **{**wan_parts(), "vae": video_vae(), "transformer": model})
    return Built(pipe, {**wan_kwargs(), "image": given(32)}, calls=20)


def wan_vace() -> Built:
    """Wan VACE with a control video; hints are added between blocks."""
    model = diffusers.WanVACETransformer3DModel(**WAN_SIZES, vace_layers=[0, 2], vace_in_channels=8 + 64)
    pipe = pipeline("WanVACEPipeline", **{**wan_parts(), "vae": video_vae(), "transformer": settle(model)})
    return Built(pipe, {**wan_kwargs(), "video": Draw(2, 9)(3, 32, 32).sigmoid()[None]}, calls=20)


def skyreels(name: str, /, calls: int = 20, windows: int = 1, parts: Any = (), **kwargs: Any) -> Built:
    """A pipeline of the SkyReels-V2 family; two calls per step in cache contexts."""
    pipe = pipeline(name, **{"transformer": build_skyreels(), "scheduler": flow_unipc(), **dict(parts)})
    return Built(
        pipe, {**texts(), **VIDEO, "prompt": None, "guidance_scale": 3.0, **kwargs}, calls=calls, windows=windows
    )


def helios() -> Built:
    """Helios: two windows of three latent frames, each a run of its own behind what came before."""
    sizes = {key: value for key, value in WAN_SIZES.items() if key != "rope_max_seq_len"}
    model = settle(diffusers.HeliosTransformer3DModel(**sizes, rope_dim=(4, 6, 6)))
    scheduler = diffusers.HeliosScheduler(stages=1)
    pipe = pipeline("HeliosPipeline", transformer=model, scheduler=scheduler, vae=video_vae())
    kwargs = {**texts(), **VIDEO, "num_frames": 18, "num_latent_frames_per_chunk": 3, "guidance_scale": 3.0}
    return Built(pipe, kwargs, calls=40, windows=2)


def hunyuanvideo() -> Built:
    """HunyuanVideo with true guidance: two calls per step in cache contexts."""
    pipe = pipeline("HunyuanVideoPipeline", transformer=build_hunyuanvideo(), scheduler=FLOW(shift=7.0))
    words = {**masked_text_embeds(), **masked_text_embeds("negative_", seed=1)}
    pooled = {**pooled_text_embeds(), **pooled_text_embeds("negative_", seed=1)}
    return Built(pipe, {**words, **pooled, **VIDEO, "true_cfg_scale": 2.0}, calls=20)


def ltx_image() -> Built:
    """LTX-Video from an image: the first frame is given, and its tokens have a timestep of zero."""
    vae = diffusers.AutoencoderKLLTXVideo(
        in_channels=3, out_channels=3, latent_channels=8, block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8), layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1), spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False), decoder_inject_noise=(False,) * 5,
        upsample_residual=(False,) * 4, upsample_factor=(1,) * 4, timestep_conditioning=False, patch_size=1,
        patch_size_t=1, encoder_causal=True, decoder_causal=False,
    )  # fmt: skip
    pipe = pipeline("LTXImageToVideoPipeline", transformer=build_ltx(), scheduler=FLOW(), vae=settle(vae))
    words = {**masked_text_embeds(), **masked_text_embeds("negative_", seed=1)}
    kwargs = {**words, "image": given(32), "height": 32, "width": 32, "num_frames": 9, "output_type": "latent"}
    return Built(pipe, kwargs)


def latte() -> Built:
    """Latte, whose two lists take turns: guidance as a batch of two."""
    pipe = pipeline(
        "LattePipeline", transformer=build_latte(8), scheduler=DDIMScheduler(prediction_type="v_prediction")
    )
    kwargs = {**texts(), "negative_prompt": None, "video_length": 3, "height": 32, "width": 32}
    return Built(pipe, {**kwargs, "output_type": "latent", "mask_feature": False})


def allegro() -> Built:
    """Allegro: guidance as a batch of two."""
    scheduler = DDIMScheduler(prediction_type="v_prediction")
    pipe = pipeline("AllegroPipeline", transformer=build_allegro(), scheduler=scheduler)
    words = {**masked_text_embeds(), **masked_text_embeds("negative_", seed=1), "negative_prompt": None}
    return Built(pipe, {**words, **VIDEO})


def of_row(name: str, model: str, /, calls: int = 10, parts: Any = (), scheduler: Any = FLOW, **kwargs: Any) -> Built:
    """A pipeline around a denoiser of ``more_videos.py``."""
    denoiser = next(case for case in MORE_VIDEOS if case.name == model).build()
    pipe = pipeline(name, transformer=denoiser, scheduler=scheduler(), **dict(parts))
    return Built(pipe, {"output_type": "latent", **kwargs}, calls=calls)


def sana_words() -> dict[str, Any]:
    """What the Sana family calls its texts."""
    return {**masked_text_embeds(), **masked_text_embeds("negative_", seed=1), "negative_prompt": None}


FURTHER_VIDEOS: Recipes = {
    "WanImageToVideoPipeline": wan_i2v,
    "WanVACEPipeline": wan_vace,
    "SkyReelsV2Pipeline": lambda: skyreels("SkyReelsV2Pipeline"),
    "SkyReelsV2DiffusionForcingPipeline, windows": lambda: skyreels(
        "SkyReelsV2DiffusionForcingPipeline", 40, 2, parts={"vae": video_vae()}, num_frames=17, base_num_frames=9,
        overlap_history=1,
    ),
    "HeliosPipeline, windows": helios,
    "HunyuanVideoPipeline": hunyuanvideo,
    "LTXImageToVideoPipeline": ltx_image,
    "LattePipeline": latte,
    "AllegroPipeline": allegro,
    "SanaVideoPipeline": lambda: of_row(
        "SanaVideoPipeline", "SanaVideoTransformer3DModel", scheduler=flow_unipc, **sana_words(), height=64, width=64,
        frames=9, use_resolution_binning=False,
    ),
}  # fmt: skip
