"""How an operation enters torch: one schema, the reference on every device, Triton on CUDA where it is installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # not on macOS, Windows or a minimal install: the references serve everywhere
    triton = tl = None

__all__ = ["Operation", "refuse_gradients", "register", "run_on", "same_shape", "tl", "triton"]

Operation = Callable[..., Any]


def register(
    name: str, schema: str, reference: Operation, fake: Operation, launch: Operation | None = None
) -> Operation:
    """Define ``cachedit::name`` and return what calls it; torch.compile keeps it as one call.

    Args:
        name: of the operation.
        schema: its arguments and results.
        reference: plain torch, the specification; it runs on every device without an implementation of its own.
        fake: shapes, dtypes and strides of the results, without data.
        launch: the Triton implementation; None without Triton.
    """
    qualified = f"cachedit::{name}"
    if not hasattr(torch.ops.cachedit, name):  # else this module was imported before, and dropped
        torch.library.define(qualified, schema)
        torch.library.impl(qualified, "CompositeExplicitAutograd", reference)
        if launch is not None:
            torch.library.impl(qualified, "CUDA", launch)
        torch.library.register_fake(qualified, fake)
    return getattr(torch.ops.cachedit, name).default


def run_on(x: torch.Tensor) -> bool:
    """Whether the kernels of attention run on such a tensor, and no gradient is asked for that they do not give."""
    wanted = torch.is_grad_enabled() and x.requires_grad
    return triton is not None and x.is_cuda and x.dtype in (torch.float32, torch.bfloat16, torch.float16) and not wanted


def refuse_gradients(name: str, tensors: Sequence[torch.Tensor | None]) -> None:
    """Raise where a gradient would be lost without a word.

    Raises:
        RuntimeError: grad is enabled and one of the tensors requires it.
    """
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise RuntimeError(
            f"{name} was given a tensor that requires grad, and it has no backward pass. Allowed: tensors without grad."
            " Call it under torch.no_grad(), or detach its inputs."
        )


def same_shape(name: str, expected: torch.Tensor, tensors: Sequence[torch.Tensor | None], what: str) -> None:
    """Raise unless every tensor has the shape of ``expected``: a kernel reads by the shape of one.

    Raises:
        ValueError: one of them has not.
    """
    for x in tensors:
        if x is not None and x.shape != expected.shape:
            raise ValueError(
                f"{name} got {what} of shape {list(x.shape)}; allowed: {list(expected.shape)}. "
                "Bring them to one shape first."
            )
