"""Attention of a layout that rotates its keys itself: into the slots, and over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from cachedit.kernels import rope_scatter_kv
from cachedit.kernels.registration import run_on
from cachedit.text.listening import attended
from cachedit.text.slots import Pass, SlotCache


def heads(x: torch.Tensor, dim: int) -> torch.Tensor:
    """[N, Q, H * D] as [N, H, Q, D]."""
    return x.unflatten(-1, (-1, dim)).transpose(1, 2)


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate channel i with channel i + D / 2; tables [N, 1, Q, D] in the precision of the rotation."""
    wide = x.to(torch.promote_types(x.dtype, cos.dtype))
    first, second = wide.chunk(2, -1)
    return (wide * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layer: int, call: Pass,
    cache: SlotCache | None,
) -> torch.Tensor:  # fmt: skip
    """What queries [N, H, Q, D] read once they are rotated, [N, Q, H * D].

    Fresh keys and values go into the cache, if any, in one kernel with the rotation where there is one; ``cos`` and
    ``sin`` as ``turned`` takes them.
    """
    if cache is not None and call.rows is None and run_on(q):
        kept, slots = cache.kept(layer, k), call.slots
        slots = torch.arange(k.shape[2], device=k.device) if slots is None else slots
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        cos, sin = (table[:, 0, :, : table.shape[-1] // 2] for table in (cos, sin))  # which repeat every angle
        q = rope_scatter_kv(q, k, v, cos, sin, slots, kept).transpose(1, 2)
        keys, values = kept.k.transpose(1, 2), kept.v.transpose(1, 2)
    else:
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        keys, values = (k, v) if cache is None else cache.write(layer, k, v)
    return attended(q, keys, values, layer, call.visible, call=call).transpose(1, 2).flatten(2)


@contextmanager
def replaced(modules: Sequence[nn.Module], name: str, functions: Sequence[Callable[..., Any]]) -> Iterator[None]:
    """Methods of these modules replaced by functions, for the time of a pass."""
    before = [vars(module).get(name) for module in modules]
    try:
        for module, function in zip(modules, functions, strict=True):
            vars(module)[name] = function
        yield
    finally:
        for module, old in zip(modules, before, strict=True):
            if old is None:
                vars(module).pop(name, None)
            else:
                vars(module)[name] = old
