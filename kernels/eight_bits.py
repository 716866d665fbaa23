"""Keys and values in eight bits: int8 with one scale per row and head, or fp8, whose own exponents do."""

from __future__ import annotations

import torch

from cachedit.kernels.rope_scatter_kv import LEAST_SCALE

FORMATS = {None: None, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
LARGEST_FP8 = 448.0  # beyond it the cast gives NaN


def narrowed(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A tensor [..., D] in another dtype, and for int8 its step, fp32 [...]; perhaps ``x`` itself."""
    if dtype == torch.int8:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        step = (wide.abs().amax(-1) / 127).clamp_min(LEAST_SCALE)
        return (wide / step[..., None]).round().to(dtype), step.to(torch.float32)
    if dtype == torch.float8_e4m3fn:
        x = x.clamp(-LARGEST_FP8, LARGEST_FP8)
    return x.to(dtype), None


def widened(x: torch.Tensor, step: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """What ``narrowed`` has kept, in a dtype of the model; the tensor itself where nothing is to be done."""
    x = x.to(dtype)
    return x if step is None else x * step[..., None].to(dtype)
