"""Add a forecast residual to what reached a site. The plain torch form is the specification."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def forecast(
    x: torch.Tensor | None, history: Sequence[torch.Tensor], weights: Sequence[float | torch.Tensor] | None = None
) -> torch.Tensor:
    """``x + sum_k weights[k] * history[k]``, accumulated in fp32 and rounded once.

    Args:
        x: what reached the site, any shape, e.g. [B, N, C]; None for the sum alone.
        history: residuals of the shape of ``x``, oldest first; at least one.
        weights: one number, or tensor that broadcasts to a residual, per residual; None takes the newest residual
            unweighted, which is one pass and exact.

    Returns:
        A tensor of the shape and dtype of ``x``, or of the newest residual. Without ``x`` and ``weights`` it is the
        newest residual itself.
    """
    if weights is None:
        return history[-1] if x is None else x + history[-1]
    total = None if x is None else x.float()
    for weight, residual in zip(weights, history, strict=True):
        term = weight * residual.float()
        total = term if total is None else total + term
    assert total is not None
    return total.to(history[-1].dtype if x is None else x.dtype)


def low_pass(x: torch.Tensor, cut: float) -> torch.Tensor:
    """The slowly varying part of ``x``.

    Args:
        x: tokens [B, N, C], filtered along N, or features [B, C, ..., H, W], filtered along H and W.
        cut: share of the frequencies up to the highest that is kept, in (0, 1); the mean is always kept.

    Returns:
        A tensor of the shape and dtype of ``x``.
    """
    for axis in (1,) if x.ndim == 3 else (-2, -1):
        size = x.shape[axis]
        spectrum = torch.fft.rfft(x.float(), dim=axis)
        kept = int(cut * (spectrum.shape[axis] - 1)) + 1
        spectrum.narrow(axis, kept, spectrum.shape[axis] - kept).zero_()
        x = torch.fft.irfft(spectrum, n=size, dim=axis).to(x.dtype)
    return x
