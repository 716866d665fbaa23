"""Passes that start with some tokens and go on with all of them from a layer on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cachedit.text.layers import Layers
from cachedit.text.slots import Pass, SlotCache


class Growth:
    """Keeps what enters every layer, [B, S, C] each, so that tokens that were left out can be taken up again.

    Attributes:
        slots: of the tokens that are computed now [1, Q].
        wanted: True once the next layer is to compute every token.
        grown_at: the first layer that computed every token in the last pass; None if none did.
    """

    slots: torch.Tensor

    def __init__(self, layers: Layers) -> None:
        self.layers = layers
        self.inputs: dict[int, torch.Tensor] = {}
        self.wanted = False
        self.grown_at: int | None = None

    @property
    def bytes(self) -> int:
        """Bytes that are held."""
        return sum(x.nbytes for x in self.inputs.values())

    @contextmanager
    def running(self, full: Pass, row: int, slots: torch.Tensor, cache: SlotCache) -> Iterator[None]:
        """Watch one pass over one row.

        Args:
            full: the pass over all tokens of the row.
            row: of the batch.
            slots: of the tokens that it starts with [1, Q].
            cache: is told which tokens are computed.
        """
        self.slots, self.wanted, self.grown_at = slots, False, None
        everything = torch.arange(full.width, device=slots.device)[None]

        def before(layer: int) -> Any:
            def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                hidden = args[0] if args else kwargs.pop("hidden_states")
                kept = self.inputs.get(layer)
                if kept is None:
                    kept = self.inputs[layer] = hidden.new_zeros(cache.batch, full.width, hidden.shape[2])
                kept[row].index_copy_(0, self.slots[0], hidden[0])
                if self.wanted and self.grown_at is None:
                    self.grown_at, self.slots, hidden = layer, everything, kept[row : row + 1].clone()
                    cache.begin(full)
                if self.grown_at is not None:
                    kwargs["position_embeddings"] = self.layers.rotary(hidden, full.positions)
                    kwargs["position_ids"], kwargs["attention_mask"] = full.positions, full.visible
                return (hidden, *args[1:]), kwargs

            return hook

        def after(_: Any, __: Any, output: Any) -> Any:
            return output if self.grown_at is None else output[:, slots[0]]

        handles = [
            layer.register_forward_pre_hook(before(number), with_kwargs=True)
            for number, layer in enumerate(self.layers.each)
        ]
        handles.append(self.layers.each[-1].register_forward_hook(after))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
