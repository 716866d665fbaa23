"""Attention of the computed queries over cached keys and values, and perhaps over fresh ones behind them."""

from __future__ import annotations

import math

import torch

from cachedit.kernels.kv_cache import KVCache
from cachedit.kernels.registration import refuse_gradients, register, triton
from cachedit.kernels.subset_kernel import launch

Pair = tuple[torch.Tensor, torch.Tensor]
FEW = 256  # queries of a key head: up to about so many a large GPU spends more time on reading keys than on arithmetic


def _reference(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None, slots: torch.Tensor | None, lengths: torch.Tensor | None,
    positions: torch.Tensor | None, block: int, bias: torch.Tensor | None, frame: int, fresh_k: torch.Tensor | None,
    fresh_v: torch.Tensor | None, scale: float,
) -> Pair:  # fmt: skip
    dtype, kv_heads = torch.promote_types(q.dtype, torch.float32), k_cache.shape[2]
    cache, fresh = KVCache(k_cache, v_cache, k_scale, v_scale), None
    if fresh_k is not None and fresh_v is not None:
        fresh = fresh_k, fresh_v
    added = mask(cache, slots, lengths, positions, block, bias, frame, fresh)
    keys, values = gather(cache, slots, fresh, added, dtype)
    groups = q.to(dtype).unflatten(2, (kv_heads, -1))  # [B, M, Hk, G, D]
    scores = torch.einsum("bmhgd,bnhd->bmhgn", groups, keys) * scale
    if added is not None:
        scores = scores + added[:, :, None, None].to(dtype)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -math.inf, 0)[..., None]).exp()
    out = torch.einsum("bmhgn,bnhd->bmhgd", weights, values)
    return out.flatten(2, 3).to(q.dtype).contiguous(), lse.flatten(2, 3).float().contiguous()


def gather(
    cache: KVCache, slots: torch.Tensor | None, fresh: Pair | None, added: torch.Tensor | None, dtype: torch.dtype
) -> Pair:
    """Keys and values that are read [B, L, Hk, D], the fresh ones last; zero where ``added`` lets no query see them."""
    found = []
    for rows, unit, new in zip(cache[:2], cache[2:], fresh or (None, None), strict=True):
        if slots is not None:
            where = torch.arange(len(slots), device=slots.device)[:, None], slots.long()
            rows, unit = rows[where], None if unit is None else unit[where]
        rows = rows.to(dtype) if unit is None else rows.to(dtype) * unit[..., None].to(dtype)
        if new is not None:
            rows = torch.cat([rows, new.to(dtype)], 1)
        if added is not None:  # slots that nobody sees may hold anything, and zero times anything is not zero
            rows = rows.masked_fill((added == -math.inf).all(1)[:, :, None, None], 0)
        found.append(rows)
    return found[0], found[1]


def mask(
    cache: KVCache, slots: torch.Tensor | None, lengths: torch.Tensor | None, positions: torch.Tensor | None,
    block: int, bias: torch.Tensor | None, frame: int, fresh: Pair | None,
) -> torch.Tensor | None:  # fmt: skip
    """What is added to the scores [B or 1, M or 1, L] in fp32, -inf where a key is not seen; None for nothing."""
    if lengths is None and positions is None and bias is None:
        return None
    count = cache.k.shape[1] if slots is None else slots.shape[1]
    order = torch.arange(count, device=cache.k.device)[None]
    at = order if slots is None else slots.long()  # [B or 1, L]
    added = torch.zeros(1, 1, count, device=at.device)
    if bias is not None:
        added = bias.float()[at // frame][:, None]
    if lengths is not None:
        added = torch.where((order < lengths[:, None])[:, None], added, -math.inf)
    if positions is not None:
        added = torch.where(at[:, None] // block <= positions[:, :, None] // block, added, -math.inf)
    if fresh is not None:
        added = torch.cat([added, added.new_zeros(*added.shape[:2], fresh[0].shape[1])], -1)
    return added


def _fake(q: torch.Tensor, *_: object) -> Pair:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


_operation = register(
    "subset_attention",
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? k_scale, Tensor? v_scale, Tensor? slots, Tensor? lengths, "
    "Tensor? positions, int block, Tensor? bias, int frame, Tensor? fresh_k, Tensor? fresh_v, float scale) "
    "-> (Tensor, Tensor)",
    _reference,
    _fake,
    launch if triton is not None else None,
)


def subset_attention(
    q: torch.Tensor,
    cache: KVCache,
    *,
    slots: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    block: int = 0,
    bias: torch.Tensor | None = None,
    frame: int = 1,
    fresh: Pair | None = None,
    scale: float | None = None,
) -> Pair:
    """Softmax attention of some queries over what is cached, in one pass over the keys, with its log-sum-exp.

    Query head i reads key head ``i * Hk // H``; nothing is repeated, concatenated or turned back from int8 in memory.
    Slots that no query may see may hold anything, NaN included.

    Args:
        q: queries, normed and rotated, [B, M, H, D].
        cache: of the keys and values, with Hk heads that divide H.
        slots: which slots are read, integers [L] or [B, L], each at most once; None reads all in order.
        lengths: how many of the slots count, the leading ones, integers [B]; None counts all.
        positions: of the queries, integers [M] or [B, M]: a query sees the slots of its own and of earlier blocks.
        block: slots of a block; with ``positions`` only.
        bias: what is added to the scores of a frame of slots, [F]; -inf hides the frame.
        frame: slots of a frame; with ``bias`` only.
        fresh: keys and values [B, N, Hk, D] that follow, seen by every query.
        scale: of the scores; None is ``D ** -0.5``.

    Returns:
        What the queries read [B, M, H, D], zero where they see nothing, and the log-sum-exp of their scores
        [B, M, H] in fp32, -inf there: results over different keys are merged by it.

    Raises:
        ValueError: the shapes or options do not fit together.
        RuntimeError: a gradient is asked for.
    """
    slots, positions = check(q, cache, slots, positions, block, bias, frame, fresh)
    fresh_k, fresh_v = fresh or (None, None)
    return _operation(
        q, *cache, slots, lengths, positions, block, bias, frame, fresh_k, fresh_v,
        q.shape[-1] ** -0.5 if scale is None else scale,
    )  # fmt: skip


def few(q: torch.Tensor, cache: KVCache) -> bool:
    """Whether reading the keys takes the time, rather than the arithmetic, for which torch has the better kernels."""
    return q.shape[1] * q.shape[2] <= FEW * cache.k.shape[2]


def check(
    q: torch.Tensor, cache: KVCache, slots: torch.Tensor | None, positions: torch.Tensor | None, block: int,
    bias: torch.Tensor | None, frame: int, fresh: Pair | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """Raise where the arguments of an attention do not fit together; returns slots [B, L] and positions [B, M]."""
    cache.check("subset_attention")
    batch, queries, heads, dim = q.shape
    if cache.k.shape[0] != batch or heads % cache.k.shape[2] or cache.k.shape[3] != dim:
        raise ValueError(
            f"subset_attention got queries {list(q.shape)} and a cache {list(cache.k.shape)}; allowed: equal batch and "
            "channels, and a multiple of the cache's heads. Split the projection into heads first."
        )
    if (positions is None) != (block == 0) or block < 0:
        raise ValueError(
            f"subset_attention got {'no positions' if positions is None else 'positions'} and block {block}; allowed: "
            "both, a block of at least one slot, or neither. Without blocks every query sees every slot."
        )
    if bias is not None and len(bias) * frame < cache.k.shape[1]:
        raise ValueError(
            f"subset_attention got a bias for {len(bias)} frames of {frame} slots, and {cache.k.shape[1]} slots; "
            "allowed: one number per frame of the cache. Hide unused frames with -inf."
        )
    new = fresh or (cache.k[:, :0], cache.v[:, :0])
    if any(x.shape != (batch, new[0].shape[1], *cache.k.shape[2:]) for x in new):
        raise ValueError(
            f"subset_attention got fresh keys and values {[list(x.shape) for x in new]} beside a cache "
            f"{list(cache.k.shape)}; allowed: any number of rows in the place of its slots. Split them into heads."
        )
    refuse_gradients("subset_attention", [q, *cache, bias, *new])
    slots = slots if slots is None else slots.expand(batch, slots.shape[-1])
    return slots, positions if positions is None else positions.expand(batch, queries)
