"""Tiny pipelines around a UNet, beyond those that the UNet tests run: a recipe each."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from diffusers import ControlNetModel, LCMScheduler, T2IAdapter, UNet2DConditionModel

from .built import Built
from .draw import Draw, settle
from .further import Recipes, given, mask, pipeline, pooled_texts, texts
from .image_pipelines import image_vae
from .unet_models import FRAMES, IMAGE_WIDTHS, SIDE, build_motion, build_sd, build_sdxl
from .unet_pipelines import DENOISERS, ddim, euler, sd15_parts

SMALL = {"output_type": "latent", "guidance_scale": 5.0}


def sd15(name: str, /, calls: int = 10, parts: Any = (), **kwargs: Any) -> Built:
    """A pipeline of the Stable Diffusion 1 family."""
    return Built(pipeline(name, **{**sd15_parts(), **dict(parts)}), {**texts(), **SMALL, **kwargs}, DENOISERS, calls)


def sdxl(name: str, /, calls: int = 10, parts: Any = (), **kwargs: Any) -> Built:
    """A pipeline of the SDXL family."""
    usual = {"unet": build_sdxl(), "vae": image_vae(4), "scheduler": euler()}
    pipe = pipeline(name, **{**usual, **dict(parts)})
    return Built(pipe, {**pooled_texts(), **SMALL, **kwargs}, DENOISERS, calls)


def controlnet(unet: UNet2DConditionModel) -> dict[str, Any]:
    """A UNet and a ControlNet of it."""
    control = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(4, 8))
    return {"unet": unet, "controlnet": settle(control, seed=1)}


def adapter() -> dict[str, Any]:
    """A T2I adapter for SDXL, which has no level of its own for the outermost one."""
    model = T2IAdapter(
        in_channels=3, channels=list(IMAGE_WIDTHS), num_res_blocks=1, downscale_factor=4,
        adapter_type="full_adapter_xl",
    )  # fmt: skip
    return {"adapter": settle(model, seed=1)}


def unet_of(channels: int) -> dict[str, Any]:
    """A UNet that takes more channels than it returns."""
    model = UNet2DConditionModel(
        sample_size=SIDE, in_channels=channels, out_channels=4, block_out_channels=IMAGE_WIDTHS, layers_per_block=2,
        norm_num_groups=4, cross_attention_dim=16, attention_head_dim=2,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    return {"unet": settle(model)}


def motion(name: str, /, calls: int = 10, parts: Any = (), **kwargs: Any) -> Built:
    """A pipeline of the AnimateDiff family."""
    usual = {"vae": image_vae(4), "unet": build_motion(), "scheduler": ddim()}
    pipe = pipeline(name, **{**usual, **dict(parts)})
    return Built(pipe, {**texts(), **SMALL, "height": 16, "width": 16, **kwargs}, DENOISERS, calls)


def video() -> torch.Tensor:
    """A video ``[1, 3, 3, 16, 16]`` (frames before channels) in 0..1."""
    return Draw(2, FRAMES)(3, 16, 16).sigmoid()[None]


def heun() -> diffusers.HeunDiscreteScheduler:
    """Heun's method, which calls the UNet twice in all steps but the last."""
    return diffusers.HeunDiscreteScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", prediction_type="v_prediction"
    )


def lcm() -> dict[str, Any]:
    """A UNet that takes its guidance as an embedding, and the scheduler of latent consistency models."""
    config = {key: value for key, value in build_sd().config.items() if not key.startswith("_")}
    model = UNet2DConditionModel(**{**config, "time_cond_proj_dim": 8})
    return {"unet": settle(model), "scheduler": LCMScheduler(prediction_type="v_prediction")}


FURTHER_UNETS: Recipes = {
    "StableDiffusionInpaintPipeline": lambda: sd15(
        "StableDiffusionInpaintPipeline", 5, unet_of(9), image=given(), mask_image=mask(), strength=0.5, height=16,
        width=16,
    ),
    "StableDiffusionInstructPix2PixPipeline": lambda: sd15(
        "StableDiffusionInstructPix2PixPipeline", 10, unet_of(8), image=given()
    ),
    "StableDiffusionControlNetImg2ImgPipeline": lambda: sd15(
        "StableDiffusionControlNetImg2ImgPipeline", 5, controlnet(build_sd()), image=given(),
        control_image=given(seed=3), strength=0.5,
    ),
    "StableDiffusionControlNetInpaintPipeline": lambda: sd15(
        "StableDiffusionControlNetInpaintPipeline", 5, controlnet(build_sd()), image=given(), mask_image=mask(),
        control_image=given(seed=3), strength=0.5,
    ),
    "StableDiffusionPAGPipeline": lambda: sd15(
        "StableDiffusionPAGPipeline", parts={"pag_applied_layers": ["mid"]}, height=16, width=16
    ),
    "LatentConsistencyModelPipeline": lambda: Built(
        pipeline("LatentConsistencyModelPipeline", **{**sd15_parts(), **lcm()}),
        {**SMALL, "prompt_embeds": texts()["prompt_embeds"], "height": 16, "width": 16,
         "original_inference_steps": 50}, DENOISERS,
    ),
    "StableDiffusionPipeline, Heun": lambda: sd15(
        "StableDiffusionPipeline", 19, {"scheduler": heun()}, height=16, width=16
    ),
    "StableDiffusionXLImg2ImgPipeline": lambda: sdxl(
        "StableDiffusionXLImg2ImgPipeline", 5, image=given(), strength=0.5
    ),
    "StableDiffusionXLInpaintPipeline": lambda: sdxl(
        "StableDiffusionXLInpaintPipeline", 5, image=given(), mask_image=mask(), strength=0.5, height=16, width=16
    ),
    "StableDiffusionXLControlNetPipeline": lambda: sdxl(
        "StableDiffusionXLControlNetPipeline", parts=controlnet(build_sdxl()), image=given()
    ),
    "StableDiffusionXLAdapterPipeline": lambda: sdxl(
        "StableDiffusionXLAdapterPipeline", parts=adapter(), image=given()
    ),
    "AnimateDiffVideoToVideoPipeline": lambda: motion(
        "AnimateDiffVideoToVideoPipeline", 5, video=list(video()[0]), strength=0.5
    ),
}  # fmt: skip
