"""The denoisers of the peer benchmark: real diffusers architectures built from a config, with seeded random weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import DiTTransformer2DModel, FluxTransformer2DModel, WanTransformer3DModel
from diffusers.models.embeddings import TimestepEmbedding
from torch import nn

MASK = "11110010010010010011"
"""The one schedule of the benchmark: 1 is a computed step, 0 a reused one."""
STEPS = len(MASK)
SIGMAS = [1 - step / STEPS for step in range(STEPS)]
HEAD = 32
TEXT_WIDTH = 64


@dataclass(frozen=True)
class Setup:
    """One denoiser and what it is called with.

    Attributes:
        model: name of the architecture.
        size: "tiny" or "small".
        denoiser: in eval mode, never altered; every method works on a deep copy.
        lists: names of its block lists, in execution order.
        latent: the noise that a run starts from; the argument ``hidden_states``.
        inputs: all other arguments but the timestep.
        times: the timestep argument of every step.
        shape: blocks x width x tokens, for the report.
    """

    model: str
    size: str
    denoiser: nn.Module
    lists: tuple[str, ...]
    latent: torch.Tensor
    inputs: dict[str, Any]
    times: list[torch.Tensor]
    shape: str

    @property
    def blocks(self) -> list[nn.Module]:
        """All blocks, in execution order."""
        return [block for name in self.lists for block in self.denoiser.get_submodule(name)]  # type: ignore[union-attr]


def flux(size: str) -> Setup:
    """FLUX.1: double blocks, then single ones; every third block is a double one, as in the original."""
    width, single, side, text = {"tiny": (64, 8, 4, 8), "small": (192, 8, 8, 16)}[size]
    model = FluxTransformer2DModel(
        in_channels=16, num_layers=single // 2, num_single_layers=single, attention_head_dim=HEAD,
        num_attention_heads=width // HEAD, joint_attention_dim=TEXT_WIDTH, pooled_projection_dim=TEXT_WIDTH,
        axes_dims_rope=(8, 12, 12),
    )  # fmt: skip
    draw = torch.Generator().manual_seed(0)
    inputs = {
        "encoder_hidden_states": torch.randn(1, text, TEXT_WIDTH, generator=draw),
        "pooled_projections": torch.randn(1, TEXT_WIDTH, generator=draw),
        "img_ids": _grid_ids(side),
        "txt_ids": torch.zeros(text, 3),
        "return_dict": False,
    }
    latent = torch.randn(1, side * side, 16, generator=draw)
    times = [torch.tensor([sigma]) for sigma in SIGMAS]
    shape = f"{single // 2} + {single} x {width} x {side * side} + {text} text"
    lists = ("transformer_blocks", "single_transformer_blocks")
    return Setup("flux", size, settle(model), lists, latent, inputs, times, shape)


def dit(size: str) -> Setup:
    """DiT-XL/2's architecture, without the variance channels."""
    width, depth, side = {"tiny": (64, 12, 4), "small": (192, 12, 10)}[size]
    model = DiTTransformer2DModel(
        num_attention_heads=width // HEAD, attention_head_dim=HEAD, in_channels=4, out_channels=4, num_layers=depth,
        patch_size=2, sample_size=2 * side,
    )  # fmt: skip
    latent = torch.randn(1, 4, 2 * side, 2 * side, generator=torch.Generator().manual_seed(0))
    inputs = {"class_labels": torch.tensor([1]), "return_dict": False}
    times = [torch.tensor([round(999 * sigma)]) for sigma in SIGMAS]
    shape = f"{depth} x {width} x {side * side}"
    return Setup("dit", size, settle(model), ("transformer_blocks",), latent, inputs, times, shape)


def wan(size: str) -> Setup:
    """Wan 2.1 text to video: self attention over all frames, cross attention to the text."""
    width, depth, frames, side, text = {"tiny": (64, 12, 2, 3, 8), "small": (192, 12, 2, 6, 16)}[size]
    model = WanTransformer3DModel(
        num_attention_heads=width // HEAD, attention_head_dim=HEAD, in_channels=4, out_channels=4,
        text_dim=TEXT_WIDTH, freq_dim=64, ffn_dim=4 * width, num_layers=depth, rope_max_seq_len=64,
    )  # fmt: skip
    draw = torch.Generator().manual_seed(0)
    inputs = {"encoder_hidden_states": torch.randn(1, text, TEXT_WIDTH, generator=draw), "return_dict": False}
    latent = torch.randn(1, 4, frames, 2 * side, 2 * side, generator=draw)
    times = [torch.tensor([1000 * sigma]) for sigma in SIGMAS]
    shape = f"{depth} x {width} x {frames * side * side}, {text} text"
    return Setup("wan", size, settle(model), ("blocks",), latent, inputs, times, shape)


MODELS: dict[str, Callable[[str], Setup]] = {"flux": flux, "dit": dit, "wan": wan}
SIZES = ("tiny", "small")


@torch.no_grad()
def settle(model: nn.Module) -> nn.Module:
    """Seeded weights under which the blocks matter and the output changes slowly along the noise levels.

    Fresh gates and output projections may be zero, so every matrix gets variance 1 / fan-in; norms start at one and
    biases at zero; the fast half of the sinusoids that encode time is damped.
    """
    draw = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.copy_(torch.randn(parameter.shape, generator=draw) / math.sqrt(parameter[0].numel()))
        else:
            parameter.fill_(1.0 if name.endswith("weight") else 0.0)
    for module in model.modules():
        if isinstance(module, TimestepEmbedding):
            columns = module.linear_1.weight.unflatten(1, (2, -1))
            columns[:, :, : columns.shape[2] // 2] *= 0.01
    return model.eval()


def _grid_ids(side: int) -> torch.Tensor:
    """Positions ``[N, 3]`` of image tokens: row and column in axes 1 and 2."""
    ids = torch.zeros(side, side, 3)
    ids[..., 1] = torch.arange(side)[:, None]
    ids[..., 2] = torch.arange(side)
    return ids.reshape(side * side, 3)
