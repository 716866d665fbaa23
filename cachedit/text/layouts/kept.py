"""Models whose attention keeps its keys and values in transformers' Cache: Llama, Qwen, EuroBert, LLaDA2."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import torch
from torch import nn

from cachedit.text.kernel_attention import on_kernels
from cachedit.text.listening import attention_of
from cachedit.text.options import Attention
from cachedit.text.slots import Pass, SlotCache

SPELLINGS = ("cache", "past_key_values")  # transformers renamed the argument


class KeptLayout:
    """Calls the model as it is, with the slots in the place of transformers' cache."""

    shift: ClassVar[int] = 0

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        attention = _attentions(model)
        takes = [_parameters(model), *map(_parameters, attention)]
        self._name = next(name for names in takes for name in SPELLINGS if name in names)
        self._keeps = "logits_to_keep" in takes[0]
        self._fused = fused = hasattr(attention[0], "query_key_value")
        self.attention: Attention | None = "block" if fused else None
        # LLaDA2 builds a mask of its own from None, and a causal one is only left out where the config says so
        causal = [getattr(module, "is_causal", True) for module in attention]
        config = getattr(model, "config", None)
        self._explicit = fused or (getattr(config, "is_causal", True) is not False and any(causal))
        self._additive = fused or getattr(config, "_attn_implementation", None) == "eager"
        self._extra = {"is_causal": False} if any(causal) and not fused else {}

    @classmethod
    def fits(cls, model: nn.Module) -> bool:
        """Whether there are attention modules that take a cache."""
        found = _attentions(model)
        names = {name for module in (model, *found) for name in _parameters(module)}
        return bool(found) and any(name in names for name in SPELLINGS)

    def logits(self, call: Pass, cache: SlotCache | None) -> torch.Tensor:
        """Logits of the kept columns [N, K, V]."""
        from cachedit.text.layouts.transformers_cache import as_cache

        options: dict[str, Any] = {**self._extra, "use_cache": cache is not None}
        if cache is not None:
            options[self._name] = as_cache(cache, self._fused)
        if self._keeps and call.keep is not None:
            options["logits_to_keep"] = call.keep
        with on_kernels(self.model, cache), attention_of(getattr(self.model, "config", None)):
            found: torch.Tensor = self.model(
                input_ids=call.ids, position_ids=call.positions, attention_mask=self._mask(call), **options
            ).logits
        return found if self._keeps or call.keep is None else found[:, call.keep]

    def _mask(self, call: Pass) -> torch.Tensor | None:
        visible = call.visible
        if visible is None:
            if not self._explicit:
                return None
            visible = torch.ones(*call.ids.shape, call.width, dtype=torch.bool, device=call.ids.device)[:, None]
        if not self._additive:
            return visible
        dtype = next(self.model.parameters()).dtype
        return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)


def _attentions(model: nn.Module) -> list[nn.Module]:
    """The self-attention modules, in order of execution."""
    return [
        module
        for module in model.modules()
        if hasattr(module, "layer_idx")
        and ((hasattr(module, "q_proj") and hasattr(module, "k_proj")) or hasattr(module, "query_key_value"))
    ]


def _parameters(module: nn.Module) -> list[str]:
    return list(inspect.signature(type(module).forward).parameters)
