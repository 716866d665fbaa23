"""Which tokens a model lets see each other, found out by changing some and looking at the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from cachedit.errors import UnsupportedModelError
from cachedit.text.caching import inside

TOLERANCE = 1e-3  # of the largest logit: what a sum in another order may change in bf16, far below what a token does


@torch.no_grad()
def mask_kind(forward: Callable[..., Any], model: nn.Module, block_length: int) -> str:
    """How a model attends when it is called with a plain attention mask: "full", or "block" (none sees a later block).

    Args:
        forward: of the model, called with ``input_ids``, ``attention_mask`` and ``position_ids`` [1, S].
        model: whose device and vocabulary are used.
        block_length: tokens of a block.

    Raises:
        UnsupportedModelError: a token sees only those before it.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    size = 2 * block_length
    ids = torch.randint(_vocabulary(model), (1, size), generator=generator).to(device)
    order = torch.arange(size, device=device)[None]

    def first(start: int, stop: int) -> torch.Tensor:
        """Logits of the first token, with other tokens from ``start`` to ``stop``."""
        changed = ids.clone()
        changed[:, start:stop] = (changed[:, start:stop] + 1) % _vocabulary(model)
        logits: torch.Tensor = forward(changed, attention_mask=torch.ones_like(ids), position_ids=order).logits
        return logits[0, 0].float()

    token = inside.set(True)
    try:
        before, later, own = first(0, 0), first(block_length, size), first(1, block_length)
    finally:
        inside.reset(token)
    scale = TOLERANCE * float(before.abs().max())
    if float((before - later).abs().max()) > scale:
        return "full"
    if block_length > 1 and float((before - own).abs().max()) <= scale:
        raise UnsupportedModelError(
            f"{type(model).__name__} lets a token see only those before it, so it decodes from left to right. Allowed: "
            "models with full or block-causal attention. If it was trained so, set config.is_causal = False."
        )
    return "block"


def _vocabulary(model: nn.Module) -> int:
    """Number of token ids, by the first embedding of the model."""
    return next(module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding))
