"""The metrics of a comparison: which there are, which can be had here, and those that other packages bring."""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cachedit.evaluate import metrics
from cachedit.evaluate.pairs import MetricUnavailable

GROUP = "cachedit.metrics"
"""Entry points of other packages: a name, and a function without arguments that returns a ``Metric``."""

CHUNK = 8  # frames at a time: a video's SSIM in one go takes gigabytes
Score = Callable[[Tensor, Tensor | None, str], Tensor | float]


@dataclass(frozen=True)
class Metric:
    """One number about the pictures of a run.

    Attributes:
        name: key in report.json: letters, digits and underscores.
        title: what columns call it.
        score: called with (pictures ``[N, 3, H, W]`` in [0, 1] on the CPU, those of the bare pipeline or None, prompt);
            gives one number, or one for each picture, of which the mean counts. Raises ``MetricUnavailable`` where it
            cannot be had, with the reason.
        better: which direction is good.
        form: how a value is printed.
        needs_reference: False for one that judges pictures by themselves; the baseline gets a number too.
        of_frames: it compares neighbouring frames: asked for videos only, with all frames at once.
    """

    name: str
    title: str
    score: Score
    better: Literal["higher", "lower"] = "higher"
    form: str = ".3f"
    needs_reference: bool = True
    of_frames: bool = False


def _of_pair(metric: Callable[[Tensor, Tensor], Tensor]) -> Score:
    def score(pictures: Tensor, reference: Tensor | None, prompt: str) -> Tensor:
        assert reference is not None
        return metric(pictures, reference)

    return score


PSNR = Metric("psnr", "PSNR", _of_pair(metrics.psnr), form=".1f")
SSIM = Metric("ssim", "SSIM", _of_pair(metrics.ssim), form=".4f")
MS_SSIM = Metric("ms_ssim", "MS-SSIM", _of_pair(metrics.ms_ssim), form=".4f")
LPIPS = Metric("lpips", "LPIPS", _of_pair(metrics.lpips), "lower", ".4f")
ST_LPIPS = Metric("st_lpips", "st-lpips", _of_pair(metrics.st_lpips), "lower", ".4f")
TEMPORAL = Metric("temporal", "temporal error", _of_pair(metrics.temporal_error), "lower", ".4f", of_frames=True)
STANDARD = (PSNR, SSIM, MS_SSIM, LPIPS, ST_LPIPS, TEMPORAL)
QUICK = (PSNR, SSIM, ST_LPIPS)  # none of these is ever looked for on the net


class Panel:
    """Some metrics, each asked again only while it can be had.

    Args:
        chosen: the metrics.

    Attributes:
        chosen: the metrics.
        unavailable: name -> why a metric could not be had.
    """

    def __init__(self, chosen: Sequence[Metric] = QUICK) -> None:
        self.chosen = tuple(chosen)
        self.unavailable: dict[str, str] = {}

    def judge(self, pictures: Tensor, reference: Tensor | None, prompt: str, video: bool = False) -> dict[str, float]:
        """Every metric that can be had, by name: the mean over pictures or frames.

        Args:
            pictures: ``[N, 3, H, W]`` in [0, 1].
            reference: those of the bare pipeline; None for the bare pipeline itself.
            prompt: what was drawn.
            video: True if the pictures are frames.
        """
        found = {}
        for metric in self.chosen:
            if metric.name in self.unavailable or (metric.of_frames and not video):
                continue
            if metric.needs_reference and reference is None:
                continue
            try:
                found[metric.name] = _mean(metric, pictures, reference, prompt)
            except MetricUnavailable as error:
                self.unavailable[metric.name] = str(error)
        return found


def _mean(metric: Metric, pictures: Tensor, reference: Tensor | None, prompt: str) -> float:
    size = len(pictures) if metric.of_frames or not metric.needs_reference else CHUNK
    values: list[float] = []
    for start in range(0, len(pictures), size):
        part = slice(start, start + size)
        scored = metric.score(pictures[part], reference[part] if reference is not None else None, prompt)
        values += torch.as_tensor(scored, dtype=torch.float64).flatten().tolist()
    if metric.name == PSNR.name:
        return metrics.mean_psnr(values)
    return sum(values) / len(values) if values else math.nan


def installed() -> list[str]:
    """Names of the metrics that other packages bring."""
    return sorted({point.name for point in importlib.metadata.entry_points(group=GROUP)})


def load(names: Sequence[str]) -> tuple[Metric, ...]:
    """Metrics that other packages bring.

    Args:
        names: of their entry points in the group "cachedit.metrics".

    Raises:
        ValueError: there is none of that name, or what it names is no metric.
    """
    points = {point.name: point for point in importlib.metadata.entry_points(group=GROUP)}
    found = []
    for name in dict.fromkeys(names):
        if name not in points:
            raise ValueError(
                f"no package brings a metric called {name!r}. Allowed: {', '.join(sorted(points)) or 'none'}. "
                f"Install one that has an entry point in the group {GROUP}; docs/report.md shows how to write it."
            )
        try:
            metric = points[name].load()()
        except MetricUnavailable as error:
            raise ValueError(f"the metric {name!r} cannot be had: {error}") from error
        except Exception as error:  # another package's code, which may raise anything
            raise ValueError(f"the metric {name!r} cannot be loaded: {type(error).__name__}: {error}") from error
        if not isinstance(metric, Metric) or not metric.name.isidentifier() or metric.name in _TAKEN:
            raise ValueError(
                f"the entry point {name!r} gave {metric!r}; allowed: a function that returns a "
                f"cachedit.evaluate.panel.Metric whose name is an identifier other than {', '.join(sorted(_TAKEN))}."
            )
        found.append(metric)
    return tuple(found)


_TAKEN = {metric.name for metric in STANDARD}
