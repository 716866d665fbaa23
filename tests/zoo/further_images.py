"""Tiny image pipelines around transformers, beyond those that every strategy runs on: a recipe each."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from diffusers import (
    AutoencoderKLQwenImage,
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
)

from .built import TEXT, Built, masked_text_embeds
from .draw import Draw, settle
from .further import PICTURE, Recipes, given, mask, pipeline, pooled_texts, texts
from .image_models import build_auraflow, build_hunyuandit, build_pixart, build_sana, build_sd3, build_z_image
from .image_pipelines import flux_kwargs, flux_parts, image_vae
from .more_images import MORE_IMAGES
from .packed_models import build_chroma, build_flux2, build_qwenimage
from .rows import full

LARGE = {"height": 64, "width": 64}
FLOW = FlowMatchEulerDiscreteScheduler


def flux(name: str, /, calls: int = 10, channels: int = 4, parts: Any = (), **kwargs: Any) -> Built:
    """A pipeline of the Flux family, whose denoiser may take more channels than it returns."""
    model = diffusers.FluxTransformer2DModel(
        in_channels=channels, out_channels=4, num_layers=2, num_single_layers=3, num_attention_heads=2,
        attention_head_dim=16, joint_attention_dim=16, pooled_projection_dim=16, guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    pipe = pipeline(name, **{**flux_parts(), "transformer": settle(model), **dict(parts)})
    return Built(pipe, {**flux_kwargs(), **kwargs}, calls=calls)


def flux_control() -> dict[str, Any]:
    """A ControlNet of Flux."""
    controlnet = diffusers.FluxControlNetModel(
        in_channels=4, num_layers=2, num_single_layers=2, num_attention_heads=2, attention_head_dim=16,
        joint_attention_dim=16, pooled_projection_dim=16, guidance_embeds=True, axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    return {"controlnet": settle(controlnet, seed=1)}


def sd3(name: str, /, calls: int = 10, parts: Any = (), **kwargs: Any) -> Built:
    """A pipeline of the Stable Diffusion 3 family; guidance as a batch of two."""
    pipe = pipeline(
        name, **{"transformer": build_sd3(), "scheduler": FLOW(shift=3.0), "vae": image_vae(4), **dict(parts)}
    )
    return Built(pipe, {**pooled_texts(), **PICTURE, "guidance_scale": 4.0, **kwargs}, calls=calls)


def sd3_control(**sizes: Any) -> dict[str, Any]:
    """A ControlNet of Stable Diffusion 3."""
    controlnet = diffusers.SD3ControlNetModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, num_attention_heads=2, attention_head_dim=16,
        joint_attention_dim=16, caption_projection_dim=32, pooled_projection_dim=16, out_channels=4,
        pos_embed_max_size=8, **sizes,
    )  # fmt: skip
    return {"controlnet": settle(controlnet, seed=1)}


def sd3_of_16() -> dict[str, Any]:
    """A denoiser of 16 channels, which is what inpainting asks for."""
    model = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=16, out_channels=16, num_layers=4, num_attention_heads=2,
        attention_head_dim=16, joint_attention_dim=16, caption_projection_dim=32, pooled_projection_dim=16,
        pos_embed_max_size=8,
    )  # fmt: skip
    return {"transformer": settle(model), "vae": image_vae(16)}


def cogview4_control() -> Built:
    """CogView4 whose denoiser takes the control image beside the latents."""
    model = diffusers.CogView4Transformer2DModel(
        patch_size=2, in_channels=8, out_channels=4, num_layers=4, num_attention_heads=2, attention_head_dim=16,
        text_embed_dim=16, time_embed_dim=16, condition_dim=8, pos_embed_max_size=8, sample_size=8,
        rope_axes_dim=(8, 8),
    )  # fmt: skip
    pipe = pipeline("CogView4ControlPipeline", transformer=settle(model), scheduler=FLOW(), vae=image_vae(4))
    return Built(pipe, {**texts(), **PICTURE, "control_image": given()}, calls=20)


def chroma(name: str, /, calls: int = 20, **kwargs: Any) -> Built:
    """A pipeline of the Chroma family; two calls per step without cache contexts."""
    pipe = pipeline(name, transformer=build_chroma(), scheduler=FLOW(), vae=image_vae(1))
    words = {**masked_text_embeds(), **masked_text_embeds("negative_", seed=1)}
    return Built(pipe, {**words, **PICTURE, "guidance_scale": 3.0, **kwargs}, calls=calls)


def qwen(name: str, /, calls: int = 20, parts: Any = (), **kwargs: Any) -> Built:
    """A pipeline of the QwenImage family; two calls per step in cache contexts."""
    vae = AutoencoderKLQwenImage(
        base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
    )  # fmt: skip
    pipe = pipeline(name, transformer=build_qwenimage(), scheduler=FLOW(), vae=settle(vae), **dict(parts))
    masks = {f"{prefix}prompt_embeds_mask": torch.ones(1, TEXT, dtype=torch.long) for prefix in ("", "negative_")}
    size = {"height": 64, "width": 64, "output_type": "latent", "true_cfg_scale": 4.0}
    return Built(pipe, {**texts(), **masks, **size, **kwargs}, calls=calls)


def qwen_control() -> dict[str, Any]:
    """A ControlNet of QwenImage."""
    controlnet = diffusers.QwenImageControlNetModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, num_attention_heads=2, attention_head_dim=16,
        joint_attention_dim=16, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    return {"controlnet": settle(controlnet, seed=1)}


def z_image(name: str, /, calls: int = 10, parts: Any = (), **kwargs: Any) -> Built:
    """A pipeline of the Z-Image family: lists of samples."""
    pipe = pipeline(name, scheduler=FLOW(shift=3.0), transformer=build_z_image(), vae=image_vae(4), **dict(parts))
    words = {"prompt_embeds": list(Draw(0, 1)(TEXT, 16)), "negative_prompt_embeds": list(Draw(1, 1)(TEXT, 16))}
    return Built(pipe, {**words, "height": 32, "width": 32, "output_type": "latent", **kwargs}, calls=calls)


def of_row(name: str, model: str, /, calls: int = 10, parts: Any = (), scheduler: Any = FLOW, **kwargs: Any) -> Built:
    """A pipeline around a denoiser of ``more_images.py``."""
    denoiser = next(case for case in MORE_IMAGES if case.name == model).build()
    pipe = pipeline(name, transformer=denoiser, scheduler=scheduler(), **dict(parts))
    return Built(pipe, {**LARGE, "output_type": "latent", **kwargs}, calls=calls)


def latents(name: str, model: Any, scheduler: Any, /, calls: int = 10, **kwargs: Any) -> Built:
    """A pipeline that needs no autoencoder to give latents."""
    return Built(
        pipeline(name, transformer=model, scheduler=scheduler), {"output_type": "latent", **kwargs}, calls=calls
    )


def masked_texts() -> dict[str, Any]:
    """A prompt and a negative one, with masks that hide nothing."""
    return {**masked_text_embeds(), **masked_text_embeds("negative_", seed=1), "negative_prompt": None}


def hunyuandit() -> Built:
    """HunyuanDiT: two texts, each with its mask; guidance as a batch of two."""
    words: dict[str, Any] = {}
    for seed, prefix in enumerate(("", "negative_")):
        words[f"{prefix}prompt_embeds"] = Draw(seed, 1)(TEXT, 16)
        words[f"{prefix}prompt_embeds_2"] = Draw(seed + 2, 1)(TEXT - 1, 16)
        words[f"{prefix}prompt_attention_mask"] = torch.ones(1, TEXT)
        words[f"{prefix}prompt_attention_mask_2"] = torch.ones(1, TEXT - 1)
    pipe = pipeline(
        "HunyuanDiTPipeline", transformer=build_hunyuandit(), scheduler=DDIMScheduler(prediction_type="v_prediction"),
        vae=image_vae(4), requires_safety_checker=False,
    )  # fmt: skip
    return Built(pipe, {**words, **PICTURE, "use_resolution_binning": False})


FURTHER_IMAGES: Recipes = {
    "FluxInpaintPipeline": lambda: flux("FluxInpaintPipeline", 5, image=given(), mask_image=mask(), strength=0.5),
    "FluxControlPipeline": lambda: flux("FluxControlPipeline", channels=8, control_image=given()),
    "FluxControlImg2ImgPipeline": lambda: flux(
        "FluxControlImg2ImgPipeline", 5, channels=8, control_image=given(), image=given(seed=3), strength=0.5
    ),
    "FluxControlInpaintPipeline": lambda: flux(
        "FluxControlInpaintPipeline", 5, channels=8, control_image=given(), image=given(seed=3), mask_image=mask(),
        strength=0.5,
    ),
    "FluxFillPipeline": lambda: flux("FluxFillPipeline", channels=24, image=given(), mask_image=mask()),
    "FluxKontextPipeline": lambda: flux("FluxKontextPipeline", image=given(), max_area=256, _auto_resize=False),
    "FluxKontextInpaintPipeline": lambda: flux(
        "FluxKontextInpaintPipeline", 5, image=given(), mask_image=mask(), strength=0.5, max_area=256,
        _auto_resize=False,
    ),
    "FluxControlNetImg2ImgPipeline": lambda: flux(
        "FluxControlNetImg2ImgPipeline", 5, parts=flux_control(), control_image=given(), image=given(seed=3),
        strength=0.5,
    ),
    "FluxControlNetInpaintPipeline": lambda: flux(
        "FluxControlNetInpaintPipeline", 5, parts=flux_control(), control_image=given(), image=given(seed=3),
        mask_image=mask(), strength=0.5,
    ),
    "Flux2Pipeline": lambda: latents(
        "Flux2Pipeline", build_flux2(), FLOW(), prompt_embeds=Draw(0, 1)(TEXT, 16), **LARGE,
    ),
    "StableDiffusion3Img2ImgPipeline": lambda: sd3(
        "StableDiffusion3Img2ImgPipeline", 5, image=given(), strength=0.5
    ),
    "StableDiffusion3InpaintPipeline": lambda: sd3(
        "StableDiffusion3InpaintPipeline", 5, parts=sd3_of_16(), image=given(), mask_image=mask(), strength=0.5
    ),
    "StableDiffusion3ControlNetPipeline": lambda: sd3(
        "StableDiffusion3ControlNetPipeline", parts=sd3_control(), control_image=given()
    ),
    "StableDiffusion3PAGPipeline": lambda: sd3("StableDiffusion3PAGPipeline", parts={"pag_applied_layers": ["0"]}),
    "StableDiffusion3Pipeline, three branches": lambda: sd3(
        "StableDiffusion3Pipeline", 20, skip_guidance_layers=[1], skip_layer_guidance_start=-1.0,
        skip_layer_guidance_stop=1.0,
    ),
    "ChromaPipeline": lambda: chroma("ChromaPipeline"),
    "ChromaImg2ImgPipeline": lambda: chroma("ChromaImg2ImgPipeline", 10, image=given(), strength=0.5),
    "QwenImageImg2ImgPipeline": lambda: qwen("QwenImageImg2ImgPipeline", 10, image=given(64), strength=0.5),
    "QwenImageInpaintPipeline": lambda: qwen(
        "QwenImageInpaintPipeline", 10, image=given(64), mask_image=mask(64), strength=0.5
    ),
    "QwenImageControlNetPipeline": lambda: qwen(
        "QwenImageControlNetPipeline", parts=qwen_control(), control_image=given(64)
    ),
    "ZImageImg2ImgPipeline": lambda: z_image("ZImageImg2ImgPipeline", 5, image=given(32), strength=0.5),
    "ZImageInpaintPipeline": lambda: z_image(
        "ZImageInpaintPipeline", 5, image=given(32), mask_image=mask(32), strength=0.5
    ),
    "PixArtAlphaPipeline": lambda: latents(
        "PixArtAlphaPipeline", build_pixart(), DPMSolverMultistepScheduler(prediction_type="v_prediction"),
        **masked_texts(), **LARGE, use_resolution_binning=False,
    ),
    "AuraFlowPipeline": lambda: latents("AuraFlowPipeline", build_auraflow(), FLOW(), **masked_texts(), **LARGE),
    "HunyuanDiTPipeline": hunyuandit,
    "SanaPAGPipeline": lambda: latents(
        "SanaPAGPipeline", build_sana(), FLOW(shift=3.0), **masked_texts(), height=128, width=128,
        use_resolution_binning=False,
    ),
    "CogView3PlusPipeline": lambda: of_row(
        "CogView3PlusPipeline", "CogView3PlusTransformer2DModel", scheduler=diffusers.CogVideoXDDIMScheduler, **texts()
    ),
    "CogView4ControlPipeline": cogview4_control,
    "OvisImagePipeline": lambda: of_row(
        "OvisImagePipeline", "OvisImageTransformer2DModel", 20, **texts(), negative_prompt=None
    ),
    "BriaPipeline": lambda: of_row(
        "BriaPipeline", "BriaTransformer2DModel", parts={"vae": image_vae(1)}, **texts(), **PICTURE
    ),
    "PRXPipeline": lambda: of_row(
        "PRXPipeline", "PRXTransformer2DModel", **masked_texts(), use_resolution_binning=False
    ),
    "Krea2Pipeline": lambda: of_row(
        "Krea2Pipeline", "Krea2Transformer2DModel", 20, prompt_embeds=Draw(0, 1)(TEXT, 2, 16),
        prompt_embeds_mask=full(1), negative_prompt_embeds=Draw(1, 1)(TEXT, 2, 16),
        negative_prompt_embeds_mask=full(1),
    ),
}  # fmt: skip
