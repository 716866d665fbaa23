"""The slots as transformers' Cache; apart, because it imports transformers."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache

from cachedit.text.slots import SlotCache


class KeptSlots(Cache):
    """What attention modules call ``update`` on.

    Args:
        slots: where keys and values are kept.
        fused: the attention is LLaDA2's, which takes what is read for what precedes and what is computed together.
    """

    def __init__(self, slots: SlotCache, fused: bool) -> None:
        # no layers of transformers' own: older versions have none to give
        super().__init__(**({"layers": []} if hasattr(Cache, "offload") else {}))
        self.slots, self._fused = slots, fused

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep what a layer computed, and give what it reads."""
        return self.slots.write(layer_idx, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0, *args: Any) -> int:
        """Slots are filled in any order, so nothing precedes the tokens that are computed; see ``fused``."""
        assert self.slots.call is not None
        return self._width() - self.slots.call.ids.shape[1] if self._fused else 0

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """How many slots are read, and the first of them."""
        return self._width(), 0

    def get_max_length(self, *args: Any) -> int:
        """How many slots there may be."""
        return self._width()

    def get_max_cache_shape(self, *args: Any) -> int:
        """The same, as older versions call it."""
        return self._width()

    def _width(self) -> int:
        assert self.slots.call is not None
        return self.slots.call.width


def as_cache(slots: SlotCache, fused: bool) -> KeptSlots:
    """The slots as what a model of transformers takes; ``fused`` as above."""
    return KeptSlots(slots, fused)
