"""Norm and rotate the queries and keys of the computed tokens, and write keys and values to slots, in one pass."""

from __future__ import annotations

import torch
from torch.nn import functional

from cachedit.kernels.kv_cache import KVCache
from cachedit.kernels.registration import refuse_gradients, register, tl, triton

LEAST_SCALE = 1e-8  # of int8: a row of zeros must not divide by zero


def _reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None,
    slots: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None, eps: float,
    interleaved: bool,
) -> torch.Tensor:  # fmt: skip
    q_rotated, k_rotated = (
        _rotated(_normed(x, weight, eps), cos, sin, interleaved) for x, weight in ((q, q_norm), (k, k_norm))
    )
    where = torch.arange(len(slots), device=slots.device)[:, None], slots.long()
    for rows, cache, scale in ((k_rotated, k_cache, k_scale), (v, v_cache, v_scale)):
        if scale is not None:
            rows = rows.to(_wide(rows))
            step = (rows.abs().amax(-1) / 127).clamp_min(LEAST_SCALE)
            rows, scale[where] = (rows * step.reciprocal()[..., None] + 0.5).floor(), step.to(scale.dtype)
        cache[where] = rows.to(cache.dtype)
    return q_rotated.to(q.dtype, copy=q_rotated is q, memory_format=torch.contiguous_format)


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _normed(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """RMSNorm over the channels of a head, or of all heads, as many as the weight has; not rounded."""
    x = x.to(_wide(x))
    if weight is None:
        return x
    rows = x if weight.numel() == x.shape[-1] else x.flatten(-2)
    return functional.rms_norm(rows, (weight.numel(),), weight.to(x.dtype), eps).view(x.shape)


def _rotated(x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None, interleaved: bool) -> torch.Tensor:
    """Rotate the pairs of the leading channels; the others pass."""
    if cos is None or sin is None:
        return x
    c, s, half = cos[:, :, None].to(x.dtype), sin[:, :, None].to(x.dtype), cos.shape[-1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = turned.unflatten(-1, (half, 2)).unbind(-1) if interleaved else turned.chunk(2, -1)
    pairs = a * c - b * s, b * c + a * s
    if interleaved:
        return torch.cat([torch.stack(pairs, -1).flatten(-2), rest], -1)
    return torch.cat([*pairs, rest], -1)


def _fake(q: torch.Tensor, *_: object) -> torch.Tensor:
    return q.new_empty(q.shape)


if triton is not None:

    @triton.jit
    def _pairs_of(
        x: tl.tensor, head: tl.tensor, stride: tl.tensor, HEADS: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr,
        HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    ) -> tl.tensor:  # fmt: skip
        """The rows of all heads as two tiles [heads, pairs] that rotate into each other, in fp32."""
        row = x + head * stride
        if INTERLEAVED:  # a row is read as it lies and taken apart in registers
            channel = tl.arange(0, 2 * PAIRS)[None, :]
            whole = tl.load(row + channel, (head < HEADS) & (channel < D), 0.0).to(tl.float32)
            return tl.split(tl.reshape(whole, [whole.shape[0], PAIRS, 2]))
        pair = tl.arange(0, PAIRS)[None, :]
        first, second = _places(pair, D, HALF)
        inside = (head < HEADS) & (pair < D // 2)
        return tl.load(row + first, inside, 0.0).to(tl.float32), tl.load(row + second, inside, 0.0).to(tl.float32)

    @triton.jit
    def _places(pair: tl.tensor, D: tl.constexpr, HALF: tl.constexpr) -> tl.tensor:
        """Channels of a pair: half a rotation apart; behind the rotated ones, half of what passes apart."""
        if HALF == 0 or 2 * HALF == D:
            return pair, pair + D // 2
        return tl.where(pair < HALF, pair, pair + HALF), tl.where(pair < HALF, pair + HALF, pair + D // 2)

    @triton.jit
    def _store(
        a: tl.tensor, b: tl.tensor, to: tl.tensor, scale: tl.tensor, scale_stride: tl.tensor, head: tl.tensor,
        stride: tl.tensor, HEADS: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, HALF: tl.constexpr,
        INTERLEAVED: tl.constexpr, LEAST: tl.constexpr,
    ) -> None:  # fmt: skip
        """Write two tiles back as rows, in int8 if there is a scale to write."""
        if scale is not None:
            step = tl.maximum(tl.max(tl.maximum(tl.abs(a), tl.abs(b)), 1, keep_dims=True) / 127, LEAST)
            tl.store(scale + head * scale_stride, step, head < HEADS)
            a, b = tl.floor(a * (1.0 / step) + 0.5), tl.floor(b * (1.0 / step) + 0.5)
        row = to + head * stride
        if INTERLEAVED:
            channel = tl.arange(0, 2 * PAIRS)[None, :]
            whole = tl.reshape(tl.join(a, b), [a.shape[0], 2 * PAIRS])
            tl.store(row + channel, whole.to(to.dtype.element_ty), (head < HEADS) & (channel < D))
        else:
            pair = tl.arange(0, PAIRS)[None, :]
            first, second = _places(pair, D, HALF)
            inside = (head < HEADS) & (pair < D // 2)
            tl.store(row + first, a.to(to.dtype.element_ty), inside)
            tl.store(row + second, b.to(to.dtype.element_ty), inside)

    @triton.jit
    def _turned(
        x: tl.tensor, norm: tl.tensor, cos: tl.tensor, sin: tl.tensor, head: tl.tensor, stride: tl.tensor,
        eps: tl.tensor, HEADS: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, HALF: tl.constexpr,
        ALL: tl.constexpr, INTERLEAVED: tl.constexpr,
    ) -> tl.tensor:  # fmt: skip
        """A token's rows, normed over a head or over all, and rotated."""
        a, b = _pairs_of(x, head, stride, HEADS, D, PAIRS, HALF, INTERLEAVED)
        if norm is not None:
            square = tl.sum(a * a + b * b, 1, keep_dims=True) / D
            if ALL:
                square = tl.sum(square, 0, keep_dims=True) / HEADS
            rate = 1.0 / tl.sqrt(square + eps)
            over_a, over_b = _pairs_of(norm, head, D if ALL else 0, HEADS, D, PAIRS, HALF, INTERLEAVED)
            a, b = a * rate * over_a, b * rate * over_b
        if cos is not None:
            pair = tl.arange(0, PAIRS)[None, :]
            c, s = tl.load(cos + pair, pair < HALF, 1.0), tl.load(sin + pair, pair < HALF, 0.0)
            a, b = a * c - b * s, b * c + a * s
        return a, b

    @triton.jit
    def _kernel(
        q: tl.tensor, k: tl.tensor, v: tl.tensor, cos: tl.tensor, sin: tl.tensor, slots: tl.tensor, k_cache: tl.tensor,
        v_cache: tl.tensor, k_scale: tl.tensor, v_scale: tl.tensor, q_norm: tl.tensor, k_norm: tl.tensor,
        out: tl.tensor, eps: tl.tensor, tokens: tl.tensor, capacity: tl.tensor, q_strides: tl.tensor,
        k_strides: tl.tensor, v_strides: tl.tensor, cache_strides: tl.tensor, scale_strides: tl.tensor,
        HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr,
        KV_TILE: tl.constexpr, PAIRS: tl.constexpr, Q_ALL: tl.constexpr, K_ALL: tl.constexpr,
        INTERLEAVED: tl.constexpr, LEAST: tl.constexpr,
    ) -> None:  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        batch, token = row // tokens, row % tokens
        if cos is not None:
            cos, sin = cos + row * HALF, sin + row * HALF
        head, kv_head = tl.arange(0, TILE)[:, None], tl.arange(0, KV_TILE)[:, None]
        if tl.program_id(1) == 0:
            q += batch * q_strides[0] + token * q_strides[1]
            a, b = _turned(q, q_norm, cos, sin, head, q_strides[2], eps, HEADS, D, PAIRS, HALF, Q_ALL, INTERLEAVED)
            _store(a, b, out + row * HEADS * D, None, 0, head, D, HEADS, D, PAIRS, HALF, INTERLEAVED, LEAST)
        else:
            slot = tl.load(slots + row).to(tl.int64)
            if (slot >= 0) & (slot < capacity):  # a wrong slot must not write into somebody else's memory
                k += batch * k_strides[0] + token * k_strides[1]
                v += batch * v_strides[0] + token * v_strides[1]
                k_cache += batch * cache_strides[0] + slot * cache_strides[1]
                v_cache += batch * cache_strides[0] + slot * cache_strides[1]
                if k_scale is not None:
                    k_scale += batch * scale_strides[0] + slot * scale_strides[1]
                    v_scale += batch * scale_strides[0] + slot * scale_strides[1]
                to, unit = cache_strides[2], scale_strides[2]
                a, b = _turned(
                    k, k_norm, cos, sin, kv_head, k_strides[2], eps, KV_HEADS, D, PAIRS, HALF, K_ALL, INTERLEAVED
                )
                _store(a, b, k_cache, k_scale, unit, kv_head, to, KV_HEADS, D, PAIRS, HALF, INTERLEAVED, LEAST)
                a, b = _pairs_of(v, kv_head, v_strides[2], KV_HEADS, D, PAIRS, HALF, INTERLEAVED)
                _store(a, b, v_cache, v_scale, unit, kv_head, to, KV_HEADS, D, PAIRS, HALF, INTERLEAVED, LEAST)


def _launch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None,
    slots: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None, eps: float,
    interleaved: bool,
) -> torch.Tensor:  # fmt: skip
    if q.dtype == torch.float64:
        return _reference(
            q, k, v, cos, sin, slots, k_cache, v_cache, k_scale, v_scale, q_norm, k_norm, eps, interleaved
        )
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    (batch, tokens, heads, dim), kv_heads, out = q.shape, k.shape[2], q.new_empty(q.shape)
    if not batch * tokens:
        return out
    tile, kv_tile = triton.next_power_of_2(heads), triton.next_power_of_2(kv_heads)
    pairs = triton.next_power_of_2(dim // 2)
    with torch.cuda.device_of(q):
        _kernel[(batch * tokens, 2)](
            q, k, v, *(None if x is None else x.float().contiguous() for x in (cos, sin)), slots.contiguous(), k_cache,
            v_cache, k_scale, v_scale, *(None if x is None else x.contiguous() for x in (q_norm, k_norm)), out, eps,
            tokens, k_cache.shape[1], q.stride()[:3], k.stride()[:3], v.stride()[:3], k_cache.stride()[:3],
            (0, 0, 0) if k_scale is None else k_scale.stride(), HEADS=heads, KV_HEADS=kv_heads, D=dim,
            HALF=0 if cos is None else cos.shape[-1], TILE=tile, KV_TILE=kv_tile, PAIRS=pairs,
            Q_ALL=q_norm is not None and q_norm.numel() != dim, K_ALL=k_norm is not None and k_norm.numel() != dim,
            INTERLEAVED=interleaved, LEAST=LEAST_SCALE, num_warps=min(max(tile * pairs // 256, 4), 16),
        )  # fmt: skip
    return out


_operation = register(
    "rope_scatter_kv",
    "(Tensor q, Tensor k, Tensor v, Tensor? cos, Tensor? sin, Tensor slots, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor(c!)? k_scale, Tensor(d!)? v_scale, Tensor? q_norm, Tensor? k_norm, float eps, bool interleaved) -> Tensor",
    _reference,
    _fake,
    _launch if triton is not None else None,
)


def rope_scatter_kv(
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
) -> torch.Tensor:
    """Norm and rotate the rows of the computed tokens; keys and values go into their slots of the cache.

    Everything is computed in fp32 and rounded once, to what it is stored as.

    Args:
        q: queries as the projection gave them, [B, N, H, D], D even.
        k: keys [B, N, Hk, D].
        v: values [B, N, Hk, D].
        cos: cosines of the rows' angles, [N, R / 2] or [B, N, R / 2]: the leading R <= D channels of a head are
            rotated; None rotates nothing.
        sin: sines of them.
        slots: where the rows go, integers [N] or [B, N]; rows of one sample that share a slot must be equal.
        cache: written in place.
        q_norm: weight of an RMSNorm before the rotation, [D] for one over each head, [H * D] for one over all.
        k_norm: the same for the keys, [D] or [Hk * D].
        eps: of both norms.
        interleaved: True if channels 2i and 2i + 1 rotate into each other, False for i and i + R / 2.

    Returns:
        The queries, normed and rotated, [B, N, H, D].

    Raises:
        ValueError: the shapes do not fit together.
        RuntimeError: a gradient is asked for.
    """
    cache.check("rope_scatter_kv")
    batch, tokens, heads, dim = q.shape
    slots = slots.expand(batch, tokens)
    if cos is not None and sin is not None:
        cos, sin = (x.expand(batch, tokens, x.shape[-1]) for x in (cos, sin))
    _check(q, k, v, cos, q_norm, k_norm, cache)
    refuse_gradients("rope_scatter_kv", [q, k, v, cos, sin, *cache, q_norm, k_norm])
    return _operation(q, k, v, cos, sin, slots, *cache, q_norm, k_norm, eps, interleaved)


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor | None, q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None, cache: KVCache,
) -> None:  # fmt: skip
    batch, tokens, heads, dim = q.shape
    kept_batch, _, kv_heads, kept_dim = cache.k.shape
    shapes = {"keys": k, "values": v}
    for name, x in shapes.items():
        if tuple(x.shape) != (batch, tokens, kv_heads, dim) or (kept_batch, kept_dim) != (batch, dim) or dim % 2:
            raise ValueError(
                f"rope_scatter_kv got queries {list(q.shape)}, {name} {list(x.shape)} and a cache of "
                f"{list(cache.k.shape)}; allowed: [batch, tokens, heads, an even number of channels], with the "
                "heads of the cache. Split the projections into heads first."
            )
    if cos is not None and 2 * cos.shape[-1] > dim:
        raise ValueError(
            f"rope_scatter_kv got {cos.shape[-1]} angles for {dim} channels; allowed: at most {dim // 2}, one for each "
            "pair. Tables that repeat every angle must be cut to half."
        )
    for count, norm in ((heads, q_norm), (kv_heads, k_norm)):
        if norm is not None and norm.numel() not in (dim, count * dim):
            raise ValueError(
                f"rope_scatter_kv got a norm of {norm.numel()} weights; allowed: {dim} for one over each head, or "
                f"{count * dim} for one over all. Pass the weight of the model's own norm."
            )
