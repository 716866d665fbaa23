"""Run a pipeline bare and with caches on the same prompts and noise, and measure what each cache gains and costs."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cachedit.evaluate.comparison import BASELINE, Comparison, Row, Shot
from cachedit.evaluate.conditions import describe
from cachedit.evaluate.metrics import MetricUnavailable, psnr, ssim, st_lpips
from cachedit.evaluate.pictures import pictures
from cachedit.profile import Profile
from cachedit.strategy import Strategy
from cachedit.wrap import last_run, unwrap, wrap

Progress = Callable[[int, int, str], None]
"""Called before every run and after the last with (runs done, runs in all, what runs now)."""


@dataclass(frozen=True)
class Configuration:
    """A cache to compare with the bare pipeline.

    Attributes:
        strategy: a name in any spelling, or an instance.
        options: for ``cachedit.wrap``.
        profile: for ``cachedit.wrap``; None: the shipped one of the model.
        label: how rows call it; "" takes the name of the strategy.
    """

    strategy: str | Strategy
    options: dict[str, Any] = field(default_factory=dict)
    profile: Profile | str | Path | None = None
    label: str = ""

    @property
    def name(self) -> str:
        """The label, or the strategy's name as it was given."""
        return self.label or (self.strategy if isinstance(self.strategy, str) else self.strategy.name)

    def attach(self, pipe: Any) -> None:
        """Put this cache on ``pipe``, in place of any other."""
        wrap(pipe, self.strategy, profile=self.profile, **self.options)


def compare(
    pipe: Any,
    configurations: Sequence[Configuration],
    prompts: Sequence[str],
    steps: int,
    *,
    seed: int = 0,
    repeats: int = 1,
    call_options: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Measure caches against the bare pipeline.

    For every prompt the bare pipeline and each cache run one after the other, so that a machine that slows down slows
    all of them; one run of each comes first and is not counted. Latency is the whole call: text encoder, denoiser,
    decoder. Prompt ``i`` starts from the noise of ``seed + i`` in every configuration.

    Args:
        pipe: a diffusers pipeline that takes ``prompt`` and ``num_inference_steps``. Left without a cache.
        configurations: the caches, each with its own row in the result.
        prompts: at least one.
        steps: ``num_inference_steps``.
        seed: of the first prompt's noise.
        repeats: measured runs of each prompt; the medians are reported.
        call_options: further arguments of the pipeline's call (``guidance_scale``, ``height`` ...).
        progress: called before every run and after the last.

    Returns:
        Conditions, one row for "baseline" and one for each configuration, and the pictures.

    Raises:
        ValueError: nothing to compare, or the pipeline is not driven by prompts.
        ProfileError, UnsupportedModelError, TypeError: as ``cachedit.wrap``, before the first run.
    """
    _check(pipe, prompts, steps, repeats)
    for configuration in configurations:
        configuration.attach(pipe)
    unwrap(pipe)
    plan = [(index, repeat) for index in range(len(prompts)) for repeat in range(repeats)]
    total = (1 + len(plan)) * (1 + len(configurations))
    shots = [[Shot(prompt, seed + i) for i, prompt in enumerate(prompts)] for _ in range(1 + len(configurations))]
    done = 0
    try:
        for index, repeat in [(0, None), *plan]:
            for configuration, row in zip([None, *configurations], shots, strict=True):
                if progress is not None:
                    what = "warm-up" if repeat is None else f"prompt {index + 1} of {len(prompts)}"
                    progress(done, total, f"{configuration.name if configuration else BASELINE}, {what}")
                shot = row[index] if repeat is not None else Shot(prompts[0], seed)
                _take(pipe, configuration, shot, steps, call_options or {})
                done += 1
    finally:
        unwrap(pipe)
    if progress is not None:
        progress(done, total, "measured")
    baseline, *cached = shots
    rows = [_baseline_row(baseline, steps)]
    rows += [_cached_row(c.name, row, baseline) for c, row in zip(configurations, cached, strict=True)]
    picture = baseline[0].picture
    conditions = describe(pipe, prompts, steps, seed, repeats, call_options or {}, tuple(picture.shape))
    return Comparison(conditions, rows)


def _check(pipe: Any, prompts: Sequence[str], steps: int, repeats: int) -> None:
    import inspect

    if not prompts:
        raise ValueError("compare got no prompts; allowed: one or more. Pass prompts=['a red star'].")
    for name, value in (("steps", steps), ("repeats", repeats)):
        if value < 1:
            raise ValueError(f"compare got {name}={value}; allowed: 1 or more.")
    parameters = inspect.signature(pipe.__call__).parameters
    missing = [name for name in ("prompt", "num_inference_steps", "generator") if name not in parameters]
    if missing:
        raise ValueError(
            f"{type(pipe).__name__} takes no {', '.join(missing)}; allowed: pipelines that are called with a prompt, a "
            "number of steps and a generator. Measure this one by hand with cachedit.wrap and cachedit.last_run."
        )


def _take(
    pipe: Any, configuration: Configuration | None, shot: Shot, steps: int, call_options: dict[str, Any]
) -> None:
    """One timed run of one prompt; the result is added to ``shot``."""
    if configuration is None:
        unwrap(pipe)
    else:
        configuration.attach(pipe)
    device = torch.device(getattr(pipe, "device", "cpu"))
    generator = torch.Generator().manual_seed(shot.seed)
    with torch.no_grad(), warnings.catch_warnings():
        # A cache that never fired is told in words in the result's note.
        warnings.filterwarnings("ignore", r"cachedit: .* reused no step", UserWarning)
        _synchronise(device)
        start = time.perf_counter()
        output = pipe(
            prompt=shot.prompt, num_inference_steps=steps, generator=generator, output_type="np", **call_options
        )
        _synchronise(device)
    shot.latencies.append(time.perf_counter() - start)
    shot.pictures = pictures(output)
    shot.run = last_run(pipe) if configuration is not None else None


def _synchronise(device: torch.device) -> None:
    """Wait for the device, whose work is otherwise still under way when the call returns."""
    if device.type in ("cuda", "xpu", "mps"):
        getattr(torch, device.type).synchronize()


def _baseline_row(shots: list[Shot], steps: int) -> Row:
    return Row(BASELINE, statistics.median(_latencies(shots)), 1.0, float(steps), shots=shots)


def _cached_row(name: str, shots: list[Shot], baseline: list[Shot]) -> Row:
    latency, bare = (statistics.median(_latencies(row)) for row in (shots, baseline))
    for shot, reference in zip(shots, baseline, strict=True):
        _judge(shot, reference)
    row = Row(name, latency, bare / latency, shots=shots)
    row.summarise()
    return row


def _latencies(shots: list[Shot]) -> list[float]:
    return [latency for shot in shots for latency in shot.latencies]


def _judge(shot: Shot, reference: Shot) -> None:
    """Quality of a cached run against the bare one of the same prompt and noise; means over frames."""
    from cachedit.evaluate.metrics import mean_psnr

    shot.reference = reference
    a, b = shot.pictures, reference.pictures
    shot.identical = bool(torch.equal(a, b))
    shot.psnr = mean_psnr(psnr(a, b).tolist())
    shot.ssim = _mean(ssim, a, b)
    shot.st_lpips = _mean(st_lpips, a, b)


def _mean(metric: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> float | None:
    try:
        return float(metric(a, b).mean())
    except MetricUnavailable:
        return None
