"""The result of a comparison: shots (one prompt, one configuration), rows (one configuration) and the whole."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from cachedit.evaluate.metrics import mean_psnr
from cachedit.run import Run

BASELINE = "baseline"


@dataclass
class Shot:
    """One prompt under one configuration.

    Attributes:
        prompt, seed: what was drawn, and from which noise.
        latencies: seconds of every measured call.
        processor: CPU seconds of this process in every measured call, which other processes do not lengthen.
        pictures: ``[N, 3, H, W]`` in [0, 1]; N > 1 for several pictures or frames.
        run: the cache's record; None for the bare pipeline.
        identical: True if the pictures equal the bare pipeline's to the last bit.
        psnr, ssim, st_lpips: against the bare pipeline, mean over N. PSNR is infinite for identical pictures; None
            where a metric is not available.
    """

    prompt: str
    seed: int
    latencies: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    pictures: Tensor | None = None
    run: Run | None = None
    identical: bool = False
    psnr: float | None = None
    ssim: float | None = None
    st_lpips: float | None = None

    @property
    def strip(self) -> str:
        """One mark per step; "" for the bare pipeline."""
        return self.run.strip() if self.run is not None else ""

    def to_dict(self) -> dict[str, Any]:
        """JSON form, without the pictures."""
        values = {"prompt": self.prompt, "seed": self.seed, "latency_s": statistics.median(self.latencies)}
        if self.run is None:
            return values
        return values | {
            "nfe": self.run.nfe,
            "strip": self.strip,
            "identical": self.identical,
            "psnr": finite(self.psnr),
            "ssim": finite(self.ssim),
            "st_lpips": finite(self.st_lpips),
        }


@dataclass
class Row:
    """One configuration over all prompts.

    Attributes:
        strategy: "baseline", or the name of the configuration.
        latency_s: median seconds of a whole call.
        speedup: the baseline's ``latency_s`` over this one.
        nfe, reused: computed and reused steps, medians over the prompts; None if no run was recorded.
        rho: median time of a reused denoiser call over a computed one; None without both.
        cache_bytes: most bytes held at once.
        psnr, ssim, st_lpips: means over the prompts. Identical pictures are left out of the mean PSNR, which is
            infinite if all are.
        worst_psnr: lowest PSNR of a prompt.
        identical: number of prompts whose pictures equal the baseline's to the last bit.
        configuration: the strategy with all its options; "" for the baseline.
        strip: one mark per step, of the first prompt.
        expected: what the strategy expected of the first prompt's run; mostly empty.
        note: in words, what the numbers would hide: that nothing was reused, that the strips differ. "" if nothing.
        shots: the prompts.
    """

    strategy: str
    latency_s: float
    speedup: float
    nfe: float | None
    reused: float | None = None
    rho: float | None = None
    cache_bytes: int | None = None
    psnr: float | None = None
    worst_psnr: float | None = None
    ssim: float | None = None
    st_lpips: float | None = None
    identical: int | None = None
    configuration: str = ""
    strip: str = ""
    expected: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    shots: list[Shot] = field(default_factory=list)

    @classmethod
    def of_baseline(cls, shots: list[Shot], steps: int) -> Row:
        """The bare pipeline, which computes every step."""
        return cls(BASELINE, _median_latency(shots), 1.0, steps, shots=shots)

    @classmethod
    def of_cache(cls, name: str, shots: list[Shot], baseline: Row) -> Row:
        """One cache, against the baseline."""
        latency = _median_latency(shots)
        runs = [shot.run for shot in shots if shot.run is not None]
        psnrs = [shot.psnr for shot in shots if shot.psnr is not None]
        return cls(
            strategy=name,
            latency_s=latency,
            speedup=baseline.latency_s / latency,
            nfe=_median([run.nfe for run in runs]),
            reused=_median([len(run.reused_steps) for run in runs]),
            rho=_median([run.rho for run in runs if run.rho is not None]),
            cache_bytes=max((run.cache_bytes_peak for run in runs), default=None),
            psnr=mean_psnr(psnrs) if psnrs else None,
            worst_psnr=min(psnrs, default=None),
            ssim=_mean([shot.ssim for shot in shots]),
            st_lpips=_mean([shot.st_lpips for shot in shots]),
            identical=sum(shot.identical for shot in shots),
            configuration=runs[0].strategy if runs else "",
            strip=shots[0].strip,
            expected=shots[0].run.expected if shots[0].run is not None else {},
            note=_note(shots),
            shots=shots,
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON form: what does not apply and what is infinite is null, ``identical`` tells why."""
        names = ("nfe", "reused", "rho", "psnr", "worst_psnr", "ssim", "st_lpips")
        return {
            "strategy": self.strategy,
            "latency_s": self.latency_s,
            "speedup": self.speedup,
            **{name: finite(getattr(self, name)) for name in names},
            "cache_bytes": self.cache_bytes,
            "identical": None if self.identical is None else self.identical == len(self.shots),
            "identical_prompts": self.identical,
            "configuration": self.configuration or None,
            "strip": self.strip or None,
            "expected": self.expected or None,
            "note": self.note or None,
            "prompts": [shot.to_dict() for shot in self.shots],
        }


@dataclass
class Comparison:
    """Rows, and the conditions under which they hold.

    Attributes:
        conditions: name -> value, ready for JSON.
        rows: the baseline first.
    """

    conditions: dict[str, Any]
    rows: list[Row]

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

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {"conditions": self.conditions, "rows": [row.to_dict() for row in self.rows]}


def finite(value: float | None) -> float | None:
    """``value``, or None where JSON has no number for it."""
    return value if value is not None and math.isfinite(value) else None


def _comparable(psnr: float | None) -> float:
    """PSNR to sort by; a picture that is not finite is the worst of all."""
    return -math.inf if psnr is None or math.isnan(psnr) else psnr


def _median_latency(shots: list[Shot]) -> float:
    return statistics.median([latency for shot in shots for latency in shot.latencies])


def _median(values: list[Any]) -> float | None:
    if not values:
        return None
    median = statistics.median(values)
    return int(median) if median == int(median) else median


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _note(shots: list[Shot]) -> str:
    runs = [shot.run for shot in shots if shot.run is not None]
    if not runs:
        return "no run was recorded: the pipeline did not call the denoiser that the cache is on"
    idle = [run for run in runs if not run.reused_steps]
    if len(idle) == len(runs):
        reasons = Counter(step.reason for run in idle for step in run.steps)
        return f"reused nothing: every step was computed ({', '.join(reason for reason, _ in reasons.most_common())})"
    if idle:
        return f"reused nothing on {len(idle)} of {len(runs)} prompts"
    if len({shot.strip for shot in shots}) > 1:
        return "the strip is that of the first prompt; other prompts have other strips"
    return ""
