"""Attention of a few computed tokens over keys and values in slots: our kernel where it runs, or what is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from cachedit.kernels.kv_cache import KVCache
from cachedit.kernels.registration import run_on
from cachedit.kernels.subset_attention import few, subset_attention


class Seen(NamedTuple):
    """What is seen by every query of a sample.

    Attributes:
        slots: which slots, the seen ones first, integers [B, S]; None for all in order.
        lengths: how many of them, integers [B]; None for all.
    """

    slots: torch.Tensor | None = None
    lengths: torch.Tensor | None = None

    @classmethod
    def of(cls, visible: torch.Tensor | None) -> Seen | None:
        """What a mask [B, 1, M, S] lets through; None if the queries of a sample see different slots.

        Looks at the mask, so the host waits for the device: once for a pass, not in every layer.
        """
        if visible is None:
            return cls()
        seen = visible[:, 0, 0]
        if not bool((visible[:, 0] == seen[:, None]).all()):
            return None
        lengths = seen.sum(1)
        if bool((seen == (torch.arange(seen.shape[1], device=seen.device) < lengths[:, None])).all()):
            return cls(None, lengths)
        return cls(seen.to(torch.uint8).argsort(dim=1, descending=True, stable=True), lengths)


def slot_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: Callable[[], Seen | None],
    otherwise: Callable[[], torch.Tensor],
    scale: float | None = None,
) -> torch.Tensor:
    """What queries read, [B, H, M, D].

    The kernel packs the query heads that share a key head and takes a list of slots for a mask, where torch repeats the
    keys and masks. It is for few queries, as many as there are in a step that computes a block.

    Args:
        q: queries [B, H, M, D].
        k: keys [B, Hk, S, D].
        v: values, of the same shape.
        seen: tells which slots are seen, None where that is not the same for all queries; asked if all else fits.
        otherwise: attention without our kernel.
        scale: of the scores; None is ``D ** -0.5``.
    """
    alike = q.dtype == k.dtype == v.dtype and k.shape == v.shape and k.stride() == v.stride() and k.stride(-1) == 1
    if not run_on(q) or not alike:
        return otherwise()
    queries, cache = q.transpose(1, 2), KVCache(k.transpose(1, 2), v.transpose(1, 2))
    found = seen() if few(queries, cache) else None
    if found is None:
        return otherwise()
    slots, lengths = (x if x is None else x.to(q.device) for x in found)  # layers may lie on several devices
    return subset_attention(queries, cache, slots=slots, lengths=lengths, scale=scale)[0].transpose(1, 2)
