"""The layers of a model whose parts can be called one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from cachedit.errors import UnsupportedModelError

PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")


@dataclass(frozen=True)
class Layers:
    """Attributes:
    each: the layers, in order of execution.
    rotary: gives the angles for positions, called with hidden states and positions.
    """

    each: list[Any]
    rotary: Any

    @classmethod
    def of(cls, model: nn.Module, strategy: str) -> Layers:
        """Those of a model.

        Raises:
            UnsupportedModelError: its layers have other parts.
        """
        each = [module for module in model.modules() if all(hasattr(module, part) for part in PARTS)]
        rotary = [module.rotary_emb for module in model.modules() if hasattr(module, "rotary_emb")]
        if not each or len(rotary) != 1 or not all(hasattr(layer.self_attn, "v_proj") for layer in each):
            raise UnsupportedModelError(
                f"{strategy} works inside the layers, and those of {type(model).__name__} are not known. Allowed: "
                f"layers with {', '.join(PARTS)} (Llama, Qwen, EuroBert). Another strategy needs the attention alone."
            )
        return cls(each, rotary[0])
