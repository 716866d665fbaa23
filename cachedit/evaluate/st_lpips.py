"""Shift-tolerant LPIPS (Ghildyal and Liu, ECCV 2022, arXiv 2207.13686), AlexNet form.

Only the weight file of the ``stlpips-pytorch`` wheel is read; its code needs torchvision. The backbone is the authors'
own anti-aliased AlexNet, so the numbers are not comparable with published LPIPS and carry their own name.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from cachedit.evaluate.pairs import MetricUnavailable, check_size, checked

PACKAGE, FILE = "stlpips-pytorch", "alex_shift_tolerant.pth"
LEAST = 21  # pixels: of smaller pictures the last blur has nothing to reflect


def st_lpips(a: Tensor, b: Tensor, weights: str | Path | None = None) -> Tensor:
    """Learned perceptual distance that forgives small shifts, 0 for identical pictures.

    Args:
        a: ``[N, 3, H, W]`` in [0, 1].
        b: like ``a``.
        weights: the file ``alex_shift_tolerant.pth``; None takes it from the installed package ``stlpips-pytorch``.

    Returns:
        ``[N]`` float32.

    Raises:
        ValueError: the shapes differ or are not ``[N, 3, H, W]``.
        MetricUnavailable: the weights are not there, or the pictures are smaller than 21 pixels.
    """
    a, b = checked(a, b)
    check_size(a, LEAST, "st-lpips", "PSNR")
    state = _load(str(weights) if weights is not None else str(_installed()))
    with torch.no_grad():
        levels = enumerate(zip(_features(state, 2 * a - 1), _features(state, 2 * b - 1), strict=True))
        heads = [(F.conv2d((p - q).square(), state[f"lin{i}.model.1.weight"])).mean((1, 2, 3)) for i, (p, q) in levels]
        return torch.stack(heads).sum(0)


def _features(state: dict[str, Tensor], x: Tensor) -> Iterator[Tensor]:
    """The five feature maps of ``x`` ``[N, 3, H, W]`` in [-1, 1], each of unit length over the channels."""

    def convolution(x: Tensor, name: str, padding: int) -> Tensor:
        return F.conv2d(x, state[f"net.{name}.weight"], state[f"net.{name}.bias"], padding=padding)

    def halved(x: Tensor, name: str) -> Tensor:
        """Blur, then drop every other pixel: the anti-aliasing that makes the network tolerate shifts."""
        return F.conv2d(F.pad(x, (2, 2, 2, 2), mode="reflect"), state[f"net.{name}.filt"], stride=2, groups=x.shape[1])

    x = (x - state["scaling_layer.shift"]) / state["scaling_layer.scale"]
    x = F.relu(halved(convolution(x, "slice1.0", 2), "slice1.1"))
    yield _unit(x)
    x = F.relu(convolution(halved(F.max_pool2d(x, 3, 1), "slice2.4"), "slice2.5", 2))
    yield _unit(x)
    x = F.relu(convolution(halved(F.max_pool2d(x, 3, 1), "slice3.8"), "slice3.9", 1))
    yield _unit(x)
    x = F.relu(convolution(x, "slice4.11", 1))
    yield _unit(x)
    yield _unit(F.relu(convolution(x, "slice5.13", 1)))


def _unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(1, keepdim=True).sqrt() + 1e-10)


def _installed() -> Path:
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == FILE:
            return Path(str(file.locate()))
    raise MetricUnavailable(
        f"st-lpips needs {FILE}, which the package {PACKAGE} carries. Install it: pip install {PACKAGE}==0.0.2 "
        "--no-deps, or pass weights=PATH."
    )


@functools.lru_cache(maxsize=1)
def _load(file: str) -> dict[str, Tensor]:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError) as error:
        raise MetricUnavailable(f"st-lpips cannot read its weights from {file}: {error}") from error
