"""LPIPS v0.1 (arXiv 1801.03924) without torchvision: own backbones, and the linear heads of the torchmetrics wheel."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cachedit.evaluate.pairs import MetricUnavailable, check_size, checked

Net = Literal["alex", "squeeze", "vgg"]
VARIABLE = "CACHEDIT_LPIPS_WEIGHTS"
FILES: dict[str, str] = {
    "alex": "alexnet-owt-7be5be79.pth",
    "squeeze": "squeezenet1_1-b8a52dc0.pth",
    "vgg": "vgg16-397923af.pth",
}
TAPS: dict[str, tuple[int, ...]] = {  # layers whose output is compared
    "alex": (1, 4, 7, 9, 11),
    "squeeze": (1, 4, 7, 9, 10, 11, 12),
    "vgg": (3, 8, 15, 22, 29),
}
LEAST: dict[str, int] = {"alex": 31, "squeeze": 17, "vgg": 16}  # pixels that its poolings leave something of


def lpips(a: Tensor, b: Tensor, net: Net = "alex", weights: str | Path | None = None) -> Tensor:
    """Learned perceptual distance, 0 for identical pictures.

    Args:
        a: ``[N, 3, H, W]`` in [0, 1].
        b: like ``a``.
        net: the backbone; "alex" is what most papers report.
        weights: its ImageNet weights, a ``state_dict`` file as torchvision publishes it. None: the file named by the
            environment variable ``CACHEDIT_LPIPS_WEIGHTS``, else torch.hub's folder, else a download from
            download.pytorch.org.

    Returns:
        ``[N]`` float32.

    Raises:
        ValueError: the shapes differ or are not ``[N, 3, H, W]``, or the backbone is unknown.
        MetricUnavailable: the weights are not there or not those of the backbone, or the pictures are too small.
    """
    a, b = checked(a, b)
    if net not in FILES:
        raise ValueError(f"lpips got net={net!r}; allowed: {', '.join(FILES)}.")
    check_size(a, LEAST[net], "LPIPS", "SSIM")
    model = _network(net, str(_find(net, weights)))
    with torch.no_grad():
        return model(2 * a - 1, 2 * b - 1)


class Lpips(nn.Module):
    """A backbone whose features are compared channel by channel with learned weights.

    Args:
        net: name of the backbone.
        trunk: its weights under torchvision's names (``features.0.weight`` ...); other entries are ignored.
    """

    shift: Tensor
    scale: Tensor

    def __init__(self, net: Net, trunk: dict[str, Tensor]) -> None:
        super().__init__()
        self.taps = TAPS[net]
        self.trunk = build_trunk(net)
        prefix = "features."
        self.trunk.load_state_dict({k[len(prefix) :]: v for k, v in trunk.items() if k.startswith(prefix)})
        self.heads = _heads(net)
        self.register_buffer("shift", torch.tensor([-0.030, -0.088, -0.188])[:, None, None])
        self.register_buffer("scale", torch.tensor([0.458, 0.448, 0.450])[:, None, None])
        self.eval()

    def features(self, x: Tensor) -> Iterator[Tensor]:
        """Features of ``x`` ``[N, 3, H, W]`` in [-1, 1], each of unit length over the channels."""
        x = (x - self.shift) / self.scale
        for index, layer in enumerate(self.trunk):
            x = layer(x)
            if index in self.taps:
                yield x / torch.sqrt(1e-8 + x.square().sum(1, keepdim=True))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Distance ``[N]`` of two ``[N, 3, H, W]`` in [-1, 1]."""
        levels = zip(self.features(a), self.features(b), self.heads, strict=True)
        return torch.stack([F.conv2d((p - q).square(), head).mean((1, 2, 3)) for p, q, head in levels]).sum(0)


class Fire(nn.Module):
    """SqueezeNet's block: 1x1 convolution, then 1x1 and 3x3 side by side."""

    def __init__(self, inputs: int, squeezed: int, expanded: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(inputs, squeezed, 1)
        self.expand1x1 = nn.Conv2d(squeezed, expanded, 1)
        self.expand3x3 = nn.Conv2d(squeezed, expanded, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """[N, inputs, H, W] -> [N, 2 * expanded, H, W]."""
        x = F.relu(self.squeeze(x))
        return torch.cat([F.relu(self.expand1x1(x)), F.relu(self.expand3x3(x))], 1)


def build_trunk(net: Net) -> nn.Sequential:
    """The ``features`` of torchvision's AlexNet, SqueezeNet 1.1 or VGG16, with its layer numbers."""
    return {"alex": _alexnet, "squeeze": _squeezenet, "vgg": _vgg16}[net]()


def _alexnet() -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2)]
    layers += [nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)]
    for inputs, outputs in ((192, 384), (384, 256), (256, 256)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers)


def _squeezenet() -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 2), nn.ReLU(), _pool(), Fire(64, 16, 64), Fire(128, 16, 64), _pool()]
    layers += [Fire(128, 32, 128), Fire(256, 32, 128), _pool()]
    layers += [Fire(256, 48, 192), Fire(384, 48, 192), Fire(384, 64, 256), Fire(512, 64, 256)]
    return nn.Sequential(*layers)


def _pool() -> nn.MaxPool2d:
    return nn.MaxPool2d(3, 2, ceil_mode=True)


def _vgg16() -> nn.Sequential:
    layers: list[nn.Module] = []
    inputs = 3
    for outputs, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        if layers:
            layers.append(nn.MaxPool2d(2, 2))
        for _ in range(count):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
            inputs = outputs
    return nn.Sequential(*layers)


def _heads(net: Net) -> list[Tensor]:
    """One ``[1, C, 1, 1]`` weight per tap, read from the torchmetrics wheel."""
    origin = getattr(importlib.util.find_spec("torchmetrics"), "origin", None)
    file = Path(origin or "").parent / "functional" / "image" / "lpips_models" / f"{net}.pth"
    if not file.is_file():
        raise MetricUnavailable(f"LPIPS needs the linear heads that torchmetrics ships, and {file} is missing.")
    state = torch.load(file, map_location="cpu", weights_only=True)
    return [state[key] for key in sorted(state)]


def _find(net: Net, weights: str | Path | None) -> Path:
    """The weight file of a backbone, downloaded if it is nowhere and can be."""
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    named = weights or os.environ.get(VARIABLE)
    file = Path(named) if named else folder / FILES[net]
    if file.is_file():
        return file
    why = "no such file"
    if not named:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(
                f"https://download.pytorch.org/models/{FILES[net]}", str(file), file.stem[-8:], progress=False
            )
            return file
        except (OSError, RuntimeError) as error:  # no network, or a file with another hash
            why = str(error)
    raise MetricUnavailable(
        f"LPIPS needs the backbone weights {FILES[net]}; looked for {file} ({why}). Put the file into {folder}, pass "
        f"weights=PATH, set {VARIABLE}, or use st-lpips, whose weights a package carries: pip install "
        "stlpips-pytorch==0.0.2"
    )


@functools.lru_cache(maxsize=2)
def _network(net: Net, file: str) -> Lpips:
    try:
        return Lpips(net, torch.load(file, map_location="cpu", weights_only=True))
    except (RuntimeError, EOFError, AttributeError, ValueError) as error:
        lines = " ".join(str(error).split())[:200]
        raise MetricUnavailable(f"{file} does not hold the weights of LPIPS' {net} backbone: {lines}") from error
