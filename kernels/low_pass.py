"""The slowly varying part of a residual, for forecasts that treat the two bands differently."""

from __future__ import annotations

import torch


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
