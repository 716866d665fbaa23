"""Measure a pipeline on a few prompts and store the result as a profile."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

import cachedit
from cachedit.calibration.collect import Collector, collect
from cachedit.errors import ProfileError
from cachedit.feature.attachment import find, find_denoisers
from cachedit.feature.families import find_stack
from cachedit.profile import Profile
from cachedit.shipped import fingerprint
from cachedit.strategy import FeatureStrategy, Strategy

Progress = Callable[[int, int, str], None]
SAMPLER_SETTINGS = ("shift", "use_dynamic_shifting", "flow_shift", "prediction_type", "use_flow_sigmas")


def calibrate(
    pipe: Any,
    strategy: str | Strategy,
    *,
    prompts: Sequence[str],
    num_inference_steps: int,
    seed: int = 0,
    progress: Progress | None = None,
    call_options: dict[str, Any] | None = None,
    name: str = "",
    command: str = "",
) -> Profile:
    """Run the pipeline uncached on every prompt and measure what ``strategy`` needs to know.

    Values are averaged over prompts as logarithms, because profiles are read as cumulative products.

    Args:
        pipe: a diffusers pipeline; it is left as it was.
        strategy: name or instance; options set on an instance become the profile's recommendation.
        prompts: one is enough for MagCache; each is one run.
        num_inference_steps: steps of these runs; the profile serves other numbers of steps too.
        seed: of the first prompt's generator; the next prompt uses ``seed + 1`` and so on.
        progress: called as ``progress(done, total, text)`` once per step.
        call_options: further arguments of the pipeline call (height, guidance_scale, ...).
        name: under which the profile is found; "" for none.
        command: what was run, for the record.

    Raises:
        ValueError: the strategy needs no profile, there is no prompt, or the pipeline is wrapped.
        ProfileError: something that was measured is not a positive finite number.
    """
    from cachedit import strategies  # noqa: F401  (fills the registry)

    found = Strategy.find(strategy, {})
    if not isinstance(found, FeatureStrategy) or not found.profile_arrays:
        raise ValueError(f"{type(found).__name__} needs no profile; wrap the pipeline with it as it is.")
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    if not prompts or num_inference_steps < 2:
        raise ValueError(
            f"got {len(prompts)} prompts and {num_inference_steps} steps; allowed: at least one prompt and two steps"
        )
    if find(pipe) is not None:
        raise ValueError("the pipeline is wrapped; call cachedit.unwrap(pipe) before calibrating it")
    total, done = len(prompts) * num_inference_steps, 0

    def advance() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total, prompts[(done - 1) // num_inference_steps % len(prompts)])

    runs = []
    for k, prompt in enumerate(prompts):
        generator = torch.Generator().manual_seed(seed + k)
        arguments = {"prompt": prompt, "num_inference_steps": num_inference_steps, "generator": generator}
        runs.append(collect(pipe, found.profile_arrays, {**arguments, **(call_options or {})}, advance))
    return Profile(
        arrays={array: _average(runs, array) for array in found.profile_arrays},
        sigmas=_sigmas(runs[0]),
        name=name,
        model=_model(pipe),
        sampler=_sampler(pipe, num_inference_steps),
        defaults={key: value for key, value in dataclasses.asdict(found).items() if value not in (None, (), "sigma")},
        provenance={"prompts": len(prompts), "seed": seed, "call_options": _plain(call_options or {})},
        versions={package: importlib.metadata.version(package) for package in ("torch", "diffusers", "transformers")}
        | {"cachedit": cachedit.__version__},
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        command=command,
    )


def _average(runs: Sequence[Collector], array: str) -> dict[str, list[float]]:
    """Geometric mean over the runs, per branch and step."""
    rows: dict[str, list[float]] = {}
    for branch in runs[0].values[array]:
        rows[branch] = []
        for step in sorted(runs[0].sigmas):
            values = [run.values[array][branch].get(step, 1.0) for run in runs]
            if not all(math.isfinite(value) and value > 0 for value in values):
                raise ProfileError(
                    f"{array} of step {step}, branch {branch!r}, is {values}; allowed: positive numbers. "
                    "The model gives non-finite or zero residuals there; try another dtype."
                )
            rows[branch].append(math.exp(sum(map(math.log, values)) / len(values)))
    return rows


def _sigmas(run: Collector) -> list[float] | None:
    levels = [run.sigmas[step] for step in sorted(run.sigmas)]
    known = [level for level in levels if level is not None]
    return [round(level, 6) for level in known] if len(known) == len(levels) else None


def _model(pipe: Any) -> dict[str, Any]:
    denoisers = list(find_denoisers(pipe).values())
    prints = fingerprint(denoisers[0], find_stack(denoisers[0]), len(denoisers))
    origin = str(getattr(getattr(pipe, "config", None), "_name_or_path", "") or "")
    return {
        "class": prints.pop("class"),
        "fingerprint": prints,
        "names": [origin.rstrip("/").rsplit("/", 1)[-1]] if origin else [],
    }


def _sampler(pipe: Any, steps: int) -> dict[str, Any]:
    config = pipe.scheduler.config
    settings = {key: config[key] for key in SAMPLER_SETTINGS if key in config}
    return {"class": type(pipe.scheduler).__name__, "num_inference_steps": steps, **_plain(settings)}


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Only what JSON can hold as it is."""
    return {key: value for key, value in settings.items() if isinstance(value, (str, int, float, bool, type(None)))}
