"""A cached attention layer in one call: our kernels where there are any, else index writes and torch's attention."""

from __future__ import annotations

import torch
from torch.nn import functional

from cachedit.kernels.kv_cache import KVCache
from cachedit.kernels.registration import run_on
from cachedit.kernels.rope_scatter_kv import rope_scatter_kv
from cachedit.kernels.subset_attention import Pair, check, gather, mask, subset_attention


def cached_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    slots: torch.Tensor,
    cache: KVCache,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    read: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    block: int = 0,
    bias: torch.Tensor | None = None,
    frame: int = 1,
    fresh: Pair | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Write the keys and values of the computed tokens to their slots, then let the tokens attend over the cache.

    The arguments up to ``interleaved`` are those of ``rope_scatter_kv``; the others are those of ``subset_attention``,
    whose ``slots`` is called ``read`` here.

    Returns:
        What the tokens read, [B, N, H, D].

    Raises:
        ValueError: the shapes or options do not fit together.
        RuntimeError: a gradient is asked for.
    """
    q = rope_scatter_kv(q, k, v, cos, sin, slots, cache, q_norm=q_norm, k_norm=k_norm, eps=eps, interleaved=interleaved)
    if run_on(q):
        return subset_attention(
            q, cache, slots=read, lengths=lengths, positions=positions, block=block, bias=bias, frame=frame,
            fresh=fresh, scale=scale,
        )[0]  # fmt: skip
    read, positions = check(q, cache, read, positions, block, bias, frame, fresh)
    added = mask(cache, read, lengths, positions, block, bias, frame, fresh)
    keys, values = gather(cache, read, fresh, added, q.dtype)
    added = None if added is None else added[:, None].to(q.dtype)
    q, keys, values = (x.transpose(1, 2) for x in (q, keys, values))
    found = functional.scaled_dot_product_attention(q, keys, values, added, scale=scale, enable_gqa=True)
    return found.transpose(1, 2)
