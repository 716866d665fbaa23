"""What the Pareto benchmark runs: the strategies of cachedit at their settings, in one form with those of the peers."""

from __future__ import annotations

import copy
import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import cachedit
from cachedit import Profile, schedules
from cachedit.calibration import calibrate
from cachedit.strategy import FeatureStrategy, Strategy, canonical

Settings = dict[str, Any]

LISTS = [(1.0, 0.25, 4), (1.0, 0.5, 4), (1.5, 0.5, 4), (2.0, 0.5, 4), (2.0, 1.0, 4), (2.0, 1.0, 3)]
"""Window, growth and warm-up of computed steps that lie denser where there is more noise."""


def settings_for(steps: int) -> dict[str, list[Settings]]:
    """Strategy -> choices of its options; a strategy that is not listed runs with its defaults."""
    lists = [schedules.growing(steps, *rule) for rule in LISTS]
    return {
        "ABCache": [{"interval": n, "order": k} for n, k in ((2, 2), (3, 1), (4, 1))],
        "Auto": [{"max_nfe": n} for n in (steps * 2 // 3, steps // 2, steps * 3 // 7, steps * 5 // 14)]
        + [{"max_nfe": n, "predictor": "damped"} for n in (steps * 2 // 7, steps * 3 // 14)],
        "CacheQuant": [{"interval": n} for n in (2, 3, 4)],
        "DBCache": [{"front": 1, "warmup": 4, "threshold": t} for t in (0.1, 0.2, 0.4)],
        "DeltaCache": [{"interval": n} for n in (2, 3, 4)],
        "DiCache": [{"threshold": t, "retention_ratio": r} for t, r in ((0.02, 0.2), (0.1, 0.2), (0.1, 0.1))],
        "EasyCache": [{"threshold": t} for t in (0.02, 0.05, 0.1)],
        "ERTACache": [{"threshold": t} for t in (0.05, 0.1, 0.18, 0.25)],
        "FasterCache": [{}, {"guidance": (-1, 1000), "attention": (-1, 1000)}],
        "FirstBlockCache": [{"threshold": t} for t in (0.06, 0.15, 0.25)],
        "FoCa": [{"interval": n} for n in (2, 3, 4)],
        "FORA": [{"interval": n} for n in (2, 3, 4)],
        "FreqCa": [{"interval": n} for n in (2, 3, 4)],
        "HarmoniCa": [{"iterations": 1500, "learning_rate": 0.2}],
        "HiCache": [{"interval": n} for n in (2, 3, 4)],
        "HyCa": [{"interval": n} for n in (2, 3, 4)],
        "L2P": [{"interval": n} for n in (2, 3, 4)],
        "LeMiCa": [{"speedup": ratio} for ratio in (1.5, 2.0, 2.5, 3.0, 3.5)],
        "MagCache": [
            {"threshold": error, "max_skip_steps": skips, "retention_ratio": kept}
            for error, skips, kept in ((0.06, 2, 0.2), (0.12, 3, 0.2), (0.24, 4, 0.1), (0.5, 6, 0.1))
        ],
        "MeanCache": [{"compute": steps} for steps in lists[1::2]] + [{"budget": n} for n in (25, 17, 10)],
        "MixCache": [{"interval": n} for n in (2, 3, 4)],
        "Newton": [{"interval": n, "order": k, "warmup": 5} for n, k in ((2, 1), (3, 1), (3, 2))],
        "PAB": [{"spatial": n} for n in (2, 3, 5)],
        "ProfilingDiT": [{"share": share} for share in (0.5, 0.75, 0.9)],
        "SmoothCache": [{"alpha": change} for change in (0.08, 0.18, 0.35)],
        "Spectrum": [{"growth": growth} for growth in (0.25, 0.75, 1.5)],
        "TaylorSeer": [{"interval": n, "order": k, "warmup": 5} for n, k in ((2, 1), (3, 1), (3, 2), (4, 1))],
        "TeaCache": [{"threshold": t} for t in (0.05, 0.1, 0.2)],
    }


ONE_PROFILE = {"auto", "lemica", "magcache", "mixcache", "profilingdit", "smoothcache", "teacache"}
"""Strategies whose calibration measures the same whatever the settings above, so one profile serves them all."""


@dataclass
class Ready:
    """A pipeline with its cache.

    Attributes:
        pipe: a copy of its own.
        begin: to be called before every run.
        batched: True if nothing depends on what else is in the batch, so that all prompts may be drawn at once.
    """

    pipe: Any
    begin: Callable[[], Any]
    batched: bool


@dataclass
class Method:
    """One cache with one choice of settings, on a pipeline of its own.

    Attributes:
        group: "cachedit", "diffusers" or "cache-dit".
        name: of the cache; the methods of one name are a line in the plot.
        settings: what was chosen, for the table.
        prepare: puts the cache on a pipeline.
    """

    group: str
    name: str
    settings: Settings
    prepare: Callable[[], Ready]


@dataclass(frozen=True)
class Trial:
    """What peers may know: a pipeline to copy, the length of the runs, and prompts to calibrate on."""

    pipe: Any
    steps: int
    prompts: Sequence[str]
    seed: int
    found: dict[str, Any] = field(default_factory=dict)

    def own_pipe(self) -> Any:
        """A pipeline with a denoiser and a scheduler of its own; everything else is shared."""
        parts = {**self.pipe.components}
        parts |= {name: copy.deepcopy(parts[name]) for name in ("transformer", "scheduler")}
        pipe = type(self.pipe)(**parts)
        pipe.set_progress_bar_config(disable=True)
        return pipe


def cachedit_methods(trial: Trial, settings: dict[str, list[Settings]], folder: Path) -> Iterator[Method]:
    """Every feature cache of the registry at its settings."""
    from cachedit import strategies  # noqa: F401  (fills the registry)

    chosen = {canonical(name): options for name, options in settings.items()}
    for name, cls in sorted(Strategy.registry.items()):
        if issubclass(cls, FeatureStrategy):
            for options in chosen.get(canonical(name), [{}]):
                yield Method("cachedit", cls.__name__, options, partial(_ours, trial, name, options, folder))


def _ours(trial: Trial, name: str, options: Settings, folder: Path) -> Ready:
    strategy = Strategy.find(name, options)
    assert isinstance(strategy, FeatureStrategy)
    profile = _profile(trial, strategy, folder) if strategy.profile_arrays else None
    pipe = cachedit.wrap(trial.own_pipe(), strategy, profile=profile)
    return Ready(pipe, lambda: None, batched=not strategy.signal and not strategy.measures_change)


def _profile(trial: Trial, strategy: FeatureStrategy, folder: Path) -> Profile:
    """What calibration on other prompts finds for these options; kept in the folder."""
    if canonical(strategy.name) in ONE_PROFILE:
        strategy = type(strategy)()
    key = hashlib.sha1(repr((strategy, trial.steps, trial.prompts, trial.seed)).encode()).hexdigest()[:12]
    file = folder / f"{strategy.name}-{key}.json"
    if not file.exists():
        print(f"  calibrating {strategy}", file=sys.stderr, flush=True)
        calibrate(
            trial.own_pipe(), strategy, prompts=trial.prompts, num_inference_steps=trial.steps, seed=trial.seed
        ).save(file)
    return Profile.load(file)
