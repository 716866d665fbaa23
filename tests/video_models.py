"""Tiny causal video models in float64 and their oracle: the stock model under a dense mask."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import nn

from cachedit.video import Branch, CausalNetwork, RollingKVCache

CHANNELS, SIZE, TOKENS = 4, 8, 16  # latents [B, 4, F, 8, 8], a frame is 4 x 4 tokens
TEXT = 16


@contextmanager
def float64_throughout() -> Iterator[None]:
    """Stock Wan blocks call ``float()`` around norms and residuals, which would end float64 checks at 1e-7."""
    stock = torch.Tensor.float

    def wide(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return x if x.dtype == torch.float64 else stock(x, *args, **kwargs)

    torch.Tensor.float = wide  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.Tensor.float = stock  # type: ignore[method-assign]


def tiny(cls: Any = WanTransformer3DModel, dtype: torch.dtype = torch.float64, **sizes: Any) -> Any:
    """A random model whose attention matters: two heads of 24 channels, three layers."""
    torch.manual_seed(0)
    model = cls(
        **{
            "patch_size": (1, 2, 2),
            "num_attention_heads": 2,
            "attention_head_dim": 24,
            "in_channels": CHANNELS,
            "out_channels": CHANNELS,
            "text_dim": TEXT,
            "freq_dim": 32,
            "ffn_dim": 64,
            "num_layers": 3,
            "rope_max_seq_len": 128,
            **sizes,
        }
    )
    for parameter in model.parameters():
        if parameter.ndim > 1:
            fan = parameter.shape[-1] if parameter.ndim == 2 else parameter[0].numel()
            nn.init.normal_(parameter, std=0.6 / math.sqrt(fan))
    return model.eval().requires_grad_(False).to(dtype)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Seeded normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class Masked(WanAttnProcessor):
    """The stock processor under a mask."""

    def __init__(self, mask: torch.Tensor | None) -> None:
        super().__init__()
        self.mask = mask

    def __call__(self, attn: Any, x: Any, text: Any = None, mask: Any = None, rotary: Any = None) -> torch.Tensor:
        return super().__call__(attn, x, text, self.mask if text is None else None, rotary)


def seen(blocks: Sequence[int], window: int | None = None, sink: int = 0, tokens: int = TOKENS) -> torch.Tensor:
    """Which tokens see which: all of their own block and before, of these only the sink and the last of a window."""
    frames = sum(blocks)
    mask, start = torch.zeros(frames, frames, dtype=torch.bool), 0
    for block in blocks:
        stop = start + block
        first = 0 if window is None else max(sink, stop - (window - sink))
        mask[start:stop, first:stop] = True
        mask[start:stop, : min(sink, stop)] = True
        start = stop
    return mask.repeat_interleave(tokens, 0).repeat_interleave(tokens, 1)


def whole(model: Any, x: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor, mask: Any) -> torch.Tensor:
    """The stock model on all frames at once, under a mask."""
    old = [block.attn1.processor for block in model.blocks]
    for block in model.blocks:
        block.attn1.set_processor(Masked(mask))
    found = model(x, timestep, text, return_dict=False)[0]
    for block, processor in zip(model.blocks, old, strict=True):
        block.attn1.set_processor(processor)
    return found


def chunks(
    model: Any, cache: RollingKVCache, x: torch.Tensor, timestep: float, text: torch.Tensor, sizes: Sequence[int]
) -> torch.Tensor:
    """The model on one block after the other, each committed as it is."""
    branch, found, start = Branch(text, cache), [], 0
    with CausalNetwork(model).attached() as network:
        for size in sizes:
            found.append(network(branch, x[:, :, start : start + size], timestep, commit=1))
            start += size
    return torch.cat(found, 2)


def far(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference over the largest value."""
    return float((ours - theirs).abs().max() / theirs.abs().max())
