"""Run a pipeline bare and with caches on the same prompts and noise, and measure what each cache gains and costs."""

from __future__ import annotations

import inspect
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
from cachedit.evaluate.metrics import MetricUnavailable, mean_psnr, psnr, ssim, st_lpips
from cachedit.evaluate.pictures import pictures
from cachedit.feature.attachment import find
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
        profile: for ``cachedit.wrap``; None: the one that is found for the model.
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

    def attach(self, pipe: Any) -> str:
        """Put this cache on ``pipe``, in place of any other; returns which profile it reads, "none" without one."""
        wrap(pipe, self.strategy, profile=self.profile, **self.options)
        session = find(pipe)
        found = session.profile if session is not None else None
        if found is None:
            return "none"
        return str(self.profile) if isinstance(self.profile, (str, Path)) else found.name or "without a name"


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
    options = call_options or {}
    shots = [[Shot(prompt, seed + i) for i, prompt in enumerate(prompts)] for _ in range(1 + len(configurations))]
    try:
        profiles = {configuration.name: configuration.attach(pipe) for configuration in configurations}
        _measure(pipe, [None, *configurations], shots, steps, repeats, options, progress)
    finally:
        unwrap(pipe)
    baseline = Row.of_baseline(shots[0], steps)
    rows = [baseline]
    for configuration, cached in zip(configurations, shots[1:], strict=True):
        for shot, reference in zip(cached, baseline.shots, strict=True):
            judge(shot, reference)
        rows.append(Row.of_cache(configuration.name, cached, baseline))
    shape = tuple(_taken(baseline.shots[0]).shape)
    conditions = describe(pipe, prompts, steps, seed, repeats, options, shape)
    return Comparison({**conditions, "profiles": profiles}, rows)


def _measure(
    pipe: Any,
    configurations: Sequence[Configuration | None],
    shots: list[list[Shot]],
    steps: int,
    repeats: int,
    call_options: dict[str, Any],
    progress: Progress | None,
) -> None:
    """Fill ``shots`` (configuration x prompt), prompt by prompt, after an uncounted run of each configuration."""
    prompts = len(shots[0])
    first = shots[0][0]
    rounds = [("warm-up", [Shot(first.prompt, first.seed) for _ in configurations])]
    for index in range(prompts):
        rounds += [(f"prompt {index + 1} of {prompts}", [row[index] for row in shots])] * repeats
    done, total = 0, len(rounds) * len(configurations)
    for what, column in rounds:
        for configuration, shot in zip(configurations, column, strict=True):
            if progress is not None:
                progress(done, total, f"{configuration.name if configuration else BASELINE}, {what}")
            take(pipe, configuration, shot, steps, call_options)
            done += 1
    if progress is not None:
        progress(done, total, "measured")


def _check(pipe: Any, prompts: Sequence[str], steps: int, repeats: int) -> None:
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


def take(pipe: Any, configuration: Configuration | None, shot: Shot, steps: int, call_options: dict[str, Any]) -> None:
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
        start, worked = time.perf_counter(), time.process_time()
        output = pipe(
            prompt=shot.prompt, num_inference_steps=steps, generator=generator, output_type="np", **call_options
        )
        _synchronise(device)
    shot.latencies.append(time.perf_counter() - start)
    shot.processor.append(time.process_time() - worked)
    shot.pictures = pictures(output)
    shot.run = last_run(pipe) if configuration is not None else None


def _synchronise(device: torch.device) -> None:
    """Wait for the device, whose work is otherwise still under way when the call returns."""
    if device.type in ("cuda", "xpu", "mps"):
        getattr(torch, device.type).synchronize()


def judge(shot: Shot, reference: Shot) -> None:
    """Quality of a cached run against the bare one of the same prompt and noise; means over pictures or frames."""
    a, b = _taken(shot), _taken(reference)
    shot.identical = torch.equal(a, b)
    shot.psnr = mean_psnr(psnr(a, b).tolist())
    shot.ssim = _mean(ssim, a, b)
    shot.st_lpips = _mean(st_lpips, a, b)


def _taken(shot: Shot) -> Tensor:
    assert shot.pictures is not None
    return shot.pictures


def _mean(metric: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> float | None:
    try:
        return float(metric(a, b).mean())
    except MetricUnavailable:
        return None
