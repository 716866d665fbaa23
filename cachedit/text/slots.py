"""Keys and values of every token, each in a slot of its own that never moves."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from cachedit.kernels import KVCache
from cachedit.kernels.slot_attention import Seen


@dataclass(frozen=True)
class Pass:
    """One forward pass: which tokens of which rows are computed, and what they see.

    Attributes:
        ids: token ids [N, Q].
        positions: of the tokens [N, Q].
        rows: rows of the batch that take part, integers [N]; None for all of them.
        slots: slots of the tokens [N, Q]; None for the leading ones in order.
        width: number of leading slots that are read.
        visible: which slots a token sees, bool [N, 1, Q, width]; None for all of them.
        keep: columns of the tokens whose logits are wanted, integers [K]; None for all of them.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor | None
    slots: torch.Tensor | None
    width: int
    visible: torch.Tensor | None
    keep: torch.Tensor | None = None

    @functools.cached_property
    def seen(self) -> Seen | None:
        """What every token of a row sees; None if that differs."""
        return Seen.of(self.visible)


class SlotCache:
    """Keys, after their rotation, and values of all layers, [B, H, S, D] each.

    A layer is allocated when it is first written, and grows when more slots are read than it has; what is kept stays.
    """

    def __init__(self, batch: int, capacity: int) -> None:
        self.batch, self.capacity = batch, capacity
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self.call: Pass | None = None

    @property
    def bytes(self) -> int:
        """Bytes that are held."""
        return sum(x.nbytes for kept in (self.keys, self.values) for x in kept.values())

    def begin(self, call: Pass) -> None:
        """Write and read as this pass says, from now on."""
        if call.width > self.capacity:
            self.capacity = max(call.width, 2 * self.capacity)
        self.call = call

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep what a layer computed, [N, H, Q, D] each; returns what its queries read, [N, H, width, D] each."""
        return self._put(self.keys, layer, keys), self._put(self.values, layer, values)

    def kept(self, layer: int, fresh: torch.Tensor) -> KVCache:
        """The slots that this pass reads of a layer, of all rows, as the kernels take them; ``fresh`` [N, H, Q, D]."""
        assert self.call is not None
        stores = (self._store(kept, layer, fresh) for kept in (self.keys, self.values))
        return KVCache(*(store[:, :, : self.call.width].transpose(1, 2) for store in stores))

    def _put(self, kept: dict[int, torch.Tensor], layer: int, fresh: torch.Tensor) -> torch.Tensor:
        call = self.call
        assert call is not None
        store = self._store(kept, layer, fresh)
        rows, slots, width = call.rows, call.slots, call.width
        if slots is None:
            if rows is None:
                store[:, :, : fresh.shape[2]] = fresh
            else:
                store[rows, :, : fresh.shape[2]] = fresh
        elif self.batch == 1:
            store.index_copy_(2, slots[0], fresh)
        else:
            where = torch.arange(self.batch, device=slots.device) if rows is None else rows
            store[where[:, None], :, slots] = fresh.transpose(1, 2)
        return store[:, :, :width] if rows is None else store[rows, :, :width]

    def _store(self, kept: dict[int, torch.Tensor], layer: int, fresh: torch.Tensor) -> torch.Tensor:
        store = kept.get(layer)
        if store is None or store.shape[2] < self.capacity:
            grown = fresh.new_zeros(self.batch, fresh.shape[1], self.capacity, fresh.shape[3])
            if store is not None:
                grown[:, :, : store.shape[2]] = store
            store = kept[layer] = grown
        return store
