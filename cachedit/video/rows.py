"""The buffers of a ring: keys and values of every layer in frame-sized slots, perhaps in eight bits."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from cachedit.kernels import KVCache
from cachedit.kernels.eight_bits import FORMATS
from cachedit.kernels.spans import Span, load, store


class Rows:
    """Slots of ``tokens`` rows each, for all layers of one model.

    int8 keeps one scale per row and head, as the kernels read it; fp8 has its own exponents and needs none.

    Args:
        layers, batch, slots, tokens, heads, dim: sizes; a buffer is [layers, batch, slots * tokens, heads, dim].
        dtype: of what is written and read.
        quant: "int8", "fp8", or None to keep ``dtype``.
        device: of the buffers.
    """

    def __init__(
        self, layers: int, batch: int, slots: int, tokens: int, heads: int, dim: int, dtype: torch.dtype,
        quant: str | None, device: torch.device | str | None,
    ) -> None:  # fmt: skip
        self.tokens, self.dtype = tokens, dtype
        shape = (layers * batch, slots * tokens, heads, dim)
        whole = KVCache.empty(*shape, dtype=FORMATS[quant] or dtype, device=device)
        self.buffers = KVCache(*(None if x is None else x.unflatten(0, (layers, batch)) for x in whole))  # type: ignore[arg-type]
        self._layers = [
            KVCache(*(None if x is None else x[layer] for x in self.buffers))  # type: ignore[arg-type]
            for layer in range(layers)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(x.numel() * x.element_size() for x in self.buffers if x is not None)

    def layer(self, layer: int) -> KVCache:
        """The buffers of one layer, as the attention kernels take them."""
        return self._layers[layer]

    def span(self, run: tuple[int, int]) -> slice:
        """Rows of a run of slots."""
        return slice(run[0] * self.tokens, run[1] * self.tokens)

    def spans(self, runs: Iterable[tuple[int, int]]) -> list[Span]:
        """Rows of runs of slots."""
        return [(start * self.tokens, stop * self.tokens) for start, stop in runs]

    def write(
        self, layer: int, runs: Iterable[tuple[int, int]], k: torch.Tensor | None, v: torch.Tensor | None
    ) -> None:
        """Keep keys and values [B, N, H, D], whose frames go to the slots of ``runs`` in turn; None writes none."""
        store(self.layer(layer), self.spans(runs), k, v)

    def read(self, layer: int, runs: Iterable[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, N, H, D] of runs of slots, one after the other."""
        parts = [load(self.layer(layer), span, self.dtype) for span in self.spans(runs)]
        keys, values = (torch.cat(x, 1) for x in zip(*parts, strict=True))
        return keys, values

    def move(self, source: int, target: int) -> None:
        """Copy a slot onto another in all layers."""
        for buffer in self.buffers:
            if buffer is not None:
                buffer[:, :, self.span((target, target + 1))] = buffer[:, :, self.span((source, source + 1))]
