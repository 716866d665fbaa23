"""Tiny image pipelines. Flux has a real autoencoder, the others only where the pipeline insists on one."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    CogView4Pipeline,
    DDIMScheduler,
    DiTPipeline,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxControlNetModel,
    FluxControlNetPipeline,
    FluxImg2ImgPipeline,
    FluxPipeline,
    Lumina2Pipeline,
    PixArtSigmaPipeline,
    QwenImagePipeline,
    SanaPipeline,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    UNet2DConditionModel,
    UniPCMultistepScheduler,
    ZImagePipeline,
)

from .built import TEXT, Built, masked_text_embeds, pooled_text_embeds, text_embeds
from .draw import Draw, settle
from .image_models import build_cogview4, build_dit, build_lumina2, build_pixart, build_sana, build_sd3, build_z_image
from .packed_models import build_flux, build_qwenimage


def image_vae(latent_channels: int) -> AutoencoderKL:
    """An autoencoder with two levels, so that latents have half the resolution of the image."""
    model = AutoencoderKL(
        block_out_channels=(4, 8), latent_channels=latent_channels, norm_num_groups=2, sample_size=16,
        down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2, shift_factor=0.1,
        scaling_factor=1.5, use_quant_conv=False, use_post_quant_conv=False,
    )  # fmt: skip
    return settle(model)


def dit() -> Built:
    """DiT with DDIM: one call per step, classifier-free guidance as a batch of two. Returns pixels."""
    pipe = DiTPipeline(build_dit(), image_vae(4), DDIMScheduler())
    return Built(pipe, {"class_labels": [1], "guidance_scale": 4.0, "output_type": "np"})


def pixart() -> Built:
    """PixArt-Sigma with a multistep DPM solver: guidance as a batch of two."""
    scheduler = DPMSolverMultistepScheduler(prediction_type="v_prediction")
    pipe = PixArtSigmaPipeline(None, None, None, build_pixart(), scheduler)
    kwargs = {
        **masked_text_embeds(),
        **masked_text_embeds("negative_", seed=1),
        "negative_prompt": None,
        "height": 64,
        "width": 64,
        "use_resolution_binning": False,
        "output_type": "latent",
    }
    return Built(pipe, kwargs)


def sana() -> Built:
    """Sana with flow matching: guidance as a batch of two."""
    pipe = SanaPipeline(None, None, None, build_sana(), FlowMatchEulerDiscreteScheduler(shift=3.0))
    kwargs = {
        **masked_text_embeds(),
        **masked_text_embeds("negative_", seed=1),
        "negative_prompt": None,
        "height": 128,
        "width": 128,
        "use_resolution_binning": False,
        "output_type": "latent",
    }
    return Built(pipe, kwargs)


def sd3() -> Built:
    """SD3: guidance as a batch of two."""
    pipe = StableDiffusion3Pipeline(
        transformer=build_sd3(), scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0), vae=None, text_encoder=None,
        tokenizer=None, text_encoder_2=None, tokenizer_2=None, text_encoder_3=None, tokenizer_3=None,
    )  # fmt: skip
    kwargs = {
        **pooled_text_embeds(),
        **pooled_text_embeds("negative_", seed=1),
        "height": 64,
        "width": 64,
        "output_type": "latent",
    }
    return Built(pipe, kwargs)


def flux_parts() -> dict[str, Any]:
    """The components that all Flux pipelines share."""
    return {
        "scheduler": FlowMatchEulerDiscreteScheduler(),
        "vae": image_vae(1),
        "text_encoder": None,
        "tokenizer": None,
        "text_encoder_2": None,
        "tokenizer_2": None,
        "transformer": build_flux(),
    }


def flux_kwargs() -> dict[str, Any]:
    """A 16 x 16 image, which is 16 tokens."""
    return {**pooled_text_embeds(), "height": 16, "width": 16, "guidance_scale": 3.5, "output_type": "latent"}


def flux() -> Built:
    """Flux with embedded guidance: one call per step."""
    return Built(FluxPipeline(**flux_parts()), flux_kwargs())


def flux_true_cfg() -> Built:
    """Flux with true guidance: two calls per step in the cache contexts "cond" and "uncond"."""
    kwargs = {**flux_kwargs(), **pooled_text_embeds("negative_", seed=1), "true_cfg_scale": 2.0}
    return Built(FluxPipeline(**flux_parts()), kwargs, calls=20)


def flux_img2img() -> Built:
    """Flux image to image: strength 0.5 runs the second half of the schedule."""
    kwargs = {**flux_kwargs(), "image": Draw(2, 1)(3, 16, 16).sigmoid(), "strength": 0.5}
    return Built(FluxImg2ImgPipeline(**flux_parts()), kwargs, calls=5)


def flux_controlnet() -> Built:
    """Flux with a ControlNet that adds residuals after the blocks of both lists."""
    controlnet = FluxControlNetModel(
        in_channels=4, num_layers=2, num_single_layers=2, num_attention_heads=2, attention_head_dim=16,
        joint_attention_dim=16, pooled_projection_dim=16, guidance_embeds=True, axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    kwargs = {**flux_kwargs(), "control_image": Draw(2, 1)(3, 16, 16).sigmoid(), "controlnet_conditioning_scale": 0.5}
    return Built(FluxControlNetPipeline(**flux_parts(), controlnet=settle(controlnet, seed=1)), kwargs)


def flux_unipc() -> Built:
    """Flux with a multistep solver: its first and last steps are of lower order."""
    scheduler = UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=3.0)
    return Built(FluxPipeline(**{**flux_parts(), "scheduler": scheduler}), flux_kwargs())


def qwenimage() -> Built:
    """QwenImage: two calls per step in the cache contexts "cond" and "uncond"."""
    pipe = QwenImagePipeline(FlowMatchEulerDiscreteScheduler(), None, None, None, build_qwenimage())
    kwargs = {
        **text_embeds(),
        **text_embeds("negative_", seed=1),
        "prompt_embeds_mask": torch.ones(1, TEXT, dtype=torch.long),
        "negative_prompt_embeds_mask": torch.ones(1, TEXT, dtype=torch.long),
        "true_cfg_scale": 4.0,
        "height": 64,
        "width": 64,
        "output_type": "latent",
    }
    return Built(pipe, kwargs, calls=20)


def cogview4() -> Built:
    """CogView4: two calls per step in the cache contexts "cond" and "uncond"."""
    pipe = CogView4Pipeline(None, None, None, build_cogview4(), FlowMatchEulerDiscreteScheduler())
    kwargs = {
        **text_embeds(),
        **text_embeds("negative_", seed=1),
        "height": 64,
        "width": 64,
        "output_type": "latent",
    }
    return Built(pipe, kwargs, calls=20)


def lumina2() -> Built:
    """Lumina2: two calls per step without cache contexts, time runs upwards in the denoiser."""
    pipe = Lumina2Pipeline(build_lumina2(), FlowMatchEulerDiscreteScheduler(), None, None, None)
    kwargs = {
        **masked_text_embeds(),
        **masked_text_embeds("negative_", seed=1),
        "height": 64,
        "width": 64,
        "output_type": "latent",
    }
    return Built(pipe, kwargs, calls=20)


def z_image() -> Built:
    """Z-Image: lists of samples, guidance as a list of two, time runs upwards in the denoiser."""
    pipe = ZImagePipeline(FlowMatchEulerDiscreteScheduler(shift=3.0), None, None, None, build_z_image())
    kwargs = {
        "prompt_embeds": list(Draw(0, 1)(TEXT, 16)),
        "negative_prompt_embeds": list(Draw(1, 1)(TEXT, 16)),
        "height": 128,
        "width": 128,
        "output_type": "latent",
    }
    return Built(pipe, kwargs)


def sd() -> Built:
    """Stable Diffusion 1: a UNet, guidance as a batch of two."""
    unet = UNet2DConditionModel(
        block_out_channels=(4, 8), layers_per_block=1, sample_size=8, norm_num_groups=2, cross_attention_dim=16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    )  # fmt: skip
    scheduler = DDIMScheduler(clip_sample=False, steps_offset=1, prediction_type="v_prediction")
    pipe = StableDiffusionPipeline(
        vae=image_vae(4), text_encoder=None, tokenizer=None, unet=settle(unet), scheduler=scheduler,
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    kwargs = {**text_embeds(), **text_embeds("negative_", seed=1), "height": 16, "width": 16, "output_type": "latent"}
    return Built(pipe, kwargs, denoisers=("unet",))


IMAGE_PIPELINES = [
    dit, pixart, sana, sd3, flux, flux_true_cfg, flux_img2img, flux_controlnet, flux_unipc, qwenimage, cogview4,
    lumina2, z_image, sd,
]  # fmt: skip
