"""Measure a pipeline on a few prompts and store the result as a profile."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cachedit
import cachedit.calibration.measures  # fills the registry
from cachedit.calibration.checkpoint import Checkpoint
from cachedit.calibration.extra import Extra
from cachedit.calibration.measure import Arrays, Measure
from cachedit.calibration.ranks import Ranks
from cachedit.calibration.tally import Progress, Tally
from cachedit.calibration.trial import Trial
from cachedit.calibration.work import Work
from cachedit.errors import ProfileError
from cachedit.feature.attachment import find, find_denoisers
from cachedit.feature.families import block_lists
from cachedit.feature.place import Residual
from cachedit.feature.ranks import shared_group
from cachedit.profile import Profile
from cachedit.run import Step
from cachedit.shipped import fingerprint
from cachedit.strategy import FeatureStrategy, Site, Strategy

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
    resume: bool = False,
) -> Profile:
    """Run the pipeline uncached on every prompt and measure what ``strategy`` needs to know.

    Under ``accelerate launch``, ``torchrun`` or a process group, every process calls this with a pipeline of its own
    and the same arguments; they share the runs, and each gets the profile that one process alone would have made.

    Args:
        pipe: a diffusers pipeline; it is left as it was.
        strategy: name or instance; options set on an instance become the profile's recommendation.
        prompts: one is enough for MagCache; each is one run.
        num_inference_steps: steps of these runs; the profile serves other numbers of steps too.
        seed: of the first prompt's generator; the next prompt uses ``seed + 1`` and so on.
        progress: called by the main process as ``progress(done, total, text)``, in steps of all runs.
        call_options: further arguments of the pipeline call (height, guidance_scale, ...).
        name: under which the profile is found; "" for none.
        command: what was run, for the record.
        checkpoint: folder in which the main process keeps every finished run until the profile is made; None keeps
            none. It is there after an interruption or an error, and removed at the end.
        resume: go on with what lies in the checkpoint, if anything does. The profile is that of an uninterrupted run.

    Raises:
        ValueError: the strategy needs no profile, there is no prompt, the pipeline is wrapped, or the checkpoint is of
            another calibration or, without ``resume``, holds finished runs.
        ProfileError: something that was measured is not a positive finite number.
    """
    from cachedit import strategies  # noqa: F401  (fills the registry)

    found = Strategy.find(strategy, {})
    if not isinstance(found, FeatureStrategy) or not found.profile_arrays:
        raise ValueError(f"{type(found).__name__} needs no profile; wrap the pipeline with it as it is.")
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    _check(pipe, prompts, num_inference_steps)
    if resume and checkpoint is None:
        raise ValueError("got resume=True without a checkpoint; allowed: with one. Say where the interrupted one lies.")
    ranks = Ranks.here()
    trial = Trial(pipe, prompts, num_inference_steps, seed, call_options, Work(ranks))
    kept = None
    if checkpoint is not None and ranks.is_main:
        kept = trial.work.checkpoint = Checkpoint(checkpoint, _identity(trial, found))
    ranks.exchange(lambda: kept.open(resume) if kept is not None else None)
    try:
        profile = _staged(trial, found, progress if ranks.is_main else None, name, command)
    except ProfileError:
        if kept is not None:
            kept.remove()  # its runs are what is of no use, so to go on with them would end here again
        raise
    ranks.exchange(lambda: kept.remove() if kept is not None else None)
    return profile


def _check(pipe: Any, prompts: Sequence[str], num_inference_steps: int) -> None:
    """Raise ValueError where there is nothing to measure."""
    if not prompts or num_inference_steps < 2:
        raise ValueError(
            f"got {len(prompts)} prompts and {num_inference_steps} steps; allowed: at least one prompt and two steps"
        )
    if find(pipe) is not None:
        raise ValueError("the pipeline is wrapped; call cachedit.unwrap(pipe) before calibrating it")
    if any(shared_group(denoiser) is not None for denoiser in find_denoisers(pipe).values()):
        raise ValueError(
            "the processes share the tokens of one model (enable_parallelism), so none sees what is to be measured; "
            "allowed: a whole model per process. Load the pipeline without parallelism to calibrate it."
        )


def _staged(trial: Trial, strategy: FeatureStrategy, progress: Progress | None, name: str, command: str) -> Profile:
    """Go through the stages of all measures."""
    measures = _measures(strategy, strategy.profile_arrays)
    for measure in measures:
        measure.trial = trial
    extras = map(Extra, _measures(strategy, strategy.also_calibrated))
    measures += [extra for extra in extras if extra.join(trial)]
    stages = sorted({measure.stage for measure in measures})
    by_stage = [[measure for measure in measures if measure.stage == stage] for stage in stages]
    watched = sum(len(trial.prompts) for at_stage in by_stage if _sites(at_stage))
    total = watched + sum(measure.runs for measure in measures)
    trial.work.tally = Tally(progress, total * trial.num_inference_steps)
    profile: Profile | None = None
    arrays: Arrays = {}
    for stage, at_stage in zip(stages, by_stage, strict=True):
        arrays |= _measured(trial, f"watched-{stage}", at_stage, profile)
        profile = _profile(trial, strategy, measures, arrays, name, command)
    assert profile is not None
    return profile


def _measures(strategy: FeatureStrategy, arrays: Iterable[str]) -> list[Measure]:
    """One measure for all of these arrays that it makes."""
    missing = [array for array in arrays if array not in Measure.registry]
    if missing:
        raise ValueError(f"{type(strategy).__name__} reads {', '.join(missing)}, which no measure makes")
    return [cls(strategy) for cls in dict.fromkeys(Measure.registry[array] for array in arrays)]


def _sites(measures: Sequence[Measure]) -> tuple[Site, ...]:
    """What these measures watch, each site once."""
    return tuple(dict.fromkeys(site for measure in measures for site in measure.sites))


def _measured(trial: Trial, name: str, measures: Sequence[Measure], profile: Profile | None) -> Arrays:
    """The arrays of the measures of one stage, whose watched runs are units of this name."""
    sites, steps = _sites(measures), trial.num_inference_steps
    signal = next((measure.signal for measure in measures if measure.signal), "")

    def watch(step: Step, values: Mapping[Site, Residual]) -> None:
        for measure in measures:
            measure.watch(step, values)

    def watched(k: int) -> dict[str, Any]:
        for measure in measures:
            measure.start(k)
        latents = trial.watch(k, sites, watch, signal)
        return {"latents": latents, "sigmas": dict(trial.sigmas), "parts": [measure.stop() for measure in measures]}

    planned = {measure: measure.runs * steps for measure in measures}
    for measure in measures:
        measure.begin(profile)
    prompts = range(len(trial.prompts) if sites else 0)
    with trial.work.tally.expecting(len(prompts) * steps):
        runs = trial.map(name, prompts, watched)
    for k, run in enumerate(runs):
        trial.learn(k, run["latents"], run["sigmas"])
    arrays: Arrays = {}
    for place, measure in enumerate(measures):
        with trial.work.tally.expecting(planned[measure]):
            found = measure.arrays([run["parts"][place] for run in runs])
        arrays |= trial.work.ranks.agreed(found)
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
        strategy=strategy.name,
        model=_model(trial.pipe),
        sampler=_sampler(trial.pipe, trial.num_inference_steps),
        defaults=found | chosen,
        provenance={"prompts": len(trial.prompts), "seed": trial.seed, "call_options": _plain(trial.call_options)}
        | {key: value for measure in measures for key, value in measure.notes.items()},
        versions=_versions(),
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        command=command,
    )


def _identity(trial: Trial, strategy: FeatureStrategy) -> dict[str, Any]:
    """What two calibrations must have in common for one to go on with the other's runs."""
    denoiser = next(iter(find_denoisers(trial.pipe).values()))
    return {
        "model": str(getattr(getattr(trial.pipe, "config", None), "_name_or_path", "") or ""),
        "fingerprint": _model(trial.pipe)["fingerprint"],
        "dtype": str(next(iter(denoiser.parameters())).dtype),
        "sampler": _sampler(trial.pipe, trial.num_inference_steps),
        "strategy": repr(strategy),
        "prompts": list(trial.prompts),
        "seed": trial.seed,
        "call options": {key: repr(value) for key, value in trial.call_options.items()},
        "versions": _versions(),
    }


def _versions() -> dict[str, str]:
    packages = ("torch", "diffusers", "transformers")
    return {package: importlib.metadata.version(package) for package in packages} | {"cachedit": cachedit.__version__}


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
