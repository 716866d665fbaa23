"""The buffers of a ring: keys and values of every layer in frame-sized slots, perhaps in eight bits."""

from __future__ import annotations

import torch

from cachedit.eight_bits import FORMATS, narrowed, widened
from cachedit.kernels import KVCache


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

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(x.numel() * x.element_size() for x in self.buffers if x is not None)

    def layer(self, layer: int) -> KVCache:
        """The buffers of one layer, as the attention kernels take them."""
        return KVCache(*(None if x is None else x[layer] for x in self.buffers))  # type: ignore[arg-type]

    def span(self, run: tuple[int, int]) -> slice:
        """Rows of a run of slots."""
        return slice(run[0] * self.tokens, run[1] * self.tokens)

    def write(self, layer: int, runs: list[tuple[int, int]], k: torch.Tensor | None, v: torch.Tensor | None) -> None:
        """Keep keys and values [B, N, H, D], whose frames go to the slots of ``runs`` in turn; None writes none."""
        for x, (buffer, scale) in zip((k, v), self._pairs(), strict=True):
            if x is None:
                continue
            start = 0
            for run in runs:
                rows = self.span(run)
                part = x[:, start : start + rows.stop - rows.start]
                start += part.shape[1]
                buffer[layer, :, rows], step = narrowed(part, buffer.dtype)
                if scale is not None and step is not None:
                    scale[layer, :, rows] = step

    def read(self, layer: int, runs: list[tuple[int, int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values [B, N, H, D] of every run; views where nothing has to be turned back."""
        return [(self._read(0, layer, run), self._read(1, layer, run)) for run in runs]

    def keys(self, layer: int, run: tuple[int, int]) -> torch.Tensor:
        """Keys [B, N, H, D] of a run."""
        return self._read(0, layer, run)

    def move(self, source: int, target: int) -> None:
        """Copy a slot onto another in all layers."""
        for buffer in self.buffers:
            if buffer is not None:
                buffer[:, :, self.span((target, target + 1))] = buffer[:, :, self.span((source, source + 1))]

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        k, v, k_scale, v_scale = self.buffers
        return [(k, k_scale), (v, v_scale)]

    def _read(self, which: int, layer: int, run: tuple[int, int]) -> torch.Tensor:
        buffer, scale = self._pairs()[which]
        rows = self.span(run)
        return widened(buffer[layer, :, rows], None if scale is None else scale[layer, :, rows], self.dtype)
