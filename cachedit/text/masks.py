"""Which tokens a model lets see each other, found out by changing some and looking at the others."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from cachedit.errors import UnsupportedModelError
from cachedit.text.caching import inside

TOLERANCE = 1e-3  # of the largest logit: what a sum in another order may change in bf16, far below what a token does
LONGEST = 64  # tokens of a block that is looked for


@torch.no_grad()
def mask_kind(forward: Callable[..., Any], model: nn.Module, block_length: int) -> Literal["full", "block"]:
    """How a model attends when it is called with a plain attention mask: "full", or "block" (none sees a later block).

    Args:
        forward: of the model, called with ``input_ids``, ``attention_mask`` and ``position_ids`` [1, S].
        model: whose device and vocabulary are used.
        block_length: tokens of a block.

    Raises:
        UnsupportedModelError: a token sees only those before it.
    """
    changes = _Changes(forward, model, 2 * block_length)
    if changes.reach(0, block_length, 2 * block_length):
        return "full"
    if block_length > 1 and not changes.reach(0, 1, block_length):
        raise _from_left_to_right(model)
    return "block"


_known: weakref.WeakKeyDictionary[nn.Module, int | None] = weakref.WeakKeyDictionary()


def known_block_length(model: nn.Module) -> int | None:
    """``block_length_of`` a model, which is asked once: who sees whom is a matter of its code."""
    if model not in _known:
        _known[model] = block_length_of(model)
    return _known[model]


@torch.no_grad()
def block_length_of(model: nn.Module) -> int | None:
    """Length of the blocks of a model that is block-causal when it gets a plain mask; None if every token sees all.

    Blocks of up to 64 tokens, counted from the first token, are recognised.

    Raises:
        UnsupportedModelError: a token sees only those before it, or its attention is neither.
    """
    size = min(2 * LONGEST, getattr(getattr(model, "config", None), "max_position_embeddings", None) or 2 * LONGEST)
    changes = _Changes(model, model, size)
    if changes.reach(0, size // 2, size):
        return None
    if not changes.reach(0, 1, size):
        raise _from_left_to_right(model)
    seen, hidden = 1, size // 2  # the first token sees some of those from the one place on, none from the other on
    while hidden - seen > 1:
        middle = (seen + hidden) // 2
        if changes.reach(0, middle, size):
            seen = middle
        else:
            hidden = middle
    second = min(2 * hidden, size)
    if changes.reach(hidden - 1, hidden, size) or not changes.reach(hidden, hidden + 1, second):
        raise UnsupportedModelError(
            f"the first token of {type(model).__name__} sees {hidden} tokens, but the others do not see each other in "
            "blocks of that length. Allowed: full or block-causal attention; say which with attention= and "
            "block_length=."
        )
    return hidden


class _Changes:
    """Logits of random tokens, and of the same tokens with some of them changed."""

    def __init__(self, forward: Callable[..., Any], model: nn.Module, size: int) -> None:
        device = next(model.parameters()).device
        self._forward = forward
        self._vocabulary = next(module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding))
        generator = torch.Generator().manual_seed(0)
        self._ids = torch.randint(self._vocabulary, (1, size), generator=generator).to(device)
        self._before = self._logits(self._ids)

    def reach(self, token: int, start: int, stop: int) -> bool:
        """Whether the logits of a token change with the tokens from ``start`` to ``stop``."""
        changed = self._ids.clone()
        changed[:, start:stop] = (changed[:, start:stop] + 1) % self._vocabulary
        before, now = self._before[token], self._logits(changed)[token]
        return float((before - now).abs().max()) > TOLERANCE * float(before.abs().max())

    def _logits(self, ids: torch.Tensor) -> torch.Tensor:
        order = torch.arange(ids.shape[1], device=ids.device)[None]
        mark = inside.set(True)
        try:
            found: torch.Tensor = self._forward(ids, attention_mask=torch.ones_like(ids), position_ids=order).logits
        finally:
            inside.reset(mark)
        return found[0].float()


def _from_left_to_right(model: nn.Module) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(model).__name__} lets a token see only those before it, so it decodes from left to right. Allowed: "
        "models with full or block-causal attention. If it was trained so, set config.is_causal = False."
    )
