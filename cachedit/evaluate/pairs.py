"""What every metric asks of a pair of pictures, and the error of a metric that cannot be had."""

from __future__ import annotations

from torch import Tensor


class MetricUnavailable(RuntimeError):
    """A metric cannot be computed here; the message says what is missing and where to get it."""


def checked(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The pair as float32 on the CPU.

    Args:
        a: ``[N, 3, H, W]`` in [0, 1].
        b: like ``a``.

    Raises:
        ValueError: the shapes differ or are not ``[N, 3, H, W]``.
    """
    if a.shape != b.shape or a.ndim != 4 or a.shape[1] != 3:
        raise ValueError(
            f"a metric got pictures of shape {list(a.shape)} and {list(b.shape)}; allowed: two tensors of one shape "
            "[N, 3, H, W], RGB in [0, 1]."
        )
    return a.detach().float().cpu(), b.detach().float().cpu()


def check_size(pictures: Tensor, least: int, name: str, instead: str) -> None:
    """Refuse pictures that are too small for a metric.

    Args:
        pictures: ``[N, 3, H, W]``.
        least: pixels in height and width.
        name: of the metric.
        instead: a metric for smaller ones.

    Raises:
        MetricUnavailable: they are smaller.
    """
    if min(pictures.shape[2:]) < least:
        raise MetricUnavailable(
            f"{name} got pictures of {pictures.shape[2]}x{pictures.shape[3]} pixels; allowed: {least}x{least} or more. "
            f"Use {instead}."
        )
