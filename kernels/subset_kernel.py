"""The Triton form of subset attention: one pass over the keys, cut into parts where there are too few queries."""

from __future__ import annotations

import torch

from cachedit.kernels.registration import tl, triton

LOG2E = 1.4426950408889634
MOST_PARTS, PART_TILES = 8, 4  # parts of the keys at most; tiles of keys that a part has at least
MOST_ROWS = 64  # of a tile of queries
MERGED = 4  # rows that a program puts together

if triton is not None:

    @triton.jit
    def _absorb(
        q: tl.tensor, k: tl.tensor, v: tl.tensor, k_scale: tl.tensor, v_scale: tl.tensor, bias: tl.tensor,
        seen: tl.tensor, top: tl.tensor, mass: tl.tensor, total: tl.tensor, scale: tl.tensor,
    ) -> tl.tensor:  # fmt: skip
        """Take a tile of keys into the running maximum (of powers of two), sum and weighted values."""
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (k_scale * scale)[None, :] + bias[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        pivot = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen nothing stays at nothing
        weights, shrink = tl.exp2(scores - pivot[:, None]), tl.exp2(top - pivot)
        mass = mass * shrink + tl.sum(weights, 1)
        values = tl.dot((weights * v_scale[None, :]).to(v.dtype), v, input_precision="ieee")
        return higher, mass, total * shrink[:, None] + values

    @triton.jit
    def _kernel(
        q: tl.tensor, k_cache: tl.tensor, v_cache: tl.tensor, k_scale: tl.tensor, v_scale: tl.tensor, slots: tl.tensor,
        lengths: tl.tensor, positions: tl.tensor, bias: tl.tensor, fresh_k: tl.tensor, fresh_v: tl.tensor,
        out: tl.tensor, lse: tl.tensor, scale: tl.tensor, queries: tl.tensor, listed: tl.tensor, fresh: tl.tensor,
        frame: tl.tensor, cache_strides: tl.tensor, scale_strides: tl.tensor, HEADS: tl.constexpr,
        KV_HEADS: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
        KEYS: tl.constexpr, PARTS: tl.constexpr, LOG2E: tl.constexpr,
    ) -> None:  # fmt: skip
        batch, kv_head = tl.program_id(0).to(tl.int64) // KV_HEADS, tl.program_id(0) % KV_HEADS
        part, GROUP = tl.program_id(2), HEADS // KV_HEADS
        packed = tl.program_id(1) * ROWS + tl.arange(0, ROWS)  # (query, head of its group): they share a tile of keys
        query, dim = packed // GROUP, tl.arange(0, DIMS)[None, :]
        alive = query < queries
        row = (batch * queries + query) * HEADS + kv_head * GROUP + packed % GROUP
        rows = tl.load(q + row[:, None] * D + dim, alive[:, None] & (dim < D), 0.0)
        top, mass = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
        total = tl.zeros([ROWS, DIMS], tl.float32)
        one, none = tl.full([KEYS], 1.0, tl.float32), tl.zeros([KEYS], tl.float32)
        keys = listed
        if lengths is not None:
            keys = tl.minimum(tl.load(lengths + batch).to(tl.int32), keys)
        if positions is not None:
            stage = tl.load(positions + batch * queries + query, alive, 0).to(tl.int32) // BLOCK
            newest = tl.max(tl.where(alive, stage, 0), 0)
            if slots is None:
                keys = tl.minimum(keys, (newest + 1) * BLOCK)  # what lies behind, no row of the tile sees
        share = tl.cdiv(tl.cdiv(keys, PARTS), KEYS) * KEYS
        for start in range(part * share, tl.minimum((part + 1) * share, keys), KEYS):
            key = start + tl.arange(0, KEYS)
            live, slot = key < keys, key
            if slots is not None:
                slot = tl.load(slots + batch * listed + key, live, 0).to(tl.int32)
            seen, extra, k_unit, v_unit = live[None, :], none, one, one
            if positions is not None:
                live = live & (slot // BLOCK <= newest)
                seen = live[None, :] & (slot[None, :] // BLOCK <= stage[:, None])
            if bias is not None:
                extra = tl.load(bias + slot // frame, live, 0.0) * LOG2E
                live = live & (extra > float("-inf"))
            place = batch * cache_strides[0] + slot.to(tl.int64) * cache_strides[1] + kv_head * cache_strides[2]
            read = live[:, None] & (dim < D)  # slots that no row of the tile sees may hold anything
            k = tl.load(k_cache + place[:, None] + dim, read, 0.0).to(rows.dtype)
            v = tl.load(v_cache + place[:, None] + dim, read, 0.0).to(rows.dtype)
            if k_scale is not None:
                unit = batch * scale_strides[0] + slot.to(tl.int64) * scale_strides[1] + kv_head * scale_strides[2]
                k_unit, v_unit = tl.load(k_scale + unit, live, 0.0), tl.load(v_scale + unit, live, 0.0)
            top, mass, total = _absorb(rows, k, v, k_unit, v_unit, extra, seen, top, mass, total, scale)
        if fresh_k is not None:  # noqa: SIM102  known when it is compiled, unlike the part
            if part == PARTS - 1:
                for start in range(0, fresh, KEYS):
                    key = start + tl.arange(0, KEYS)
                    place = ((batch * fresh + key) * KV_HEADS + kv_head)[:, None] * D
                    read = (key < fresh)[:, None] & (dim < D)
                    k, v = tl.load(fresh_k + place + dim, read, 0.0), tl.load(fresh_v + place + dim, read, 0.0)
                    seen = (key < fresh)[None, :]
                    top, mass, total = _absorb(rows, k, v, one, one, none, seen, top, mass, total, scale)
        row += part.to(tl.int64) * (tl.num_programs(0) // KV_HEADS) * queries * HEADS
        total = total / tl.where(mass > 0, mass, 1.0)[:, None]
        tl.store(out + row[:, None] * D + dim, total.to(out.dtype.element_ty), alive[:, None] & (dim < D))
        tl.store(lse + row, tl.where(mass > 0, (top + tl.log2(mass)) / LOG2E, float("-inf")), alive)

    @triton.jit
    def _merge(
        parts: tl.tensor, part_lse: tl.tensor, out: tl.tensor, lse: tl.tensor, count: tl.tensor, D: tl.constexpr,
        DIMS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    ) -> None:  # fmt: skip
        """Put the parts of a row together, always in the same order."""
        row, dim = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, DIMS)[None, :]
        alive = row < count
        inside = alive[:, None] & (dim < D)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        for part in tl.static_range(PARTS):
            top = tl.maximum(top, tl.load(part_lse + part * count + row, alive, float("-inf")))
        pivot = tl.where(top == float("-inf"), 0.0, top)
        mass, total = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, DIMS], tl.float32)
        for part in tl.static_range(PARTS):
            at = row + part * count
            weight = tl.exp(tl.load(part_lse + at, alive, float("-inf")) - pivot)
            mass += weight
            total += weight[:, None] * tl.load(parts + at[:, None] * D + dim, inside, 0.0)
        total = total / tl.where(mass > 0, mass, 1.0)[:, None]
        tl.store(out + row[:, None] * D + dim, total.to(out.dtype.element_ty), inside)
        tl.store(lse + row, tl.where(mass > 0, pivot + tl.log(mass), float("-inf")), alive)


def parts_for(programs: int, keys: int, tile: int, processors: int) -> int:
    """Parts of the keys that give every multiprocessor two programs, as far as the keys go round."""
    wanted = -(-2 * processors // max(programs, 1))
    return max(1, min(wanted, MOST_PARTS, keys // (PART_TILES * tile)))


def launch(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None, slots: torch.Tensor | None, lengths: torch.Tensor | None,
    positions: torch.Tensor | None, block: int, bias: torch.Tensor | None, frame: int, fresh_k: torch.Tensor | None,
    fresh_v: torch.Tensor | None, scale: float, device: tuple[int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention on the device, as the reference defines it.

    Args:
        device: its number of multiprocessors and major compute capability; None asks the device of ``q``.
    """
    q = q.contiguous()
    fresh_k, fresh_v, slots, lengths, positions = (
        x if x is None else x.contiguous() for x in (fresh_k, fresh_v, slots, lengths, positions)
    )
    (batch, queries, heads, dim), kv_heads = q.shape, k_cache.shape[2]
    out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)
    if not out.numel():
        return out, lse
    listed = k_cache.shape[1] if slots is None else slots.shape[1]
    packed, dims = queries * heads // kv_heads, max(triton.next_power_of_2(dim), 16)
    exact = q.dtype == torch.float32  # products of fp32 leave the tensor cores alone, and need more registers
    rows = min(MOST_ROWS // 2 if exact else MOST_ROWS, max(16, triton.next_power_of_2(packed)))
    if device is None:
        found = torch.cuda.get_device_properties(q.device)
        device = found.multi_processor_count, found.major
    large = exact or dims > 128
    tight = device[1] < 9 and rows * dims > 64 * 64  # before Hopper the registers of four warps do not hold so much
    keys, grid = 32 if large else 64, (batch * kv_heads, triton.cdiv(packed, rows))
    parts = parts_for(grid[0] * grid[1], listed, keys, device[0])
    partial = (out, lse) if parts == 1 else (
        q.new_empty((parts, *q.shape), dtype=torch.float32), q.new_empty((parts, *lse.shape), dtype=torch.float32)
    )  # fmt: skip
    with torch.cuda.device_of(q):
        _kernel[(*grid, parts)](
            q, k_cache, v_cache, k_scale, v_scale, slots, lengths, positions,
            None if bias is None else bias.float().contiguous(), fresh_k, fresh_v, *partial, scale * LOG2E, queries,
            listed, 0 if fresh_k is None else fresh_k.shape[1], frame, k_cache.stride()[:3],
            (0, 0, 0) if k_scale is None else k_scale.stride(), HEADS=heads, KV_HEADS=kv_heads, D=dim, DIMS=dims,
            BLOCK=block, ROWS=rows, KEYS=keys, PARTS=parts, LOG2E=LOG2E, num_warps=8 if large or tight else 4,
            num_stages=2,
        )  # fmt: skip
        if parts > 1:
            count = lse.numel()
            _merge[(triton.cdiv(count, MERGED),)](
                *partial, out, lse, count, D=dim, DIMS=dims, ROWS=MERGED, PARTS=parts, num_warps=4
            )
    return out, lse
