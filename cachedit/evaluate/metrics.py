"""How far apart pictures are. Every metric takes two ``[N, 3, H, W]`` tensors in [0, 1] and returns ``[N]``.

PSNR and SSIM are always there. LPIPS needs the weights of its backbone, st-lpips the package that carries them; without
these both raise :class:`MetricUnavailable` and never answer with random weights.
"""

from __future__ import annotations

import math

from torch import Tensor

from cachedit.evaluate.lpips import lpips
from cachedit.evaluate.pairs import MetricUnavailable, check_size, checked
from cachedit.evaluate.st_lpips import st_lpips

__all__ = ["MetricUnavailable", "lpips", "mean_psnr", "ms_ssim", "psnr", "ssim", "st_lpips", "temporal_error"]

SSIM_WINDOW = 11  # pixels
SCALES = 5  # of MS-SSIM, each half as large as the one before


def psnr(a: Tensor, b: Tensor) -> Tensor:
    """Peak signal-to-noise ratio in dB, higher is closer; infinite for identical pictures.

    Args:
        a: ``[N, 3, H, W]`` in [0, 1].
        b: like ``a``.

    Returns:
        ``[N]`` float32.

    Raises:
        ValueError: the shapes differ or are not ``[N, 3, H, W]``.
    """
    from torchmetrics.functional.image import peak_signal_noise_ratio

    a, b = checked(a, b)
    return peak_signal_noise_ratio(a, b, data_range=1.0, reduction="none", dim=(1, 2, 3))


def ssim(a: Tensor, b: Tensor) -> Tensor:
    """Structural similarity with the usual Gaussian window of 11 pixels; 1 for identical pictures.

    Args:
        a: ``[N, 3, H, W]`` in [0, 1], at least 11 pixels in height and width.
        b: like ``a``.

    Returns:
        ``[N]`` float32.

    Raises:
        ValueError: the shapes differ or are not ``[N, 3, H, W]``.
        MetricUnavailable: the pictures are smaller than the window.
    """
    from torchmetrics.functional.image import structural_similarity_index_measure

    a, b = checked(a, b)
    check_size(a, SSIM_WINDOW, "SSIM", "PSNR")
    # In float32 its variances are differences of large numbers, and identical pictures score 0.999997.
    values = structural_similarity_index_measure(a.double(), b.double(), data_range=1.0, reduction="none")
    assert isinstance(values, Tensor)
    return values.float()


def ms_ssim(a: Tensor, b: Tensor) -> Tensor:
    """Structural similarity over five scales with the usual weights; 1 for identical pictures.

    Args:
        a: ``[N, 3, H, W]`` in [0, 1], at least 176 pixels in height and width.
        b: like ``a``.

    Returns:
        ``[N]`` float32.

    Raises:
        ValueError: the shapes differ or are not ``[N, 3, H, W]``.
        MetricUnavailable: the smallest scale of the pictures is smaller than the window.
    """
    from torchmetrics.functional.image import multiscale_structural_similarity_index_measure

    a, b = checked(a, b)
    check_size(a, SSIM_WINDOW * 2 ** (SCALES - 1), "MS-SSIM", "SSIM")
    values = multiscale_structural_similarity_index_measure(
        a.double(), b.double(), data_range=1.0, reduction="none", normalize="relu"
    )
    assert isinstance(values, Tensor)
    return values.float().reshape(len(a))


def temporal_error(a: Tensor, b: Tensor) -> Tensor:
    """How differently two videos change from frame to frame: the mean of ``|(a' - a) - (b' - b)|``; 0 if they agree.

    A video that is off by a constant scores 0, and one that flickers does not, however close each frame is.

    Args:
        a: ``[N, 3, H, W]`` in [0, 1], frames in their order.
        b: like ``a``.

    Returns:
        ``[N - 1]`` float32, in units of the full range of a pixel.

    Raises:
        ValueError: the shapes differ or are not ``[N, 3, H, W]``.
        MetricUnavailable: there are fewer than two frames.
    """
    a, b = checked(a, b)
    if len(a) < 2:
        raise MetricUnavailable(f"the temporal error got {len(a)} frames; allowed: two or more. Use PSNR.")
    return (a.diff(dim=0) - b.diff(dim=0)).abs().mean((1, 2, 3))


def mean_psnr(values: list[float]) -> float:
    """Mean over the pictures that differ at all; infinite if none does.

    One identical picture would make a plain mean infinite. Leaving it out can only lower the number.
    """
    finite = [value for value in values if value != math.inf]
    return sum(finite) / len(finite) if finite else math.inf
