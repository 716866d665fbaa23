"""Keys and values that are kept from one step to the next, as the attention kernels see them."""

from __future__ import annotations

from typing import NamedTuple

import torch


class KVCache(NamedTuple):
    """Buffers of one attention layer. Slots are never moved; keys are kept after their rotation.

    Attributes:
        k: keys [B, S, H, D] of S slots and H key heads, in any layout whose last axis is contiguous.
        v: values, of the same shape and layout.
        k_scale: with int8 keys, what one step of a key is worth [B, S, H], fp32; None without.
        v_scale: the same of the values.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    @classmethod
    def empty(
        cls,
        batch: int,
        slots: int,
        heads: int,
        dim: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> KVCache:
        """A cache of zeros; ``dtype`` int8 keeps one scale per slot and head beside it, half the bytes of bf16."""
        k, v = (torch.zeros(batch, slots, heads, dim, dtype=dtype, device=device) for _ in range(2))
        if dtype != torch.int8:
            return cls(k, v)
        return cls(k, v, *(torch.zeros(batch, slots, heads, device=device) for _ in range(2)))

    def check(self, name: str) -> None:
        """Raise where the buffers do not belong together; ``name`` is of the operation that asks.

        Raises:
            ValueError: they differ in shape or layout, or int8 has no scales.
        """
        k, v, k_scale, v_scale = self
        if k.ndim != 4 or k.shape != v.shape or k.stride() != v.stride() or k.stride(-1) != 1 or k.dtype != v.dtype:
            raise ValueError(
                f"{name} got keys {_said(k)} and values {_said(v)}; allowed: [slots of a batch, heads, channels] of "
                "one shape, dtype and layout, the last axis contiguous. Make them with KVCache.empty."
            )
        scales = [x for x in (k_scale, v_scale) if x is not None]
        shaped = all(x.shape == k.shape[:3] and x.dtype == torch.float32 for x in scales)
        if len(scales) != 2 * (k.dtype == torch.int8) or not shaped or len({x.stride() for x in scales}) > 1:
            raise ValueError(
                f"{name} got keys {_said(k)} with {len(scales)} scales {[_said(x) for x in scales]}; allowed: two of "
                f"fp32 {list(k.shape[:3])} with int8, none with another dtype. Make them with KVCache.empty."
            )


def _said(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)} strides {list(x.stride())}"
