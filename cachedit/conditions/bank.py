"""Keys and values of condition tokens, kept by layer outside of the sequence that attends to them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass
class KVBank:
    """Keys and values by layer, each [B, N, H, D], normed and rotated as the attention takes them.

    Attributes:
        label: what they depend on besides the layer, such as the picture, its positions, the adapter and its weight;
            a pass that asks for another label is refused. None where it depends on nothing that may change.
        device, dtype: where and how they are kept; None is as they come.
        layers: the keys and values.
        changes: of each layer that was written anew, the relative change of its keys, ||K - K'|| / ||K'||.
    """

    label: Hashable = None
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None
    layers: dict[int, Pair] = field(default_factory=dict)
    changes: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(x.numel() * x.element_size() for pair in self.layers.values() for x in pair)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Keep keys and values of a layer in place of those it had; they are copied, so that no larger tensor stays."""
        kept, old = self._kept(k), self.layers.get(layer)
        if old is not None and old[0].shape == kept.shape:
            self.changes[layer] = (kept - old[0]).norm() / old[0].norm().clamp_min(torch.finfo(kept.dtype).tiny)
        self.layers[layer] = kept, self._kept(v)

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
        k, v = (x.to(like.device, like.dtype, non_blocking=True) for x in self.layers[layer])
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

    def _kept(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach().to(self.device or x.device, self.dtype or x.dtype, copy=True)
