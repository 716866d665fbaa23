"""The attention of a model of transformers on our kernels, for the time of a pass over the slots."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from cachedit.kernels.registration import run_on
from cachedit.kernels.slot_attention import slot_attention
from cachedit.text.slots import SlotCache

NAME, STOCK = "cachedit_kernels", "sdpa"  # of this attention among those of transformers, and of the one it replaces
# options that change nothing here; with any other one the stock attention knows what is meant
INERT = {"is_causal", "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states"}
_cache: ContextVar[SlotCache | None] = ContextVar("cachedit_kernel_slots", default=None)


@contextmanager
def on_kernels(model: Any, cache: SlotCache | None) -> Iterator[None]:
    """Inside, the model reads few queries by our kernel where it runs; elsewhere nothing is touched."""
    config: Any = getattr(model, "config", None)
    implementation = getattr(config, "_attn_implementation", None)
    if cache is None or implementation != STOCK or not run_on(next(model.parameters())) or not _registered():
        yield
        return
    token = _cache.set(cache)
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = implementation
        _cache.reset(token)


@functools.cache
def _registered() -> bool:
    """Make it known to transformers, with the masks of the stock attention; False where it is too old for that."""
    try:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    except ImportError:
        return False
    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS[STOCK])
    return True


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
    scaling: float | None = None, **options: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def stock() -> torch.Tensor:
        found: torch.Tensor = ALL_ATTENTION_FUNCTIONS[STOCK](
            module, query, key, value, attention_mask, scaling=scaling, **options
        )[0]
        return found.transpose(1, 2)

    cache = _cache.get()
    call = None if cache is None else cache.call
    if call is None or key.shape[2] != call.width or _asked(options):
        return stock().transpose(1, 2), None
    return slot_attention(query, key, value, lambda: call.seen, stock, scaling).transpose(1, 2), None


def _asked(options: dict[str, Any]) -> bool:
    """Whether something is asked for that the kernel does not know, such as a sliding window or a soft cap."""
    asked = [value for name, value in options.items() if name not in INERT and value is not None]
    return any(type(value) not in (bool, int, float) or value != 0 for value in asked)
