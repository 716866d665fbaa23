"""Attention that a strategy listens to: it sees the queries and keys of a layer, and may narrow what is read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from cachedit.borrowed import borrowed
from cachedit.kernels.slot_attention import slot_attention
from cachedit.text.slots import Pass
from cachedit.text.state import DecodeState

NAME = "cachedit"  # of this attention among those of transformers


@dataclass(frozen=True)
class LayerView:
    """Attention of one layer in one pass.

    Attributes:
        state: of the whole batch.
        rows: rows of the batch that take part [N].
        slots: slots of the queries [N, Q].
        layer: number of the layer, from 0.
        queries: rotated [N, H, Q, D].
        keys: rotated [N, Hk, W, D], of the leading W slots.
        visible: which slots a query sees, bool [N, 1, Q, W]; None for all.
    """

    state: DecodeState
    rows: torch.Tensor
    slots: torch.Tensor
    layer: int
    queries: torch.Tensor
    keys: torch.Tensor
    visible: torch.Tensor | None

    def weights(self, queries: torch.Tensor | None = None) -> torch.Tensor:
        """Attention [N, H, M, W] of these queries [N, H, M, D], or of all of the pass, with what each sees."""
        asked = self.queries if queries is None else queries
        keys = self.keys.repeat_interleave(asked.shape[1] // self.keys.shape[1], 1)
        scores = asked @ keys.transpose(2, 3) * asked.shape[-1] ** -0.5
        if self.visible is not None:
            visible = self.visible if queries is None else self.visible.any(2, keepdim=True)
            scores = scores.masked_fill(~visible, -torch.inf)
        return scores.softmax(-1)


Listener = Callable[[int, torch.Tensor, torch.Tensor, "torch.Tensor | None"], "torch.Tensor | None"]
_listener: ContextVar[Listener | None] = ContextVar("cachedit_listener", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Ask ``listener`` which slots every layer reads, bool [N, 1 or Hk, W], or None for all of them."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


@contextmanager
def attention_of(config: Any) -> Iterator[None]:
    """The attention of a model of transformers, replaced while somebody listens."""
    if _listener.get() is None:
        yield
        return
    borrowed("transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS").register(NAME, _attention)
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
    scaling: float | None = None, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    return attended(query, key, value, module.layer_idx, attention_mask, scaling).transpose(1, 2), None


def attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, visible: torch.Tensor | None,
    scale: float | None = None, call: Pass | None = None,
) -> torch.Tensor:  # fmt: skip
    """What queries [N, H, Q, D] read from keys and values [N, Hk, W, D], after asking who listens.

    ``call`` is the pass that ``visible`` is of, if it is known.
    """
    listener = _listener.get()
    read = None if listener is None else listener(layer, q, k, visible)
    if read is not None:
        k, v, visible = _narrowed(k, v, visible, read, q.shape[1])
    grouped = k.shape[1] != q.shape[1]
    plain = functools.partial(
        functional.scaled_dot_product_attention, q, k, v, visible, scale=scale, enable_gqa=grouped
    )
    if read is not None or call is None:
        return plain()
    return slot_attention(q, k, v, lambda: call.seen, plain, scale)


def _narrowed(
    k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None, read: torch.Tensor, heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Only the slots that are read, where all rows and heads read equally many; else the others are hidden."""
    counts = read.sum(-1)
    if not bool((counts == counts.flatten()[0]).all()):
        read = read.repeat_interleave(heads // read.shape[1], 1)[:, :, None]
        return k, v, read if visible is None else read & visible
    slots = read.nonzero()[:, -1].view(*read.shape[:2], -1)  # [N, 1 or Hk, L]
    where = slots.expand(-1, k.shape[1], -1)[..., None].expand(-1, -1, -1, k.shape[-1])
    if visible is not None:
        of_heads = slots.repeat_interleave(heads // slots.shape[1], 1) if slots.shape[1] > 1 else slots
        at = of_heads[:, :, None].expand(-1, -1, visible.shape[2], -1)
        visible = visible.expand(-1, at.shape[1], -1, -1).gather(3, at)
    return k.gather(2, where), v.gather(2, where), visible
