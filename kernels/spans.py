"""Runs of a cache's rows, written and read by plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cachedit.kernels.eight_bits import narrowed, widened
from cachedit.kernels.kv_cache import KVCache

Span = tuple[int, int]  # rows [start, stop)


def store(cache: KVCache, spans: Sequence[Span], k: torch.Tensor | None, v: torch.Tensor | None) -> None:
    """Write keys and values [B, N, H, D] to the rows of ``spans`` in turn; None writes none."""
    for x, buffer, scale in zip((k, v), cache[:2], cache[2:], strict=True):
        if x is None:
            continue
        done = 0
        for start, stop in spans:
            part = x[:, done : done + stop - start]
            done += part.shape[1]
            buffer[:, start:stop], step = narrowed(part, buffer.dtype)
            if scale is not None and step is not None:
                scale[:, start:stop] = step


def load(cache: KVCache, span: Span, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [B, N, H, D] of a run; views where nothing has to be turned back to ``dtype``."""
    start, stop = span
    keys, values = (
        widened(buffer[:, start:stop], None if scale is None else scale[:, start:stop], dtype)
        for buffer, scale in zip(cache[:2], cache[2:], strict=True)
    )
    return keys, values
