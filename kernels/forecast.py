"""Add a forecast residual to what reached a site. The plain torch form is the specification."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def forecast(
    x: torch.Tensor, history: Sequence[torch.Tensor], weights: Sequence[float | torch.Tensor] | None = None
) -> torch.Tensor:
    """``x + sum_k weights[k] * history[k]``, accumulated in fp32 and rounded once.

    Args:
        x: what reached the site, any shape, e.g. [B, N, C].
        history: residuals of the shape of ``x``, oldest first; at least one.
        weights: one number or 0-d tensor per residual; None adds the newest residual unweighted, which is one pass
            and exact.

    Returns:
        A new tensor of the shape and dtype of ``x``.
    """
    if weights is None:
        return x + history[-1]
    total = x.float()
    for weight, residual in zip(weights, history, strict=True):
        total = total + weight * residual.float()
    return total.to(x.dtype)
