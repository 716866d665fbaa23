"""What the kernel benchmark compares: ours, and the form that public code has, written from the formula."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from cachedit.kernels import KVCache, cached_attention, capture, forecast, rope_scatter_kv, subset_attention
from cachedit.kernels.capture import Statistics

Inputs = tuple[Any, ...]


@dataclass
class Case:
    """One operation at the size of one model.

    Attributes:
        op, model: names.
        shape: of what is computed.
        inputs: makes the arguments on a device.
        ours, eager: the two forms; both take the arguments.
        unit: bytes of one pass, from the arguments.
        floor: passes that cannot be saved.
    """

    op: str
    model: str
    shape: tuple[int, ...]
    inputs: Callable[[torch.device], Inputs]
    ours: Callable[..., Any]
    eager: Callable[..., Any]
    unit: Callable[[Inputs], int]
    floor: float


# -- residuals ------------------------------------------------------------------------------------------------------


def taylor(x: torch.Tensor, factors: Sequence[torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
    """A forecast term by term, in the model's dtype: a fresh tensor for every product and every sum."""
    total = torch.zeros_like(x)
    for k, factor in enumerate(factors):
        total = total + factor * (0.5**k)
    return x + total


def magnitude(entering: torch.Tensor, leaving: torch.Tensor, previous: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The residual with the magnitude ratio, its spread and the direction, as MagCache calibrates."""
    residual = leaving - entering
    ratio = residual.norm(dim=-1) / previous.norm(dim=-1)
    return residual, ratio.mean(), ratio.std(), functional.cosine_similarity(residual, previous, dim=-1).mean()


def change(entering: torch.Tensor, leaving: torch.Tensor, previous: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual with its relative L1 change, as first-block caches decide."""
    residual = leaving - entering
    return residual, (residual - previous).abs().mean() / previous.abs().mean()


def statistics(entering: torch.Tensor, leaving: torch.Tensor, previous: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The residual with all that ``capture`` gives, one sum after the other."""
    residual = leaving - entering
    return (
        residual, residual.norm(dim=-1), previous.norm(dim=-1), (residual * previous).sum(-1), leaving.abs().sum(-1),
        (residual - previous).abs().sum(-1), previous.abs().sum(-1),
    )  # fmt: skip


def _forecast_case(model: str, shape: tuple[int, int], order: int, dtype: torch.dtype) -> Case:
    def inputs(device: torch.device) -> Inputs:
        x, *history = (torch.randn(shape, device=device).to(dtype) for _ in range(order + 2))
        return x, history, torch.full((order + 1,), 0.5, device=device)

    plain = {"ours": lambda x, h, w: forecast(x, h), "eager": lambda x, h, w: x + h[-1]}
    forms = plain if order == 0 else {"ours": forecast, "eager": taylor}
    return Case(f"forecast_{order}", model, shape, inputs, unit=lambda given: given[0].nbytes, floor=3 + order, **forms)


CAPTURES: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "capture": (statistics, Statistics._fields),
    "capture_magnitude": (magnitude, ("norm", "previous_norm", "product")),
    "capture_change": (change, ("change", "previous")),
}
"""Operation -> eager form, and the sums that it has."""


def _capture_case(op: str, model: str, shape: tuple[int, int], dtype: torch.dtype) -> Case:
    eager, sums = CAPTURES[op]

    def ours(entering: torch.Tensor, leaving: torch.Tensor, previous: torch.Tensor) -> Any:
        return capture(entering, leaving, previous, sums)

    def inputs(device: torch.device) -> Inputs:
        return tuple(torch.randn(shape, device=device).to(dtype) for _ in range(3))

    return Case(op, model, shape, inputs, ours, eager, lambda given: given[0].nbytes, 4)


# -- cached attention -----------------------------------------------------------------------------------------------


@dataclass
class Layer:
    """Sizes of an attention layer: computed tokens, slots, heads, key heads, channels of a head; and its dtype."""

    tokens: int
    slots: int
    heads: int
    kv_heads: int
    dim: int = 128
    dtype: torch.dtype = torch.bfloat16


def write_eager(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, slots: torch.Tensor,
    cache: KVCache, norms: Sequence[torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """RMSNorm, rotation by halves and a copy into the cache, as the text models of transformers have them."""
    turned = []
    for x, norm in zip((q, k), norms, strict=True):
        wide = x.float()
        x = norm * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        a, b = x.chunk(2, -1)
        c, s = (torch.cat([angle, angle], -1)[:, None].to(x.dtype) for angle in (cos, sin))
        turned.append(x * c + torch.cat([-b, a], -1) * s)
    cache.k.index_copy_(1, slots, turned[1])
    cache.v.index_copy_(1, slots, v)
    return turned[0]


def write_ours(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, slots: torch.Tensor,
    cache: KVCache, norms: Sequence[torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """The same in one call."""
    return rope_scatter_kv(q, k, v, cos, sin, slots, cache, q_norm=norms[0], k_norm=norms[1])


def read_eager(q: torch.Tensor, cache: KVCache, fresh: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
    """Cached and fresh keys put together, key heads repeated for their queries, torch's own attention."""
    group, rows = q.shape[2] // cache.k.shape[2], []
    for k, kept in enumerate(cache[:2]):
        x = kept if fresh is None else torch.cat([kept, fresh[k]], 1)
        rows.append((x if group == 1 else x.repeat_interleave(group, 2)).transpose(1, 2))
    return functional.scaled_dot_product_attention(q.transpose(1, 2), *rows).transpose(1, 2)


def read_ours(q: torch.Tensor, cache: KVCache, fresh: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
    """The same in one call."""
    return subset_attention(q, cache, fresh=fresh)[0]


def _heads(device: torch.device, layer: Layer, tokens: int, heads: int) -> torch.Tensor:
    return torch.randn(1, tokens, heads, layer.dim, device=device).to(layer.dtype)


def _cache(device: torch.device, layer: Layer) -> KVCache:
    return KVCache(*(_heads(device, layer, layer.slots, layer.kv_heads) for _ in range(2)))


def _write_case(model: str, layer: Layer) -> Case:
    def inputs(device: torch.device) -> Inputs:
        angles = torch.randn(layer.tokens, layer.dim // 2, device=device)
        rows = [_heads(device, layer, layer.tokens, n) for n in (layer.heads, layer.kv_heads, layer.kv_heads)]
        norms = [torch.ones(layer.dim, device=device, dtype=layer.dtype)] * 2
        slots = torch.randperm(layer.slots, device=device)[: layer.tokens]
        return *rows, angles.cos(), angles.sin(), slots, _cache(device, layer), norms

    floor = 2 + 4 * layer.kv_heads / layer.heads  # q in and out; k and v in, and into the cache
    shape = (layer.tokens, layer.heads, layer.dim)
    return Case("rope_scatter_kv", model, shape, inputs, write_ours, write_eager, lambda given: given[0].nbytes, floor)


def _read_case(model: str, layer: Layer, fresh: bool) -> Case:
    def inputs(device: torch.device) -> Inputs:
        new = tuple(_heads(device, layer, layer.tokens, layer.kv_heads) for _ in range(2)) if fresh else None
        return _heads(device, layer, layer.tokens, layer.heads), _cache(device, layer), new

    keys = layer.slots + (layer.tokens if fresh else 0)
    floor = 2 * keys / layer.slots + 2 * layer.tokens * layer.heads / (layer.slots * layer.kv_heads)
    shape = (layer.tokens, keys, layer.heads, layer.kv_heads, layer.dim)
    return Case("subset_attention", model, shape, inputs, read_ours, read_eager, lambda given: given[1].k.nbytes, floor)


def layer_eager(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, slots: torch.Tensor,
    cache: KVCache, norms: Sequence[torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """Write, then read: a cached layer as eager code has it."""
    return read_eager(write_eager(q, k, v, cos, sin, slots, cache, norms), cache, None)


def layer_ours(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, slots: torch.Tensor,
    cache: KVCache, norms: Sequence[torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """The same in one call."""
    return cached_attention(q, k, v, cos, sin, slots, cache, q_norm=norms[0], k_norm=norms[1])


def _layer_case(model: str, layer: Layer) -> Case:
    write, read = _write_case(model, layer), _read_case(model, layer, fresh=False)
    ratio = layer.tokens * layer.heads / (layer.slots * layer.kv_heads)  # of a pass over q to one over the keys
    floor = write.floor * ratio + read.floor
    shape = (layer.tokens, layer.slots, layer.heads, layer.kv_heads, layer.dim)
    return Case(
        "cached_attention", model, shape, write.inputs, layer_ours, layer_eager, lambda given: given[6].k.nbytes, floor
    )


SMALL = {"small": (64, 3072)}
SIZES = {"FLUX": (4608, 3072), "Wan-14B": (75600, 5120), "HunyuanVideo": (119056, 3072)}
SMALL_LAYERS = {
    "LLaDA, 1k keys": Layer(32, 1024, 32, 32, dtype=torch.float32),
    "Dream, 1k keys": Layer(32, 1024, 28, 4, dtype=torch.float32),
}
LAYERS = {
    "LLaDA, 1k keys": Layer(32, 1024, 32, 32),
    "LLaDA, 4k keys": Layer(32, 4096, 32, 32),
    "Dream, 4k keys": Layer(32, 4096, 28, 4),
    "Wan-1.3B, 21 frames": Layer(4680, 21 * 1560, 12, 12),
}


def cases(small: bool) -> list[Case]:
    """All of them: at the sizes of real models in bf16, or in fp32 at some that a CPU does in a moment."""
    found, dtype = list[Case](), torch.float32 if small else torch.bfloat16
    for model, shape in (SMALL if small else SIZES).items():
        found += [_forecast_case(model, shape, order, dtype) for order in range(3)]
        found += [_capture_case(op, model, shape, dtype) for op in CAPTURES]
    for model, layer in (SMALL_LAYERS if small else LAYERS).items():
        read = _read_case(model, layer, fresh=layer.tokens > 32 or small)
        found += [_write_case(model, layer), read, _layer_case(model, layer)]
    return found
