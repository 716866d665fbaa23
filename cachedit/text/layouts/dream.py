"""The layout of Dream: self-attention with a rotary embedding of its own; logits are for the next token."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from torch import nn

from cachedit.text.layouts.rotated import attend, heads, replaced
from cachedit.text.options import Attention
from cachedit.text.slots import Pass, SlotCache

PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "rotary_emb", "head_dim")


class DreamLayout:
    """The forward of every self-attention is replaced for a pass; angles are those of the pass, not of the model."""

    shift: ClassVar[int] = 1
    attention: Attention | None = "full"

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        self._attentions: list[Any] = _attentions(model)

    @classmethod
    def fits(cls, model: nn.Module) -> bool:
        """Whether there is such self-attention."""
        return bool(_attentions(model))

    def logits(self, call: Pass, cache: SlotCache | None) -> torch.Tensor:
        """Logits of the kept columns [N, K, V]."""
        functions = [
            functools.partial(self._forward, module, layer, call, cache)
            for layer, module in enumerate(self._attentions)
        ]
        with replaced(self._attentions, "forward", functions):
            found: torch.Tensor = self.model(input_ids=call.ids, position_ids=call.positions).logits
        return found if call.keep is None else found[:, call.keep]

    @staticmethod
    def _forward(
        module: Any, layer: int, call: Pass, cache: SlotCache | None, hidden_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, None, None]:
        dim = module.head_dim
        q, k, v = (
            heads(projection(hidden_states), dim) for projection in (module.q_proj, module.k_proj, module.v_proj)
        )
        cos, sin = (table[:, None] for table in module.rotary_emb(v, call.positions))
        found = attend(q, k, v, cos, sin, layer, call, cache)
        return module.o_proj(found), None, None


def _attentions(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if all(hasattr(module, name) for name in PARTS)]
