"""Measure a pipeline on a few prompts and store the result as a profile."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cachedit
import cachedit.calibration.measures  # fills the registry
from cachedit.calibration.measure import Arrays, Measure
from cachedit.calibration.trial import Trial
from cachedit.feature.attachment import find, find_denoisers
from cachedit.feature.families import block_lists
from cachedit.feature.place import Residual
from cachedit.profile import Profile
from cachedit.run import Step
from cachedit.shipped import fingerprint
from cachedit.strategy import FeatureStrategy, Site, Strategy

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
    checkpoint: str | Path | None = None,
) -> Profile:
    """Run the pipeline uncached on every prompt and measure what ``strategy`` needs to know.

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
        checkpoint: file in which a training (HarmoniCa's) keeps what it needs to go on after an interruption.

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
    measures = _measures(found)
    stages = sorted({measure.stage for measure in measures})
    total, done = len(prompts) * num_inference_steps * len(stages), 0

    def advance() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, max(total, done), prompts[(done - 1) // num_inference_steps % len(prompts)])

    trial = Trial(
        pipe, prompts, num_inference_steps, seed, call_options or {}, advance, Path(checkpoint) if checkpoint else None
    )
    for measure in measures:
        measure.trial = trial
    profile: Profile | None = None
    arrays: Arrays = {}
    for stage in stages:
        at_stage = [measure for measure in measures if measure.stage == stage]
        arrays |= _measured(trial, at_stage, profile)
        profile = _profile(trial, found, measures, arrays, name, command)
    assert profile is not None
    return profile


def _measures(strategy: FeatureStrategy) -> list[Measure]:
    """One measure for every array that the strategy reads, each once."""
    missing = [array for array in strategy.profile_arrays if array not in Measure.registry]
    if missing:
        raise ValueError(f"{type(strategy).__name__} reads {', '.join(missing)}, which no measure makes")
    return [cls(strategy) for cls in dict.fromkeys(Measure.registry[array] for array in strategy.profile_arrays)]


def _measured(trial: Trial, measures: Sequence[Measure], profile: Profile | None) -> Arrays:
    """The arrays of the measures of one stage."""
    sites = tuple(dict.fromkeys(site for measure in measures for site in measure.sites))
    signal = next((measure.signal for measure in measures if measure.signal), "")

    def watch(step: Step, values: Mapping[Site, Residual]) -> None:
        for measure in measures:
            measure.watch(step, values)

    for measure in measures:
        measure.begin(profile)
    for k in range(len(trial.prompts) if sites else 0):
        for measure in measures:
            measure.start(k)
        trial.watch(k, sites, watch, signal)
        for measure in measures:
            measure.stop()
    arrays: Arrays = {}
    for measure in measures:
        arrays |= measure.arrays()
    return arrays


def _profile(
    trial: Trial, strategy: FeatureStrategy, measures: Sequence[Measure], arrays: Arrays, name: str, command: str
) -> Profile:
    found = {key: value for measure in measures for key, value in measure.defaults.items()}
    chosen = {key: value for key, value in dataclasses.asdict(strategy).items() if value not in (None, (), "sigma")}
    axes = {array: list(Measure.registry[array].makes[array]) for array in arrays}
    return Profile(
        arrays=arrays,
        axes={array: names for array, names in axes.items() if names != ["step"]},
        sigmas=_sigmas(trial),
        name=name,
        model=_model(trial.pipe),
        sampler=_sampler(trial.pipe, trial.num_inference_steps),
        defaults=found | chosen,
        provenance={"prompts": len(trial.prompts), "seed": trial.seed, "call_options": _plain(trial.call_options)}
        | {key: value for measure in measures for key, value in measure.notes.items()},
        versions={package: importlib.metadata.version(package) for package in ("torch", "diffusers", "transformers")}
        | {"cachedit": cachedit.__version__},
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        command=command,
    )


def _sigmas(trial: Trial) -> list[float] | None:
    levels = [trial.sigmas[step] for step in sorted(trial.sigmas)]
    known = [level for level in levels if level is not None]
    return [round(level, 6) for level in known] if len(known) == len(levels) else None


def _model(pipe: Any) -> dict[str, Any]:
    denoisers = list(find_denoisers(pipe).values())
    prints = fingerprint(denoisers[0], block_lists(denoisers[0]), len(denoisers))
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
