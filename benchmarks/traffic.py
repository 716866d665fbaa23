"""Bytes that operations move, counted as torch dispatches them: no clock, so no noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ONLY_WRITE = ("zeros_like", "zeros", "fill_", "zero_", "ones", "arange", "full")
NOTHING = ("empty", "empty_like", "new_empty", "empty_strided")


class Traffic(TorchDispatchMode):
    """Counts every launch: what it reads, which is all its tensors, and what it writes.

    An operation of ours is one launch, as it is on a GPU; on the CPU its reference makes several.

    Attributes:
        moved: bytes read and written.
        launches: operations that move any.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moved, self.launches = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count it, unless it is a view."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        aliases = [returned.alias_info for returned in func._schema.returns]
        if name in NOTHING or any(alias is not None and not alias.is_write for alias in aliases):
            return out
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        cached = _written_to(func, args)
        read = 0 if name in ONLY_WRITE else sum(_bytes(x) for x in given if not any(x is one for one in cached))
        self.moved += read + sum(_bytes(x) for x in tree_leaves(out) if isinstance(x, torch.Tensor))
        if cached:  # of a cache, the rows alone are written: not read, and not returned
            self.moved += sum(_rows(name, args)) - (_bytes(out) if any(out is one for one in cached) else 0)
        self.launches += 1
        return out


def _written_to(func: Any, args: Any) -> list[torch.Tensor]:
    """Caches into which an operation scatters rows."""
    if func.overloadpacket.__name__ not in ("index_put_", "index_copy_", "rope_scatter_kv"):
        return []
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments]
    return [x for x, into in zip(args, written, strict=False) if into and isinstance(x, torch.Tensor)]


def _rows(name: str, args: Any) -> list[int]:
    """Bytes of the rows that are scattered."""
    if name == "rope_scatter_kv":
        _, k, v, _, _, _, k_cache, v_cache, k_scale, _ = args[:10]
        scales = 0 if k_scale is None else 8 * k[..., 0].numel()
        return [k.numel() * k_cache.element_size(), v.numel() * v_cache.element_size(), scales]
    return [_bytes(args[-1])]


def _bytes(x: torch.Tensor) -> int:
    """Bytes of the elements that exist: a broadcast one is read once."""
    shape = [size for size, stride in zip(x.shape, x.stride(), strict=True) if stride or size == 1]
    return x.element_size() * torch.Size(shape).numel() if x.numel() else 0


@torch.no_grad()
def traffic(run: Callable[[], Any]) -> Traffic:
    """What one call moves."""
    with Traffic() as found:
        run()
    return found
