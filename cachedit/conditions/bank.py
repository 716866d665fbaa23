"""Keys and values of condition tokens, kept by layer outside of the sequence that attends to them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

from cachedit.kernels import KVCache
from cachedit.kernels.eight_bits import narrowed, widened

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass
class KVBank:
    """Keys and values by layer, each [B, N, H, D], normed and rotated as the attention takes them.

    Attributes:
        label: what they depend on besides the layer, such as the picture, its positions, the adapter and its weight;
            a pass that asks for another label is refused. None where it depends on nothing that may change.
        device, dtype: where and how they are kept; None is as they come. int8 keeps a scale per token and head too.
        layers: the keys and values.
        changes: of each layer that was written anew, the relative change of its keys, ||K - K'|| / ||K'||.
    """

    label: Hashable = None
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None
    layers: dict[int, KVCache] = field(default_factory=dict)
    changes: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        kept = (x for layer in self.layers.values() for x in layer if x is not None)
        return sum(x.numel() * x.element_size() for x in kept)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Keep keys and values of a layer in place of those it had; they are copied, so that no larger tensor stays."""
        old, (keys, k_scale), (values, v_scale) = self.layers.get(layer), self._kept(k), self._kept(v)
        if old is not None and old.k.shape == keys.shape:
            before, now = widened(old.k, old.k_scale, k.dtype), widened(keys, k_scale, k.dtype)
            self.changes[layer] = (now - before).norm() / before.norm().clamp_min(torch.finfo(before.dtype).tiny)
        self.layers[layer] = KVCache(keys, values, k_scale, v_scale)

    def clear(self) -> None:
        """Forget everything but what it is for."""
        self.layers.clear()
        self.changes.clear()

    def read(self, layer: int, like: torch.Tensor) -> Pair:
        """Keys and values of a layer on the device and in the dtype of ``like`` [B, N, H, D].

        Raises:
            ValueError: the layer was not written, or for another batch size; a batch of one serves every batch.
        """
        if layer not in self.layers:
            raise ValueError(
                f"got a bank without keys of layer {layer}; it has {len(self.layers)} layers. Record a whole pass of "
                "the model before it is attended to."
            )
        k, v = self._widened(layer, like)
        if k.shape[0] not in (1, like.shape[0]):
            raise ValueError(
                f"got a bank of {k.shape[0]} samples in a batch of {like.shape[0]}; allowed: 1 or {like.shape[0]}. "
                "Record it anew for this batch."
            )
        return k.expand(like.shape[0], -1, -1, -1), v.expand(like.shape[0], -1, -1, -1)

    def check(self, label: Hashable) -> None:
        """Refuse what was recorded for something else.

        Raises:
            ValueError: with both labels.
        """
        if label != self.label:
            raise ValueError(
                f"got a bank that was recorded for {self.label!r}; this pass needs one for {label!r}. Record it anew."
            )

    @property
    def drift(self) -> float:
        """Largest change of a layer by the last pass that wrote it anew; 0 before one. Waits for the device."""
        return float(torch.stack(list(self.changes.values())).max()) if self.changes else 0.0

    def _widened(self, layer: int, like: torch.Tensor) -> Pair:
        def moved(x: torch.Tensor) -> torch.Tensor:
            return x.to(like.device, non_blocking=True)

        k, v, *scales = self.layers[layer]
        k_scale, v_scale = (None if x is None else moved(x) for x in scales)
        return widened(moved(k), k_scale, like.dtype), widened(moved(v), v_scale, like.dtype)

    def _kept(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        x = x.detach()
        kept, scale = narrowed(x, self.dtype or x.dtype)
        place = self.device or x.device
        return kept.to(place, copy=kept is x), None if scale is None else scale.to(place)
