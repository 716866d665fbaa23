"""Cached attention: what is written, what is read, and the kernels against the references."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from kernel_numbers import close, normal
from torch.nn import functional

from cachedit.kernels import KVCache, cached_attention, rope_scatter_kv, subset_attention

NOTHING = dict.fromkeys(("slots", "lengths", "positions", "bias", "fresh"))


def permuted(batch: int, slots: int, count: int, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(slots, generator=draw)[:count] for _ in range(batch)]).int()


def filled(batch: int, slots: int, heads: int, dim: int, dtype: torch.dtype = torch.float32) -> KVCache:
    """A cache of random numbers; int8 with scales around those of random numbers."""
    draw, shape = torch.Generator().manual_seed(3), (batch, slots, heads, dim)
    if dtype != torch.int8:
        return KVCache(*(torch.randn(shape, generator=draw).to(dtype) for _ in range(2)))
    codes = (torch.randint(-127, 128, shape, generator=draw).to(torch.int8) for _ in range(2))
    return KVCache(*codes, *((torch.rand(shape[:3], generator=draw) + 0.5) / 60 for _ in range(2)))


def copied(cache: KVCache) -> KVCache:
    return KVCache(*(None if x is None else x.clone() for x in cache))  # type: ignore[arg-type]


# -- writing --------------------------------------------------------------------------------------------------------


def test_a_quarter_turn_by_hand() -> None:
    cache, q = KVCache.empty(1, 3, 1, 4, torch.float32), torch.tensor([[[[1.0, 2.0, 3.0, 4.0]]]])
    quarter = torch.zeros(1, 2), torch.ones(1, 2)  # (a, b) becomes (-b, a)
    assert rope_scatter_kv(q, q, q, *quarter, torch.tensor([2]), cache).flatten().tolist() == [-3, -4, 1, 2]
    assert cache.k[0, :, 0].tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [-3, -4, 1, 2]]
    assert cache.v[0, :, 0].tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [1, 2, 3, 4]]
    found = rope_scatter_kv(q, q, q, *quarter, torch.tensor([0]), cache, interleaved=True)
    assert found.flatten().tolist() == [-2, 1, -4, 3]
    half = torch.zeros(1, 1), torch.ones(1, 1)  # of four channels two are turned
    assert rope_scatter_kv(q, q, q, *half, torch.tensor([0]), cache).flatten().tolist() == [-2, 1, 3, 4]


@pytest.mark.parametrize("over", ["a head", "all heads"])
def test_norms_are_torch_s(over: str) -> None:
    q, k, v = normal(2, 3, 4, 8, seed=1), normal(2, 3, 2, 8, seed=2), normal(2, 3, 2, 8, seed=3)
    widths = (8, 8) if over == "a head" else (32, 16)
    weights = [normal(width, seed=9) for width in widths]
    cache = KVCache.empty(2, 3, 2, 8, torch.float32)
    found = rope_scatter_kv(q, k, v, None, None, torch.arange(3), cache, q_norm=weights[0], k_norm=weights[1], eps=1e-5)
    for ours, x, width, weight in zip((found, cache.k), (q, k), widths, weights, strict=True):
        wanted = functional.rms_norm(x.reshape(2, 3, -1, width), (width,), weight, 1e-5)
        torch.testing.assert_close(ours, wanted.reshape(x.shape))


def test_rotation_is_multiplication_of_complex_numbers() -> None:
    x, angles = normal(2, 5, 3, 8, dtype=torch.float64), normal(2, 5, 4, seed=1, dtype=torch.float64)
    cache = KVCache.empty(2, 5, 3, 8, torch.float64)
    found = rope_scatter_kv(x, x, x, angles.cos(), angles.sin(), torch.arange(5), cache, interleaved=True)
    turned = torch.view_as_complex(x.unflatten(-1, (4, 2))) * torch.exp(1j * angles)[:, :, None]
    torch.testing.assert_close(found, torch.view_as_real(turned).flatten(-2))
    torch.testing.assert_close(cache.k, found)


def test_int8_is_right_to_half_a_step_in_half_the_bytes() -> None:
    k, v = normal(1, 6, 2, 16, seed=1), normal(1, 6, 2, 16, seed=2)
    k[0, 3] = 0
    cache, wide = KVCache.empty(1, 8, 2, 16, torch.int8), KVCache.empty(1, 8, 2, 16)
    rope_scatter_kv(k, k, v, None, None, torch.arange(6), cache)
    assert cache.k_scale is not None
    assert cache.v_scale is not None
    for codes, unit, exact in ((cache.k, cache.k_scale, k), (cache.v, cache.v_scale, v)):
        error = (codes[:, :6] * unit[:, :6, :, None] - exact).abs()
        assert (error <= 0.501 * unit[:, :6, :, None]).all()
        assert codes[:, :6].abs().amax() == 127
        assert not codes[:, 6:].any()
    assert 2 * cache.k.nbytes == wide.k.nbytes


def test_equal_rows_may_share_a_slot() -> None:
    x, cache = normal(1, 1, 2, 4).expand(1, 3, 2, 4), KVCache.empty(1, 2, 2, 4, torch.float32)
    rope_scatter_kv(x, x, x, None, None, torch.tensor([1, 1, 1]), cache)
    assert cache.k[:, 1].equal(x[:, 0])
    assert not cache.k[:, 0].any()


@pytest.mark.parametrize("kept", [torch.float32, torch.int8], ids=str)
def test_equal_rows_may_share_a_slot_in_the_kernel(interpreter: Any, kept: torch.dtype) -> None:
    file, x = interpreter("rope_scatter_kv"), normal(1, 1, 2, 16).expand(1, 3, 2, 16)
    ours, wanted = (KVCache.empty(1, 4, 2, 16, kept) for _ in range(2))
    for write, cache in ((file._launch, ours), (file._reference, wanted)):
        write(x, x, x, None, None, torch.tensor([[2, 2, 0]]), *cache, None, None, 1e-6, False)
    for a, b in zip(ours, wanted, strict=True):
        if a is not None and b is not None:
            close(a, b)
    assert not ours.k[:, [1, 3]].any()


@dataclass
class Write:
    """One case of the writing kernel: heads, key heads, channels, turned pairs."""

    heads: int
    kv_heads: int
    dim: int
    half: int
    norm: str = ""


@pytest.mark.parametrize("kept", [torch.float32, torch.int8, torch.bfloat16], ids=str)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(
    "case",
    [
        Write(1, 1, 2, 1), Write(4, 2, 16, 8, "head"), Write(7, 1, 32, 6, "all"), Write(4, 4, 80, 40, "all"),
        Write(6, 3, 96, 0, "head"), Write(2, 1, 128, 32),
    ],
    ids=str,
)  # fmt: skip
def test_write_kernel(interpreter: Any, case: Write, interleaved: bool, kept: torch.dtype) -> None:
    file, batch, tokens, slots = interpreter("rope_scatter_kv"), 2, 3, 11
    dtype = torch.float32 if kept == torch.int8 else kept
    q, k, v = (
        normal(batch, tokens, heads, case.dim, seed=seed, dtype=dtype)
        for seed, heads in enumerate((case.heads, case.kv_heads, case.kv_heads))
    )
    angles = normal(batch, tokens, case.half, seed=5) if case.half else None
    turn = (None, None) if angles is None else (angles.cos(), angles.sin())
    widths = {"": (), "head": (case.dim,) * 2, "all": (case.heads * case.dim, case.kv_heads * case.dim)}[case.norm]
    norms = [normal(width, seed=7) for width in widths] or [None, None]
    where = permuted(batch, slots, tokens)
    before = filled(batch, slots, case.kv_heads, case.dim, kept)
    ours, wanted = copied(before), copied(before)
    close(
        file._launch(q, k, v, *turn, where, *ours, *norms, 1e-6, interleaved),
        file._reference(q, k, v, *turn, where, *wanted, *norms, 1e-6, interleaved),
    )
    for a, b in zip(ours, wanted, strict=True):
        if a is not None and b is not None:
            close(a, b)


def test_write_kernel_on_other_layouts(interpreter: Any) -> None:
    """A cache with heads before slots, and q, k and v as slices of one projection."""
    file = interpreter("rope_scatter_kv")
    q, k, v = normal(2, 3, 3, 4, 16).unbind(2)
    angles, where = normal(3, 8).expand(2, 3, 8), permuted(2, 9, 3).long()
    for dtype in (torch.float32, torch.int8):
        before = filled(2, 4, 9, 16, dtype)
        ours, wanted = (KVCache(*(None if x is None else x.clone().transpose(1, 2) for x in before)) for _ in range(2))
        found = file._launch(q, k, v, angles.cos(), angles.sin(), where, *ours, None, None, 1e-6, False)
        close(found, file._reference(q, k, v, angles.cos(), angles.sin(), where, *wanted, None, None, 1e-6, False))
        torch.testing.assert_close(ours, wanted)


def test_write_kernel_keeps_to_the_cache(interpreter: Any) -> None:
    file, x, cache = interpreter("rope_scatter_kv"), normal(1, 3, 1, 4), KVCache.empty(1, 2, 1, 4, torch.float32)
    around = [torch.zeros(4, 1, 4) for _ in range(2)]
    inner = KVCache(*(one[None, 1:3] for one in around))
    file._launch(x, x, x, None, None, torch.tensor([[-1, 0, 2]]), *inner, None, None, 1e-6, False)
    assert around[0][1].equal(x[0, 1])
    assert not around[0][[0, 2, 3]].any()
    nothing = x[:, :0]
    found = file._launch(nothing, nothing, nothing, None, None, torch.zeros(1, 0), *cache, None, None, 1e-6, False)
    assert found.shape == (1, 0, 1, 4)


# -- reading --------------------------------------------------------------------------------------------------------


def read_by_hand(q: torch.Tensor, cache: KVCache, scale: float | None = None, **options: Any) -> Any:
    """Attention one query and head at a time, in fp64, by the words of the docstring."""
    options = {**NOTHING, "block": 0, "frame": 1, **options}
    batch, queries, heads, dim = q.shape
    out, lse = torch.zeros(q.shape, dtype=torch.float64), torch.full(q.shape[:3], -math.inf, dtype=torch.float64)
    k, v, k_scale, v_scale = cache
    keys = k.double() if k_scale is None else k.double() * k_scale.double()[..., None]
    values = v.double() if v_scale is None else v.double() * v_scale.double()[..., None]
    for b, m, h in torch.cartesian_prod(*(torch.arange(n) for n in (batch, queries, heads))).tolist():
        g, scores, rows = h * k.shape[2] // heads, [], []
        read = range(k.shape[1]) if options["slots"] is None else options["slots"][b].tolist()
        read = read if options["lengths"] is None else list(read)[: options["lengths"][b]]
        for slot in read:
            at, block = options["positions"], options["block"]
            hidden = at is not None and slot // block > at[b, m] // block
            added = 0.0 if options["bias"] is None else options["bias"][slot // options["frame"]].item()
            if not hidden and added > -math.inf:
                scores.append((q[b, m, h].double() @ keys[b, slot, g]) * (scale or dim**-0.5) + added)
                rows.append(values[b, slot, g])
        for fresh_k, fresh_v in zip(*(x[b, :, g] for x in options["fresh"]), strict=True) if options["fresh"] else ():
            scores.append((q[b, m, h].double() @ fresh_k.double()) * (scale or dim**-0.5))
            rows.append(fresh_v.double())
        if scores:
            lse[b, m, h] = torch.stack(scores).logsumexp(0)
            out[b, m, h] = torch.stack(scores).softmax(0) @ torch.stack(rows)
    return out, lse


KINDS = ["everything seen", "listed", "lengths", "blocks", "bias", "fresh", "all at once"]


def view(
    kind: str, batch: int, queries: int, slots: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Options of a reading of that kind: permuted slots and positions, an empty row, a hidden frame."""
    every, options = kind == "all at once", dict[str, Any]()
    if kind == "listed" or every:
        options["slots"] = permuted(batch, slots, max(slots // 2, 1), seed=1)
    if kind == "lengths" or every:
        options["lengths"] = torch.tensor([max(slots // 2 - 1, 0), 0][:batch])
    if kind == "blocks" or every:
        options |= {"positions": permuted(batch, max(slots, queries), queries, seed=2), "block": 4}
    if kind == "bias" or every:
        options |= {"bias": normal(-(-slots // 5), seed=8), "frame": 5}
        options["bias"][-1] = -math.inf
    if kind == "fresh" or every:
        options["fresh"] = (
            normal(batch, 3, kv_heads, dim, seed=6, dtype=dtype),
            normal(batch, 3, kv_heads, dim, seed=7, dtype=dtype),
        )
    return options


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_reference_of_random_shapes(kind: str, seed: int) -> None:
    draw = random.Random(seed)
    batch, queries, slots = draw.randint(1, 2), draw.randint(1, 4), draw.randint(1, 13)
    kv_heads, group, dim = draw.randint(1, 2), draw.randint(1, 3), 2 * draw.randint(1, 8)
    q, kept = normal(batch, queries, kv_heads * group, dim), draw.choice([torch.float32, torch.int8])
    cache = filled(batch, slots, kv_heads, dim, kept)
    options = view(kind, batch, queries, slots, kv_heads, dim, torch.float32)
    wanted = read_by_hand(q, cache, **options)
    found = subset_attention(q, cache, **options)
    for ours, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)
    scaled = subset_attention(q, cache, scale=0.1, **options)
    torch.testing.assert_close(
        scaled[0].double(), read_by_hand(q, cache, scale=0.1, **options)[0], rtol=1e-5, atol=1e-5
    )


@dataclass
class Read:
    """One case of the reading kernel: queries, slots, heads, key heads, channels."""

    queries: int
    slots: int
    heads: int
    kv_heads: int
    dim: int


def arguments(q: torch.Tensor, cache: KVCache, options: dict[str, Any]) -> tuple[Any, ...]:
    """Those of the operation."""
    options = {**NOTHING, "block": 0, "frame": 1, **options}
    fresh = options["fresh"] or (None, None)
    names = ("slots", "lengths", "positions", "block", "bias", "frame")
    return (q, *cache, *(options[name] for name in names), *fresh, q.shape[-1] ** -0.5)


READS = [
    Read(1, 1, 1, 1, 16), Read(7, 50, 4, 2, 16), Read(12, 70, 7, 1, 32), Read(5, 33, 4, 4, 80), Read(3, 90, 4, 1, 128),
    Read(2, 40, 2, 2, 96),
]  # fmt: skip
# Every way of reading in fp32, all of them at once in the other dtypes, both with the keys in one part and in three.
SETTINGS = [
    (kind, kept, parts)
    for parts in (1, 3)
    for kept in (torch.float32, torch.int8, torch.bfloat16, torch.float16)
    for kind in (KINDS if kept == torch.float32 else KINDS[-1:])
]


@pytest.mark.parametrize(("kind", "kept", "parts"), SETTINGS, ids=str)
@pytest.mark.parametrize("case", READS, ids=str)
def test_read_kernel(
    interpreter: Any, monkeypatch: pytest.MonkeyPatch, case: Read, kind: str, kept: torch.dtype, parts: int
) -> None:  # fmt: skip
    kernel, file = interpreter("subset_kernel"), interpreter("subset_attention")
    monkeypatch.setattr(kernel, "parts_for", lambda *_: parts)  # of so few keys some parts have none
    dtype = torch.float32 if kept == torch.int8 else kept
    q = normal(2, case.queries, case.heads, case.dim, dtype=dtype)
    cache = filled(2, case.slots, case.kv_heads, case.dim, kept)
    given = arguments(q, cache, view(kind, 2, case.queries, case.slots, case.kv_heads, case.dim, dtype))
    found, wanted = kernel.launch(*given, device=(1, 9)), file._reference(*given)
    for ours, exact in zip(found, wanted, strict=True):
        close(ours, exact)


def test_read_kernel_gives_the_same_bits_again(interpreter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = interpreter("subset_kernel")
    monkeypatch.setattr(kernel, "parts_for", lambda *_: 3)
    given = arguments(normal(2, 5, 4, 16), filled(2, 90, 2, 16), {})
    first, again = (kernel.launch(*given, device=(1, 9)) for _ in range(2))
    assert all(a.equal(b) for a, b in zip(first, again, strict=True))


def test_no_query_no_head_of_keys(interpreter: Any) -> None:
    q, cache = normal(2, 3, 4, 16), filled(2, 8, 2, 16)
    kernel = interpreter("subset_kernel")
    out, lse = kernel.launch(*arguments(q[:, :0], cache, {}), device=(1, 9))
    assert (out.shape, lse.shape) == ((2, 0, 4, 16), (2, 0, 4))
    empty = KVCache(*(None if x is None else x[:, :0] for x in cache))
    out, lse = kernel.launch(*arguments(q, empty, {}), device=(1, 9))
    assert not out.any()
    assert lse.eq(-math.inf).all()
    assert not subset_attention(q, empty)[0].any()


def hostile(cache: KVCache, read: torch.Tensor) -> KVCache:
    """The cache with NaN in every slot that is not in ``read``."""
    poisoned = copied(cache)
    unread = torch.ones(cache.k.shape[1], dtype=torch.bool)
    unread[read] = False
    for x in poisoned[:2]:
        x[:, unread] = math.nan
    return poisoned


@pytest.mark.parametrize("kind", ["listed", "lengths", "blocks", "listed blocks", "bias"])
def test_slots_that_nobody_sees_may_hold_anything(interpreter: Any, kind: str) -> None:
    kernel, (q, cache) = interpreter("subset_kernel"), (normal(1, 3, 2, 16), filled(1, 40, 2, 16))
    hidden = torch.tensor([0.0, -math.inf, 0.5, -math.inf])
    options, read = {
        "listed": ({"slots": torch.tensor([[9, 2, 30]])}, torch.tensor([2, 9, 30])),
        "lengths": ({"lengths": torch.tensor([7])}, torch.arange(7)),
        "blocks": ({"positions": torch.tensor([[3, 11, 4]]), "block": 4}, torch.arange(12)),
        "listed blocks": (
            {"slots": torch.tensor([[9, 30, 2, 17]]), "positions": torch.tensor([[3, 11, 4]]), "block": 4},
            torch.tensor([9, 2]),
        ),
        "bias": ({"bias": hidden, "frame": 10}, torch.tensor([*range(10), *range(20, 30)])),
    }[kind]
    poisoned = hostile(cache, read)
    clean = subset_attention(q, cache, **options)
    for found in (
        subset_attention(q, poisoned, **options),
        kernel.launch(*arguments(q, poisoned, options), device=(1, 9)),
    ):
        for ours, wanted in zip(found, clean, strict=True):
            close(ours, wanted)
    fill = {"read" if name == "slots" else name: value for name, value in options.items()}
    written = copied(poisoned)
    rows = [x[:, read[:1]] for x in (cache.k, cache.v)]
    found = cached_attention(q[:, :1], *rows, None, None, read[:1], written, **{**fill, **first(fill)})
    close(found, subset_attention(q[:, :1], cache, **{**options, **first(options)})[0])


def first(options: dict[str, Any]) -> dict[str, Any]:
    return {"positions": options["positions"][:, :1]} if "positions" in options else {}


def test_results_over_different_keys_merge_by_their_log_sum_exp() -> None:
    q, cache = normal(1, 4, 2, 8), filled(1, 12, 2, 8)
    whole, lse = subset_attention(q, cache)
    halves = [subset_attention(q, cache, slots=torch.arange(12)[part]) for part in (slice(0, 5), slice(5, 12))]
    weights = torch.stack([part for _, part in halves]).softmax(0)
    torch.testing.assert_close(sum(w[..., None] * out for w, (out, _) in zip(weights, halves, strict=True)), whole)
    torch.testing.assert_close(torch.logaddexp(halves[0][1], halves[1][1]), lse)


def test_parts() -> None:
    parts = pytest.importorskip("cachedit.kernels.subset_kernel").parts_for
    assert parts(32, 4096, 64, 132) == 8  # 264 programs wanted, 32 there: 9 parts, at most 8
    assert parts(32, 1024, 64, 132) == 4  # 16 tiles of keys, at least 4 a part
    assert parts(100, 4096, 64, 132) == 3
    assert parts(264, 4096, 64, 132) == 1
    assert parts(1, 63, 64, 132) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kept", [torch.float32, torch.int8], ids=str)
def test_one_call_is_writing_and_reading(kind: str, kept: torch.dtype) -> None:
    q, k, v = normal(2, 4, 6, 16), normal(2, 4, 2, 16, seed=1), normal(2, 4, 2, 16, seed=2)
    angles, slots, cache = normal(4, 8), permuted(2, 20, 4), filled(2, 20, 2, 16, kept)
    options = view(kind, 2, 4, 20, 2, 16, torch.float32)
    apart = copied(cache)
    turned = rope_scatter_kv(q, k, v, angles.cos(), angles.sin(), slots, apart)
    wanted = subset_attention(turned, apart, **options)[0]
    named = {"read" if name == "slots" else name: value for name, value in options.items()}
    found = cached_attention(q, k, v, angles.cos(), angles.sin(), slots, cache, **named)
    close(found.contiguous(), wanted)
    assert all(a is None or a.equal(b) for a, b in zip(cache, apart, strict=True))


def test_beyond_two_to_the_31_elements(interpreter: Any) -> None:
    """Only the pages that are touched exist."""
    torch.use_deterministic_algorithms(False)  # which would fill them
    slots = 2**31 // 16 + 4
    rows, scale = torch.empty(1, slots, 1, 16, dtype=torch.int8), torch.empty(1, slots, 1)
    cache = KVCache(rows, rows, scale, scale)
    x, last = normal(1, 2, 1, 16), torch.tensor([[slots - 1, slots - 2]])
    interpreter("rope_scatter_kv")._launch(x, x, x, None, None, last, *cache, None, None, 1e-6, False)
    given = arguments(x, cache, {"slots": last})
    found = interpreter("subset_kernel").launch(*given, device=(1, 9))[0]
    close(found, interpreter("subset_attention")._reference(*given)[0])
    near = subset_attention(x, KVCache(x, x))[0]
    assert (found - near).abs().max() < 0.05


# -- as operations of torch -----------------------------------------------------------------------------------------


def test_registration() -> None:
    q, k, angles, operations = normal(2, 3, 4, 8), normal(2, 3, 2, 8, seed=1), normal(2, 3, 4), torch.ops.cachedit
    where = permuted(2, 6, 3)
    for kept in (torch.float32, torch.int8):
        cache, norm = filled(2, 6, 2, 8, kept), normal(8)
        for turn, norms in (((angles.cos(), angles.sin()), (norm, norm)), ((None, None), (None, None))):
            torch.library.opcheck(
                operations.rope_scatter_kv.default, (q, k, k, *turn, where, *cache, *norms, 1e-6, False)
            )
        for kind in ("everything seen", "all at once"):
            given = arguments(q, cache, view(kind, 2, 3, 6, 2, 8, torch.float32))
            torch.library.opcheck(operations.subset_attention.default, given)


@pytest.mark.parametrize("kept", [torch.float32, torch.int8], ids=str)
def test_compiled_in_one_graph(kept: torch.dtype) -> None:
    def layer(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, slots: torch.Tensor, cache: KVCache) -> Any:
        q = rope_scatter_kv(x, x, x, cos, sin, slots, cache)
        return subset_attention(q, cache)[0] + 1, cached_attention(x, x, x, cos, sin, slots, cache)

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, angles, slots, cache = normal(2, 3, 2, 8), normal(3, 4), permuted(2, 6, 3), filled(2, 6, 2, 8, kept)
    apart = copied(cache)
    for ours, wanted in zip(
        compiled(x, angles.cos(), angles.sin(), slots, cache),
        layer(x, angles.cos(), angles.sin(), slots, apart),
        strict=True,
    ):
        torch.testing.assert_close(ours, wanted)
    assert all(a is None or a.equal(b) for a, b in zip(cache, apart, strict=True))
    torch._dynamo.reset()


def test_what_does_not_fit_is_said() -> None:
    x, cache = torch.zeros(1, 2, 2, 4), KVCache.empty(1, 3, 2, 4, torch.float32)
    slots, angles = torch.arange(2), torch.ones(2, 2)
    with pytest.raises(ValueError, match=r"got queries .* values \[1, 2, 1, 4\] and a cache of \[1, 3, 2, 4\]"):
        rope_scatter_kv(x, x, x[:, :, :1], angles, angles, slots, cache)
    with pytest.raises(ValueError, match="4 angles for 4 channels; allowed: at most 2"):
        rope_scatter_kv(x, x, x, torch.ones(2, 4), torch.ones(2, 4), slots, cache)
    with pytest.raises(ValueError, match="norm of 5 weights; allowed: 4 .* or 8"):
        rope_scatter_kv(x, x, x, angles, angles, slots, cache, q_norm=torch.ones(5))
    with pytest.raises(ValueError, match="with 0 scales .*allowed: two of fp32"):
        subset_attention(x, KVCache(cache.k.to(torch.int8), cache.v.to(torch.int8)))
    with pytest.raises(ValueError, match="one shape, dtype and layout"):
        subset_attention(x, KVCache(cache.k, cache.v[:, :2]))
    with pytest.raises(ValueError, match="multiple of the cache's heads"):
        subset_attention(x[:, :, :1], cache)
    with pytest.raises(ValueError, match="got positions and block 0"):
        subset_attention(x, cache, positions=slots)
    with pytest.raises(ValueError, match="no positions and block 2"):
        subset_attention(x, cache, block=2)
    with pytest.raises(ValueError, match="1 frames of 2 slots, and 3 slots"):
        subset_attention(x, cache, bias=torch.zeros(1), frame=2)
    with pytest.raises(ValueError, match=r"fresh keys and values \[\[1, 1, 2, 4\], \[1, 2, 2, 4\]\]"):
        subset_attention(x, cache, fresh=(x[:, :1], x))
    for call in (
        lambda q: subset_attention(q, cache), lambda q: rope_scatter_kv(q, x, x, None, None, slots, cache),
        lambda q: subset_attention(x, cache, fresh=(q, q)),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="no backward pass"):
            call(x.clone().requires_grad_())
