"""What stands in for the attention processors of a model, and for how long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, Generic, TypeVar

import torch

from cachedit.borrowed import borrowed

DISPATCH = "diffusers.models.attention_dispatch", "dispatch_attention_fn"
Current = TypeVar("Current")


class Processor(Generic[Current]):
    """Base of what stands in for the attention processors of a model.

    Args:
        current: the pass that is made; outside of one the model's own processor is called.
        layer: number of the block.
        stock: the processor that it stands in for.
    """

    _parallel_config = None

    def __init__(self, current: Current, layer: int, stock: Any) -> None:
        self.current, self.layer, self.stock = current, layer, stock
        self._attention_backend = getattr(stock, "_attention_backend", None)
        borrowed(*DISPATCH)  # a release without it is told of before the first step


@contextmanager
def alone(lock: Lock, model: str) -> Iterator[None]:
    """Inside, nobody else holds the lock of a model's passes.

    Raises:
        RuntimeError: another thread is in one.
    """
    if not lock.acquire(blocking=False):
        raise RuntimeError(
            f"two threads run one {model} at once; allowed: one at a time. Give each thread its own copy."
        )
    try:
        yield
    finally:
        lock.release()


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backend: Any, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention [B, N, H, D] by the backend that the model was given."""
    dispatch = borrowed(*DISPATCH)
    found: torch.Tensor = dispatch(q, k, v, attn_mask=mask, dropout_p=0.0, is_causal=False, backend=backend)
    return found
