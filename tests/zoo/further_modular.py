"""Tiny modular pipelines, whose guiders say how often and with what the denoiser is called: a recipe each."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from diffusers import (
    AdaptiveProjectedGuidance,
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    LayerSkipConfig,
    SkipLayerGuidance,
)

from .built import TEXT, Built
from .draw import Draw
from .further import Recipes, pooled_texts, texts
from .image_models import build_sd3, build_z_image
from .image_pipelines import flux_kwargs, image_vae
from .packed_models import build_flux, build_qwenimage
from .unet_models import build_sdxl
from .unet_pipelines import DENOISERS, euler
from .video_models import build_wan
from .video_pipelines import wan_kwargs

FLOW = FlowMatchEulerDiscreteScheduler


def modular(blocks: str, /, calls: int, kwargs: dict[str, Any], **parts: Any) -> Built:
    """The denoising part of modular blocks as a pipeline."""
    pipe = getattr(diffusers, blocks)().sub_blocks["denoise"].init_pipeline()
    pipe.update_components(**parts)
    arguments = {key: value for key, value in kwargs.items() if key != "output_type"}
    return Built(pipe, {**arguments, "output": "latents"}, DENOISERS if "unet" in parts else ("transformer",), calls)


def wan(guider: Any, calls: int = 20) -> Built:
    """Wan under a guider."""
    kwargs = {key: value for key, value in wan_kwargs().items() if key != "guidance_scale"}
    kwargs["latents"] = Draw(0, 1)(4, 3, 4, 4)  # without an autoencoder they would have 16 channels
    return modular("WanBlocks", calls, kwargs, transformer=build_wan(), scheduler=FLOW(shift=3.0), guider=guider)


def three_branches() -> SkipLayerGuidance:
    """A third call per step, without the second block."""
    skip = LayerSkipConfig(indices=[1], fqn="blocks")
    return SkipLayerGuidance(
        guidance_scale=3.0, skip_layer_guidance_scale=2.0, skip_layer_guidance_start=0.0, skip_layer_guidance_stop=1.0,
        skip_layer_config=skip,
    )  # fmt: skip


def flux() -> Built:
    """Flux with embedded guidance, which needs no guider."""
    return modular("FluxAutoBlocks", 10, flux_kwargs(), transformer=build_flux(), scheduler=FLOW(), vae=image_vae(1))


def qwen() -> Built:
    """QwenImage under classifier-free guidance."""
    masks = {f"{prefix}prompt_embeds_mask": torch.ones(1, TEXT, dtype=torch.long) for prefix in ("", "negative_")}
    return modular(
        "QwenImageAutoBlocks", 20, {**texts(), **masks, "height": 64, "width": 64}, transformer=build_qwenimage(),
        scheduler=FLOW(), guider=ClassifierFreeGuidance(guidance_scale=4.0),
    )  # fmt: skip


def z_image() -> Built:
    """Z-Image under classifier-free guidance: lists of samples."""
    words = {"prompt_embeds": list(Draw(0, 1)(TEXT, 16)), "negative_prompt_embeds": list(Draw(1, 1)(TEXT, 16))}
    return modular(
        "ZImageAutoBlocks", 20, {**words, "height": 128, "width": 128}, transformer=build_z_image(),
        scheduler=FLOW(shift=3.0), guider=ClassifierFreeGuidance(guidance_scale=4.0),
    )  # fmt: skip


def sd3() -> Built:
    """Stable Diffusion 3 under classifier-free guidance."""
    return modular(
        "StableDiffusion3AutoBlocks", 20, {**pooled_texts(), "height": 64, "width": 64}, transformer=build_sd3(),
        scheduler=FLOW(shift=3.0), guider=ClassifierFreeGuidance(guidance_scale=4.0),
    )  # fmt: skip


def sdxl() -> Built:
    """SDXL under classifier-free guidance: two calls per step, where the pipeline makes one of two samples."""
    return modular(
        "StableDiffusionXLAutoBlocks", 20, {**pooled_texts(), "height": 64, "width": 64}, unet=build_sdxl(),
        scheduler=euler(), guider=ClassifierFreeGuidance(guidance_scale=4.0),
    )  # fmt: skip


FURTHER_MODULAR: Recipes = {
    "WanModularPipeline": lambda: wan(ClassifierFreeGuidance(guidance_scale=4.0)),
    "WanModularPipeline, projected guidance": lambda: wan(AdaptiveProjectedGuidance(guidance_scale=4.0)),
    "WanModularPipeline, three branches": lambda: wan(three_branches(), 29),
    "FluxModularPipeline": flux,
    "QwenImageModularPipeline": qwen,
    "ZImageModularPipeline": z_image,
    "StableDiffusion3ModularPipeline": sd3,
    "StableDiffusionXLModularPipeline": sdxl,
}
