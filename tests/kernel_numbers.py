"""Random tensors, and when a kernel is right."""

from __future__ import annotations

import torch


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def several(shape: tuple[int, ...], count: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [normal(*shape, seed=seed, dtype=dtype) for seed in range(1, count + 1)]


def close(ours: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal up to rounding: tightly in fp32, by the RMS of the error in what the interpreter rounds badly."""
    assert ours.shape == wanted.shape
    assert ours.dtype == wanted.dtype
    assert ours.stride() == wanted.stride()
    assert torch.isfinite(ours).equal(torch.isfinite(wanted))
    if ours.dtype in (torch.float32, torch.float64):
        torch.testing.assert_close(ours, wanted, rtol=3e-6, atol=3e-6)
    elif ours.numel():
        error = (ours.float() - wanted.float()).square().mean().sqrt()
        assert error <= 1e-2 * wanted.float().square().mean().sqrt()
