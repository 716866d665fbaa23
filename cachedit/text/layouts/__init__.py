"""How a language model is called with some of its tokens; found by the names of its parts, not by its class."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from cachedit.errors import UnsupportedModelError
from cachedit.text.options import Attention
from cachedit.text.slots import Pass, SlotCache


class Layout(Protocol):
    """A model whose tokens can be computed one by one."""

    shift: ClassVar[int]
    attention: Attention | None
    model: Any

    def logits(self, call: Pass, cache: SlotCache | None) -> torch.Tensor:
        """Logits of the kept columns [N, K, V]; keys and values go through the cache, if there is one."""


def layout_of(model: Any) -> Layout:
    """The layout of a model.

    Raises:
        UnsupportedModelError: none fits, or the model leaves nothing to keep.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(f"got a {type(model).__name__}; allowed: a language model (an nn.Module)")
    if _denoises_a_canvas(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} denoises a canvas behind a prompt and earlier canvases, whose keys and values it "
            "keeps itself, exactly. In the canvas each token's input changes at every step, by what was predicted "
            "before and by new noise, so no keys and values of it stay right. Allowed: run it without a cache of ours."
        )
    for layout in _layouts():
        if layout.fits(model):
            found: Layout = layout(model)
            return found
    raise UnsupportedModelError(
        f"{type(model).__name__} has no attention that a text cache knows. Allowed: models of transformers whose "
        "attention takes cache or past_key_values (Llama, Qwen, EuroBert, ..., LLaDA2), and the layouts of LLaDA "
        "(blocks with attention and attn_out) and Dream (self_attn with rotary_emb and o_proj)."
    )


def is_language_model(target: Any) -> bool:
    """Whether the target, or the model of this pipeline, is what text caches are for; ``layout_of`` may refuse it."""
    model = target if isinstance(target, nn.Module) else getattr(target, "model", None)
    if not isinstance(model, nn.Module):
        return False
    return _denoises_a_canvas(model) or any(layout.fits(model) for layout in _layouts())


def _layouts() -> tuple[Any, ...]:
    from cachedit.text.layouts.dream import DreamLayout
    from cachedit.text.layouts.kept import KeptLayout
    from cachedit.text.layouts.llada import LLaDALayout

    return LLaDALayout, DreamLayout, KeptLayout


def _denoises_a_canvas(model: nn.Module) -> bool:
    """Whether attention reads a cache that it never writes, as DiffusionGemma's does."""
    return any(hasattr(module, "append_to_cache") for module in model.modules())
