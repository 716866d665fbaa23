"""The result of a comparison: rows (one configuration over all prompts) and the whole."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cachedit.evaluate.configuration import BASELINE
from cachedit.evaluate.metrics import mean_psnr
from cachedit.evaluate.panel import QUICK, Metric
from cachedit.evaluate.rollouts import summary
from cachedit.evaluate.shot import Shot, finite, flat
from cachedit.run import Run

__all__ = ["BASELINE", "Comparison", "Row", "Shot"]


@dataclass
class Row:
    """One configuration over all prompts.

    Attributes:
        strategy: "baseline", or the name of the configuration.
        latency_s: median seconds of a whole call; None if none was timed.
        speedup: the baseline's ``latency_s`` over this one.
        nfe, reused: computed and reused steps, medians over the prompts; None if no run was recorded.
        rho: median time of a reused denoiser call over a computed one; None without both.
        cache_bytes: most bytes held at once.
        peak_memory: most bytes that torch held on the device at once; None where it cannot be told.
        macs: multiply-accumulates of the denoiser in the first prompt's run; None if they were not counted.
        macs_ratio: ``macs`` over the baseline's.
        quality: metric -> mean over the prompts. Identical pictures are left out of the mean PSNR, which is infinite
            if all are.
        worst: metric -> value of the prompt that came out worst.
        identical: number of prompts whose pictures equal the baseline's to the last bit.
        configuration: the strategy with all its options; "" for the baseline.
        strip: one mark per step, of the first prompt.
        expected: what the strategy expected of the first prompt's run; mostly empty.
        rollout: chunks, window and times of the first prompt's video, where it was made chunk by chunk; else empty.
        note: in words, what the numbers would hide: that nothing was reused, that the strips differ. "" if nothing.
        shots: the prompts.
    """

    strategy: str
    latency_s: float | None
    speedup: float | None
    nfe: float | None
    reused: float | None = None
    rho: float | None = None
    cache_bytes: int | None = None
    peak_memory: int | None = None
    macs: float | None = None
    macs_ratio: float | None = None
    quality: dict[str, float] = field(default_factory=dict)
    worst: dict[str, float] = field(default_factory=dict)
    identical: int | None = None
    configuration: str = ""
    strip: str = ""
    expected: dict[str, Any] = field(default_factory=dict)
    rollout: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    shots: list[Shot] = field(default_factory=list)

    @classmethod
    def of_baseline(cls, shots: list[Shot], steps: int | None, metrics: tuple[Metric, ...] = QUICK) -> Row:
        """What the caches are compared with, as a rule the bare pipeline, which computes every step."""
        quality, worst = _quality(shots, metrics)
        counts = [shot.nfe for shot in shots if shot.nfe is not None]
        return cls(
            BASELINE,
            latency_s=_median_latency(shots),
            speedup=1.0 if any(shot.latencies for shot in shots) else None,
            nfe=_median(counts) if counts else steps,
            configuration=shots[0].run.strategy if shots[0].run is not None else "",
            rollout=_rollout(shots),
            peak_memory=_most(shots),
            quality=quality,
            worst=worst,
            shots=shots,
        )

    @classmethod
    def of_cache(cls, name: str, shots: list[Shot], baseline: Row, metrics: tuple[Metric, ...] = QUICK) -> Row:
        """One cache, against the baseline."""
        latency = _median_latency(shots)
        records = [shot.run for shot in shots if shot.run is not None]
        runs = [run for run in records if isinstance(run, Run)]
        quality, worst = _quality(shots, metrics)
        row = cls(
            strategy=name,
            latency_s=latency,
            speedup=baseline.latency_s / latency if baseline.latency_s and latency else None,
            nfe=_median([shot.nfe for shot in shots if shot.nfe is not None]),
            reused=_median([len(run.reused_steps) for run in runs]),
            rho=_median([run.rho for run in runs if run.rho is not None]),
            cache_bytes=max((run.cache_bytes_peak for run in records), default=None),
            peak_memory=_most(shots),
            quality=quality,
            worst=worst,
            identical=sum(shot.identical for shot in shots),
            configuration=records[0].strategy if records else "",
            strip=shots[0].strip,
            expected=runs[0].expected if runs else {},
            rollout=_rollout(shots),
            shots=shots,
        )
        row.note = _note(row) if latency is not None else _unlike(row)
        return row

    @property
    def psnr(self) -> float | None:
        """Mean PSNR in dB; None where it was not measured."""
        return self.quality.get("psnr")

    @property
    def worst_psnr(self) -> float | None:
        """Lowest PSNR of a prompt; None where it was not measured."""
        return self.worst.get("psnr")

    @property
    def ssim(self) -> float | None:
        """Mean SSIM; None where it was not measured."""
        return self.quality.get("ssim")

    @property
    def st_lpips(self) -> float | None:
        """Mean st-lpips; None where it was not measured."""
        return self.quality.get("st_lpips")

    def to_dict(self, folder: Path | None = None) -> dict[str, Any]:
        """JSON form: what does not apply and what is infinite is null, ``identical`` tells why.

        Args:
            folder: from which files are named; given, everything that was measured is there.
        """
        names = ("latency_s", "speedup", "nfe", "reused", "rho", "cache_bytes", "peak_memory", "macs", "macs_ratio")
        return {
            "strategy": self.strategy,
            **{name: finite(getattr(self, name)) for name in names},
            **flat(self.quality),
            "worst_psnr": finite(self.worst_psnr),
            "worst": {name: finite(value) for name, value in self.worst.items()},
            "identical": None if self.identical is None else self.identical == len(self.shots),
            "identical_prompts": self.identical,
            "configuration": self.configuration or None,
            "strip": self.strip or None,
            "expected": self.expected or None,
            "rollout": self.rollout or None,
            "note": self.note or None,
            "prompts": [shot.to_dict(folder) for shot in self.shots],
        }


@dataclass
class Comparison:
    """Rows, and the conditions under which they hold.

    Attributes:
        conditions: name -> value, ready for JSON.
        rows: the baseline first.
        metrics: those that were asked for.
        unavailable: metric -> why it could not be had.
        counted: True if work and memory were looked at, so that a missing number is worth a word.
    """

    conditions: dict[str, Any]
    rows: list[Row]
    metrics: tuple[Metric, ...] = QUICK
    unavailable: dict[str, str] = field(default_factory=dict)
    counted: bool = False

    @property
    def baseline(self) -> Row:
        """The bare pipeline's row."""
        return self.rows[0]

    @property
    def cached(self) -> list[Row]:
        """The rows of the caches."""
        return self.rows[1:]

    def worst_first(self) -> list[int]:
        """Indices of the prompts, that with the lowest PSNR of any cache first."""
        count = len(self.baseline.shots)
        lowest = [min((_comparable(row.shots[i].psnr) for row in self.cached), default=math.inf) for i in range(count)]
        return sorted(range(count), key=lambda i: lowest[i])

    def to_dict(self, folder: Path | None = None) -> dict[str, Any]:
        """JSON form."""
        return {"conditions": self.conditions, "rows": [row.to_dict(folder) for row in self.rows]}


def with_macs(rows: list[Row], counts: list[float | None]) -> None:
    """Enter what the denoiser did in one run of each configuration, the baseline's first."""
    for row, count in zip(rows, counts, strict=True):
        row.macs = count
        row.macs_ratio = count / counts[0] if count is not None and counts[0] else None


def _comparable(psnr: float | None) -> float:
    """PSNR to sort by; a picture that is not finite is the worst of all."""
    return -math.inf if psnr is None or math.isnan(psnr) else psnr


def _median_latency(shots: list[Shot]) -> float | None:
    latencies = [latency for shot in shots for latency in shot.latencies]
    return statistics.median(latencies) if latencies else None


def _median(values: list[Any]) -> float | None:
    if not values:
        return None
    median = statistics.median(values)
    return int(median) if median == int(median) else median


def _most(shots: list[Shot]) -> int | None:
    return max((shot.peak_memory for shot in shots if shot.peak_memory is not None), default=None)


def _quality(shots: list[Shot], metrics: tuple[Metric, ...]) -> tuple[dict[str, float], dict[str, float]]:
    """Mean and worst value of every metric that some prompt has."""
    means, worst = {}, {}
    for metric in metrics:
        values = [shot.quality[metric.name] for shot in shots if metric.name in shot.quality]
        if values:
            means[metric.name] = mean_psnr(values) if metric.name == "psnr" else statistics.fmean(values)
            worst[metric.name] = min(values) if metric.better == "higher" else max(values)
    return means, worst


def _rollout(shots: list[Shot]) -> dict[str, Any]:
    """That of the first prompt."""
    run = shots[0].run
    return {} if run is None or isinstance(run, Run) else summary(run)


def _note(row: Row) -> str:
    """What is to be said about a cache that ran."""
    if all(shot.run is None for shot in row.shots):
        return "no run was recorded: the pipeline did not call the denoiser that the cache is on"
    runs = [shot.run for shot in row.shots if isinstance(shot.run, Run)]
    if not runs:
        return _slower(row)
    idle = [run for run in runs if not run.reused_steps]
    if len(idle) == len(runs):
        reasons = Counter(step.reason for run in idle for step in run.steps)
        return f"reused nothing: every step was computed ({', '.join(reason for reason, _ in reasons.most_common())})"
    notes = []
    if idle:
        notes.append(f"reused nothing on {len(idle)} of {len(runs)} prompts")
    elif len({shot.strip for shot in row.shots}) > 1:
        notes.append("the strip is that of the first prompt; other prompts have other strips")
    if row.identical == len(row.shots):
        notes.append("changed nothing, although steps were reused: every picture equals the baseline's to the last bit")
    return "; ".join(filter(None, [*notes, _slower(row)]))


def _slower(row: Row) -> str:
    return f"slower than the baseline: {row.speedup:.2f}x" if row.speedup is not None and row.speedup < 1 else ""


def _unlike(row: Row) -> str:
    """What is to be said about pictures of which nothing else is known."""
    return (
        "changed nothing: every picture equals its counterpart to the last bit"
        if row.identical == len(row.shots)
        else ""
    )


def told(quality: Mapping[str, float], metrics: tuple[Metric, ...], identical: bool = False) -> str:
    """Metrics of one prompt in words: "PSNR 31.2, SSIM 0.9310"; of identical pictures, that they are."""
    parts = ["identical to the baseline"] if identical else []
    for metric in metrics:
        value = quality.get(metric.name)
        if value is not None and not (identical and metric.needs_reference):
            parts.append(f"{metric.title} {value:{metric.form}}")
    return ", ".join(parts)
