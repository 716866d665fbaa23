"""Runs of a cache's rows, written and read by plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cachedit.kernels.kv_cache import KVCache
from cachedit.kernels.rope_scatter_kv import LEAST_SCALE

Span = tuple[int, int]  # rows [start, stop)
LARGEST_FP8 = 448.0  # beyond it the cast gives NaN


def store(cache: KVCache, spans: Sequence[Span], k: torch.Tensor | None, v: torch.Tensor | None) -> None:
    """Write keys and values [B, N, H, D] to the rows of ``spans`` in turn; None writes none.

    int8 keeps one scale per row and head beside it; fp8 has its own exponents and needs none.
    """
    for x, buffer, scale in zip((k, v), cache[:2], cache[2:], strict=True):
        if x is None:
            continue
        done = 0
        for start, stop in spans:
            part = x[:, done : done + stop - start]
            done += part.shape[1]
            if scale is not None:
                wide = part.to(torch.promote_types(part.dtype, torch.float32))
                step = (wide.abs().amax(-1) / 127).clamp_min(LEAST_SCALE)
                part = (wide / step[..., None]).round()
                scale[:, start:stop] = step.to(scale.dtype)
            elif buffer.dtype == torch.float8_e4m3fn:
                part = part.clamp(-LARGEST_FP8, LARGEST_FP8)
            buffer[:, start:stop] = part.to(buffer.dtype)


def load(cache: KVCache, span: Span, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [B, N, H, D] of a run; views where nothing has to be turned back to ``dtype``."""
    start, stop = span
    found = []
    for buffer, scale in zip(cache[:2], cache[2:], strict=True):
        rows = buffer[:, start:stop]
        if rows.dtype != dtype:
            rows = rows.to(dtype)
            rows = rows if scale is None else rows * scale[:, start:stop, :, None].to(dtype)
        found.append(rows)
    return found[0], found[1]
