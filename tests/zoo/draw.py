"""Seeded numbers: the inputs and the weights of the tiny models."""

from __future__ import annotations

import math

import torch
from diffusers.models.embeddings import TimestepEmbedding
from diffusers.models.transformers.transformer_chroma import ChromaApproximator
from diffusers.models.transformers.transformer_z_image import TimestepEmbedder
from torch import nn


class Draw:
    """Normal tensors whose row ``i`` depends on ``seed + i`` alone.

    So row 1 of a batch of two drawn with seed 0 is what a batch of one draws with seed 1, which lets a test compare a
    sample in a batch with the same sample alone.
    """

    def __init__(self, seed: int, batch: int) -> None:
        """Start one stream of numbers per sample."""
        self._streams = [torch.Generator().manual_seed(seed + row) for row in range(batch)]

    def __call__(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Draw the next tensor of shape ``[batch, *shape]``."""
        return torch.stack([scale * torch.randn(shape, generator=stream) for stream in self._streams])


@torch.no_grad()
def settle(model: nn.Module, seed: int = 0, slow_time: bool = True) -> nn.Module:
    """Give ``model`` seeded weights in which nothing is zero, and put it into eval mode.

    Freshly built transformers start with zero gates and a zero output projection, and some leave pad tokens
    uninitialised: their blocks change nothing and equal builds differ. Here matrices get variance 1 / fan-in, norm
    scales scatter around 1 and biases around 0. As in a trained model the output changes slowly along the noise levels:
    the fast half of the sinusoids that encode time is turned down, unless ``slow_time`` is false (for a model that
    embeds times in 0..1 and not in 0..1000).
    """
    stream = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=stream)
        if parameter.ndim > 1:
            parameter.copy_(noise / math.sqrt(parameter[0].numel()))
        elif name.endswith("weight"):
            parameter.copy_(1 + 0.1 * noise)
        else:
            parameter.copy_(0.1 * noise)
    for module in model.modules() if slow_time else ():
        if isinstance(module, TimestepEmbedding):
            _slow_down(module.linear_1.weight)
        elif isinstance(module, TimestepEmbedder):
            _slow_down(module.mlp[0].weight)
        elif isinstance(module, ChromaApproximator):
            weight = module.in_proj.weight
            _slow_down(weight[:, : weight.shape[1] // 4])  # the rest reads guidance and the number of the modulation
    return model.eval()


def _slow_down(columns: torch.Tensor) -> None:
    """Damp what reads the fast half of the sinusoids in ``[cosines, sines]``, each from fast to slow."""
    frequencies = columns.shape[1] // 2
    columns.unflatten(1, (2, frequencies))[:, :, : frequencies // 2] *= 0.01
