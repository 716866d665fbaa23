"""Tiny pipelines around a UNet: ``run(UNET_PIPELINES["sd15"]())`` returns latents.

All guide with a batch of two, which is one call per step. Text enters as embeddings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers import (
    AnimateDiffPipeline,
    AutoencoderKLTemporalDecoder,
    ControlNetModel,
    DDIMScheduler,
    EulerDiscreteScheduler,
    StableDiffusionAdapterPipeline,
    StableDiffusionControlNetPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    StableVideoDiffusionPipeline,
    T2IAdapter,
)
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModelWithProjection

from .built import Built, pooled_text_embeds, text_embeds
from .draw import Draw, settle
from .image_pipelines import image_vae
from .unet_models import FRAMES, IMAGE_WIDTHS, build_motion, build_sd, build_sdxl, build_svd

DENOISERS = ("unet",)


def ddim() -> DDIMScheduler:
    """The noise levels of Stable Diffusion. The weights are random, and as velocities they keep latents bounded."""
    return DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, set_alpha_to_one=False,
        steps_offset=1, prediction_type="v_prediction",
    )  # fmt: skip


def euler(**settings: Any) -> EulerDiscreteScheduler:
    """The same noise levels for Euler's method, which scales the input of the UNet."""
    return EulerDiscreteScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1,
        prediction_type="v_prediction", **settings,
    )  # fmt: skip


def sd15_parts() -> dict[str, Any]:
    """The components that all Stable Diffusion 1 pipelines share."""
    return {
        "vae": image_vae(4),
        "text_encoder": None,
        "tokenizer": None,
        "unet": build_sd(),
        "scheduler": ddim(),
        "safety_checker": None,
        "feature_extractor": None,
        "requires_safety_checker": False,
    }


def sd15_kwargs() -> dict[str, Any]:
    """Two texts."""
    return {**text_embeds(), **text_embeds("negative_", seed=1), "guidance_scale": 5.0, "output_type": "latent"}


def picture() -> torch.Tensor:
    """An image ``[1, 3, 16, 16]``, which is latents of 8 x 8."""
    return Draw(2, 1)(3, 16, 16).sigmoid()


def sd15() -> Built:
    """Stable Diffusion 1 with DDIM."""
    kwargs = {**sd15_kwargs(), "height": 16, "width": 16}
    return Built(StableDiffusionPipeline(**sd15_parts()), kwargs, DENOISERS)


def sd15_img2img() -> Built:
    """Image to image: strength 0.6 runs the last six of ten steps."""
    kwargs = {**sd15_kwargs(), "image": picture(), "strength": 0.6}
    return Built(StableDiffusionImg2ImgPipeline(**sd15_parts()), kwargs, DENOISERS, calls=6)


def sd15_controlnet() -> Built:
    """A ControlNet adds to all skip connections and to the middle."""
    parts = sd15_parts()
    controlnet = ControlNetModel.from_unet(parts["unet"], conditioning_embedding_out_channels=(4, 8))
    kwargs = {**sd15_kwargs(), "image": picture(), "controlnet_conditioning_scale": 1.0}
    return Built(StableDiffusionControlNetPipeline(**parts, controlnet=settle(controlnet, seed=1)), kwargs, DENOISERS)


def sd15_adapter() -> Built:
    """A T2I adapter adds inside the down blocks."""
    adapter = T2IAdapter(
        in_channels=3, channels=list(IMAGE_WIDTHS), num_res_blocks=1, downscale_factor=2, adapter_type="full_adapter"
    )
    pipe = StableDiffusionAdapterPipeline(**sd15_parts(), adapter=settle(adapter, seed=1))
    return Built(pipe, {**sd15_kwargs(), "image": picture()}, DENOISERS)


def sdxl() -> Built:
    """SDXL with Euler's method."""
    pipe = StableDiffusionXLPipeline(
        vae=image_vae(4), text_encoder=None, text_encoder_2=None, tokenizer=None, tokenizer_2=None, unet=build_sdxl(),
        scheduler=euler(),
    )  # fmt: skip
    kwargs = {
        **pooled_text_embeds(),
        **pooled_text_embeds("negative_", seed=1),
        "height": 16,
        "width": 16,
        "guidance_scale": 5.0,
        "output_type": "latent",
    }
    return Built(pipe, kwargs, DENOISERS)


def svd() -> Built:
    """Stable Video Diffusion: image to video, guidance that grows from frame to frame, times in -1.6 .. 1.6."""
    vae = AutoencoderKLTemporalDecoder(
        block_out_channels=(32, 32), latent_channels=4, layers_per_block=1, sample_size=16,
        down_block_types=["DownEncoderBlock2D"] * 2,
    )  # fmt: skip
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, projection_dim=16, num_hidden_layers=1, num_attention_heads=2,
        image_size=16, patch_size=8,
    )  # fmt: skip
    scheduler = euler(
        timestep_type="continuous", timestep_spacing="leading", interpolation_type="linear", use_karras_sigmas=True,
        sigma_min=0.002, sigma_max=700.0,
    )  # fmt: skip
    pipe = StableVideoDiffusionPipeline(
        vae=settle(vae), image_encoder=settle(CLIPVisionModelWithProjection(vision)), unet=build_svd(),
        scheduler=scheduler, feature_extractor=CLIPImageProcessor(),
    )  # fmt: skip
    kwargs = {"image": picture(), "height": 16, "width": 16, "num_frames": FRAMES, "output_type": "latent"}
    return Built(pipe, kwargs, DENOISERS)


def animatediff() -> Built:
    """AnimateDiff with DDIM: text to video."""
    pipe = AnimateDiffPipeline(
        vae=image_vae(4), text_encoder=None, tokenizer=None, unet=build_motion(), motion_adapter=None, scheduler=ddim()
    )
    kwargs = {**sd15_kwargs(), "height": 16, "width": 16, "num_frames": FRAMES}
    return Built(pipe, kwargs, DENOISERS)


_UNET_PIPELINES = [sd15, sd15_img2img, sd15_controlnet, sd15_adapter, sdxl, svd, animatediff]
UNET_PIPELINES: dict[str, Callable[[], Built]] = {build.__name__: build for build in _UNET_PIPELINES}
