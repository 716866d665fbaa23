"""How a language model is called with some of its tokens; found by the names of its parts, not by its class."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from cachedit.errors import UnsupportedModelError
from cachedit.text.slots import Pass, SlotCache


class Layout(Protocol):
    """A model whose tokens can be computed one by one."""

    shift: ClassVar[int]
    attention: str | None
    model: Any

    def logits(self, call: Pass, cache: SlotCache | None) -> torch.Tensor:
        """Logits of the kept columns [N, K, V]; keys and values go through the cache, if there is one."""


def layout_of(model: Any) -> Layout:
    """The layout of a model.

    Raises:
        UnsupportedModelError: none fits.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(f"got a {type(model).__name__}; allowed: a language model (an nn.Module)")
    from cachedit.text.layouts.dream import DreamLayout
    from cachedit.text.layouts.kept import KeptLayout
    from cachedit.text.layouts.llada import LLaDALayout

    layouts: tuple[Any, ...] = (LLaDALayout, DreamLayout, KeptLayout)
    for layout in layouts:
        if layout.fits(model):
            found: Layout = layout(model)
            return found
    raise UnsupportedModelError(
        f"{type(model).__name__} has no attention that a text cache knows. Allowed: models of transformers whose "
        "attention takes cache or past_key_values (Llama, Qwen, EuroBert, ..., LLaDA2), and the layouts of LLaDA "
        "(blocks with attention and attn_out) and Dream (self_attn with rotary_emb and o_proj)."
    )


def is_language_model(target: Any) -> bool:
    """Whether a text cache knows the target, or the model of this pipeline."""
    try:
        layout_of(target if isinstance(target, nn.Module) else getattr(target, "model", None))
    except UnsupportedModelError:
        return False
    return True
