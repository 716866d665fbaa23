"""A causal video pipeline of the sample's shape, with random weights that do something."""

from __future__ import annotations

import functools

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline

from cachedit.samples.video_model import build_autoencoder, build_denoiser, build_text_encoder, build_tokenizer

_autoencoder = functools.cache(build_autoencoder)


def random_denoiser() -> torch.nn.Module:
    """Unlike those that training starts from, its blocks are no identities."""
    torch.manual_seed(0)
    model = build_denoiser()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model.eval().requires_grad_(False)


def random_pipeline() -> WanPipeline:
    """As the sample loads."""
    tokenizer = build_tokenizer()
    torch.manual_seed(1)
    pipe = WanPipeline(
        tokenizer=tokenizer,
        text_encoder=build_text_encoder(len(tokenizer)).eval(),
        transformer=random_denoiser(),
        vae=_autoencoder(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe
