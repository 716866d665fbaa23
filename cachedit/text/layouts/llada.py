"""The layout of LLaDA: blocks whose ``attention`` gets flat queries, keys and values that are not rotated yet."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from torch import nn

from cachedit.text.layouts.rotated import attend, heads, replaced
from cachedit.text.options import Attention
from cachedit.text.slots import Pass, SlotCache

PARTS = ("attention", "attn_out", "q_proj", "k_proj", "v_proj", "rotary_emb")


class LLaDALayout:
    """Only ``attention`` knows where a token stands, so only it is replaced; a pass later it is back."""

    shift: ClassVar[int] = 0
    attention: Attention | None = "full"

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        self._blocks: list[Any] = _blocks(model)

    @classmethod
    def fits(cls, model: nn.Module) -> bool:
        """Whether there are such blocks."""
        return bool(_blocks(model))

    def logits(self, call: Pass, cache: SlotCache | None) -> torch.Tensor:
        """Logits of the kept columns [N, K, V]."""
        functions = [
            functools.partial(self._attention, block, layer, call, cache) for layer, block in enumerate(self._blocks)
        ]
        with replaced(self._blocks, "attention", functions):
            found: torch.Tensor = self.model(input_ids=call.ids).logits
        return found if call.keep is None else found[:, call.keep]

    @staticmethod
    def _attention(
        block: Any, layer: int, call: Pass, cache: SlotCache | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        *_: Any, **__: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        dim = q.shape[-1] // block.config.n_heads
        q, k, v = (heads(x, dim) for x in (q, k, v))
        length = int(call.positions.max()) + 1
        sin, cos = (
            table[0, 0][call.positions][:, None] for table in block.rotary_emb.get_rotary_embedding(length, q.device)
        )
        if not getattr(block.config, "rope_full_precision", True):
            sin, cos = sin.to(q.dtype), cos.to(q.dtype)
        return block.attn_out(attend(q, k, v, cos, sin, layer, call, cache)), None


def _blocks(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if all(hasattr(module, name) for name in PARTS)]
