"""The engine of every comparison: which runs there are, in which order they are made, and what is kept of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cachedit.calibration.work import Work
from cachedit.conditions.strategy import ConditionStrategy
from cachedit.evaluate.comparison import BASELINE, Comparison, Row, with_macs
from cachedit.evaluate.conditions import describe
from cachedit.evaluate.configuration import Configuration
from cachedit.evaluate.macs import count_macs
from cachedit.evaluate.panel import Panel
from cachedit.evaluate.shot import Shot
from cachedit.evaluate.table import duration
from cachedit.evaluate.taking import judge, take
from cachedit.registry import Strategy
from cachedit.wrap import unwrap

Keep = Callable[[Shot, str], Path]
"""Writes the pictures of a shot of a configuration and tells where."""


class Cancelled(Exception):
    """Whoever asked for the runs no longer wants them; what was finished before is kept."""


class Experiment:
    """The bare pipeline and some caches on the same prompts and noise.

    Caches without which the pipeline would make something else, as those of causal video models, are compared with
    their own reference (``Strategy.reference``) instead of the bare pipeline.

    For every prompt and seed the bare pipeline and each cache run one after the other, so that a machine that slows
    down slows all of them. One run of each comes first in every process and is not counted.

    Args:
        pipe: a diffusers pipeline that takes ``prompt`` and ``num_inference_steps``.
        configurations: the caches.
        prompts: at least one.
        steps: ``num_inference_steps``.
        seeds: prompt ``i`` is drawn from the noise of ``seed + i`` for each of these.
        repeats: measured runs of each prompt and seed.
        call_options: further arguments of the pipeline's call.
        panel: the metrics; None: PSNR, SSIM and st-lpips.
        cancelled: asked after every step; True ends everything with ``Cancelled``.

    Attributes:
        work: deals the runs to the processes and keeps what is done; by default this process does all and keeps none.
        keep: where pictures go; None: they stay in memory.
        conditions: of the runs, as far as they are known before them.

    Raises:
        ValueError: nothing to compare, or the pipeline is not driven by prompts.
        ProfileError, UnsupportedModelError, TypeError: as ``cachedit.wrap``.
    """

    def __init__(
        self,
        pipe: Any,
        configurations: Sequence[Configuration],
        prompts: Sequence[str],
        steps: int,
        *,
        seeds: Sequence[int] = (0,),
        repeats: int = 1,
        call_options: dict[str, Any] | None = None,
        panel: Panel | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> None:
        _check(pipe, configurations, prompts, seeds, steps, repeats)
        reference = _reference(configurations)
        self.configurations: tuple[Configuration | None, ...] = (reference, *configurations)
        steps = reference.found().own_steps() or steps if reference is not None else steps
        self.pipe, self.steps, self.repeats = pipe, steps, repeats
        self.call_options, self.panel, self.cancelled = call_options or {}, panel or Panel(), cancelled
        self.cells = [(prompt, seed + i) for i, prompt in enumerate(prompts) for seed in seeds]
        self.work = Work()
        self.keep: Keep | None = None
        self._warm = False
        try:
            profiles = {configuration.name: configuration.attach(pipe) for configuration in configurations}
        finally:
            unwrap(pipe)
        self.conditions = describe(pipe, prompts, steps, seeds[0], repeats, self.call_options)
        self.conditions |= {"seeds": [seed for _, seed in self.cells], "profiles": profiles}
        if reference is not None:
            self.conditions["baseline"] = repr(reference.strategy)

    def expected_steps(self, processes: int = 1) -> int:
        """Steps of the sampler in all runs that ``run`` makes, each process warming up for itself."""
        return self.steps * len(self.configurations) * (processes + self.repeats * len(self.cells))

    def run(self) -> Comparison:
        """Make all runs; the pipeline is left without a cache."""
        try:
            units = self.work.map("shots", range(len(self.cells)), self._unit)
        finally:
            unwrap(self.pipe)
        columns = [[Shot.from_state(state) for state in unit["shots"]] for unit in units]
        for unit in units:
            self.panel.unavailable |= unit["unavailable"]
        metrics = self.panel.chosen
        baseline = Row.of_baseline([column[0] for column in columns], self.steps, metrics)
        rows = [baseline]
        for place, configuration in enumerate(self.configurations[1:], 1):
            shots = [column[place] for column in columns]
            rows.append(Row.of_cache(name_of(configuration), shots, baseline, metrics))
        conditions = {**self.conditions, "size": units[0]["size"], "processes": self.work.ranks.count}
        conditions["baseline_calls"] = spread([latency for shot in baseline.shots for latency in shot.latencies])
        return Comparison(conditions, rows, metrics, self.panel.unavailable)

    def count(self, comparison: Comparison) -> None:
        """Enter what the denoiser multiplies under each configuration, from one more run on the first prompt."""
        prompt, seed = self.cells[0]

        def counted(place: int) -> float | None:
            configuration = self.configurations[place]
            self.work.tally.begin(f"{name_of(configuration)}, counting")
            return self._stepping(
                lambda on_step: count_macs(
                    self.pipe, configuration, Shot(prompt, seed), self.steps, self.call_options, on_step
                )
            )

        try:
            with_macs(comparison.rows, self.work.map("macs", range(len(self.configurations)), counted))
        finally:
            unwrap(self.pipe)
        comparison.counted = True

    def _unit(self, k: int) -> dict[str, Any]:
        """One prompt and seed: all configurations in turn, as often as wanted."""
        prompt, seed = self.cells[k]
        if not self._warm:
            for configuration in self.configurations:
                self._take(configuration, Shot(*self.cells[0]), "warm-up")
            self._warm = True
        shots = [Shot(prompt, seed) for _ in self.configurations]
        for _ in range(self.repeats):
            for configuration, shot in zip(self.configurations, shots, strict=True):
                self._take(configuration, shot, f"prompt {k + 1} of {len(self.cells)}")
        reference = shots[0]
        reference.quality = self.panel.judge(reference.look(), None, prompt, reference.video)
        for shot in shots[1:]:
            judge(shot, reference, self.panel)
        size = _size(reference)
        if self.keep is not None:
            for configuration, shot in zip(self.configurations, shots, strict=True):
                shot.file, shot.pictures = self.keep(shot, name_of(configuration)), None
        return {
            "shots": [shot.to_state() for shot in shots],
            "size": size,
            "unavailable": dict(self.panel.unavailable),
        }

    def _take(self, configuration: Configuration | None, shot: Shot, what: str) -> None:
        self.work.tally.begin(f"{name_of(configuration)}, {what}")
        self._stepping(lambda on_step: take(self.pipe, configuration, shot, self.steps, self.call_options, on_step))

    def _stepping(self, run: Callable[[Callable[[], None]], Any]) -> Any:
        """Do one run, count its steps as they are made, and end it when it is not wanted any more."""
        counted = 0

        def on_step() -> None:
            nonlocal counted
            stop_if(self.cancelled)
            if counted < self.steps:  # samplers of a higher order call more often
                counted += 1
                self.work.tally.add(1)

        stop_if(self.cancelled)
        result = run(on_step)
        self.work.tally.add(self.steps - counted)
        return result


def _reference(configurations: Sequence[Configuration]) -> Configuration | None:
    """What all are compared with: what the first one asks for.

    Raises:
        ValueError: some ask for the bare pipeline, and others do not.
    """
    asked = [configuration.reference() for configuration in configurations]
    bare = [configuration.name for configuration, one in zip(configurations, asked, strict=True) if one is None]
    if bare and len(bare) < len(asked):
        raise ValueError(
            f"{', '.join(bare)} would be compared with the bare pipeline, and the others with a rollout; allowed: "
            "caches of one kind. Measure them in two reports."
        )
    return asked[0] if asked else None


def name_of(configuration: Configuration | None) -> str:
    """As its row is called; None is the baseline."""
    return BASELINE if configuration is None else configuration.name


def spread(calls: Sequence[float]) -> str:
    """How far apart calls of one kind were; if they are, other work slowed the machine, and speed-ups say little.

    Args:
        calls: seconds of each.
    """
    return f"{len(calls)}, of {duration(min(calls))} to {duration(max(calls))}"


def stop_if(cancelled: Callable[[], bool] | None) -> None:
    """Raise ``Cancelled`` if whoever asked for the runs says so."""
    if cancelled is not None and cancelled():
        raise Cancelled("cancelled; what was finished before is kept")


def _size(shot: Shot) -> str:
    """Of one prompt's pictures: "64x64", "832x480, 81 frames"."""
    count, _, height, width = shot.look().shape
    many = f", {count} {'frames' if shot.video else 'pictures'}" if count > 1 else ""
    return f"{width}x{height}{many}"


def _check(
    pipe: Any,
    configurations: Sequence[Configuration],
    prompts: Sequence[str],
    seeds: Sequence[int],
    steps: int,
    repeats: int,
) -> None:
    from cachedit import strategies  # noqa: F401  (fills the registry)

    check_plan(configurations, prompts, seeds, steps=steps, repeats=repeats)
    others = [one.name for one in configurations if issubclass(Strategy.named(one.strategy), ConditionStrategy)]
    if others:
        raise ValueError(
            f"{', '.join(others)} works on calls with an image; a comparison's have a prompt alone. Measure it by hand "
            "with cachedit.wrap and cachedit.last_run."
        )
    parameters = inspect.signature(pipe.__call__).parameters
    missing = [name for name in ("prompt", "num_inference_steps", "generator") if name not in parameters]
    if missing:
        raise ValueError(
            f"{type(pipe).__name__} takes no {', '.join(missing)}; allowed: pipelines that are called with a prompt, a "
            "number of steps and a generator. Measure this one by hand with cachedit.wrap and cachedit.last_run."
        )


def check_plan(
    configurations: Sequence[Configuration], prompts: Sequence[str], seeds: Sequence[int], **counts: int
) -> None:
    """Refuse what no comparison can be made of.

    Args:
        configurations: the caches; their names must differ.
        prompts: at least one.
        seeds: at least one, each once.
        counts: numbers that must be 1 or more, by name.

    Raises:
        ValueError: with what was given and what is allowed.
    """
    if not prompts:
        raise ValueError("compare got no prompts; allowed: one or more. Pass prompts=['a red star'].")
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"compare got seeds={list(seeds)}; allowed: one or more, each once.")
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"compare got {name}={value}; allowed: 1 or more.")
    names = [BASELINE, *(configuration.name for configuration in configurations)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"two configurations are called {', '.join(twice)}; allowed: names that differ from each other and from "
            f"{BASELINE!r}. Give each a label."
        )
