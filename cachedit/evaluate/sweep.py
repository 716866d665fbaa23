"""The frontier of a model: what every budget of computed steps gains and costs, on prompts that were held out."""

from __future__ import annotations

import hashlib
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from cachedit.calibration.checkpoint import Checkpoint
from cachedit.calibration.ranks import Ranks
from cachedit.calibration.tally import Progress, Tally
from cachedit.calibration.work import Work
from cachedit.evaluate.conditions import device_name
from cachedit.evaluate.configuration import Configuration
from cachedit.evaluate.metrics import mean_psnr, psnr
from cachedit.evaluate.panel import LPIPS, PSNR, SSIM, ST_LPIPS, Panel
from cachedit.evaluate.shot import Shot
from cachedit.evaluate.taking import judge, take
from cachedit.evaluate.time_shares import time_shares
from cachedit.feature.attachment import find_denoisers
from cachedit.frontier import OF_FRONTIER, QUALITIES
from cachedit.paths import CRITERIA
from cachedit.profile import Profile
from cachedit.solver import PREDICTORS, Solver
from cachedit.strategies.auto import Auto
from cachedit.strategy import FEW_STEPS, Schedule
from cachedit.wrap import last_run, unwrap

BUDGETS = 10  # per number of steps, in equal ratios
HIGHEST = 0.75  # of the steps: with more of them computed there is little to gain
PROMISING = 1.5  # times the lowest expected cost: a predictor that is worse than that is not tried
IDENTICAL = 1e3  # dB that stand for the infinite PSNR of equal pictures, as JSON has no infinity
METRICS = (PSNR, SSIM, LPIPS, ST_LPIPS)
SCREENED = 4  # prompts at most on which the promising ones are tried


def halves(prompts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Prompts to calibrate on, and those held out for the frontier: every second one."""
    return list(prompts[::2]), list(prompts[1::2])


def measure_frontier(
    pipe: Any,
    profile: Profile,
    prompts: Sequence[str],
    steps: Sequence[int],
    *,
    seed: int = 0,
    call_options: dict[str, Any] | None = None,
    progress: Progress | None = None,
    checkpoint: str | Path | None = None,
    resume: bool = False,
) -> Profile:
    """Run the schedules that ``Auto`` solves from a profile, and store what each budget gains and costs.

    At every budget the predictors that promise most are tried with both criteria on the first few prompts, a quarter of
    them at most. The best by PSNR is then measured on the other prompts, as those that chose it would flatter it.
    Baseline and budgets take turns for each prompt; speeds come from medians of whole calls, in CPU time of the process
    where the model runs on a CPU. Under ``accelerate launch`` prompts are shared between the processes.

    Args:
        pipe: the pipeline that was calibrated; left without a cache.
        profile: what calibration for ``Auto`` made.
        prompts: others than those of the calibration.
        steps: lengths of the runs for which the frontier is measured.
        seed: of the first prompt; prompt k has ``seed + k``.
        call_options: further arguments of the pipeline call.
        progress: called by the main process as ``progress(done, total, text)``, in steps of all runs.
        checkpoint: folder in which finished units are kept until the end.
        resume: go on with what lies there.

    Returns:
        The profile with the arrays "frontier" and "time".

    Raises:
        ValueError: no prompts, or runs so short that nothing is reused.
        ProfileError: the time of a call does not grow with its computed steps.
    """
    steps = sorted(set(steps))
    if not steps or steps[0] <= FEW_STEPS:
        raise ValueError(
            f"got frontier steps {steps}; allowed: {FEW_STEPS + 1} or more, as shorter runs reuse nothing. Measure "
            "longer runs."
        )
    sweep = Sweep(pipe, profile, prompts, seed, call_options or {}, Work(Ranks.here()))
    ranks = sweep.work.ranks
    if checkpoint is not None and ranks.is_main:
        sweep.work.checkpoint = Checkpoint(checkpoint, sweep.identity(steps))
    kept = sweep.work.checkpoint
    ranks.exchange(lambda: kept.open(resume) if kept is not None else None)
    sweep.work.tally = Tally(progress if ranks.is_main else None, sum(map(sweep.expected_steps, steps)))
    try:
        measured = []
        for count in steps:
            with sweep.work.tally.expecting(sweep.expected_steps(count)):
                measured.append(sweep.measure(count))
    finally:
        unwrap(pipe)
    ranks.exchange(lambda: kept.remove() if kept is not None else None)
    return _stored(profile, measured, sweep)


class Way(NamedTuple):
    """How a budget may be spent."""

    nfe: int
    predictor: str
    criterion: str

    @property
    def strategy(self) -> Auto:
        """What runs it."""
        return Auto(max_nfe=self.nfe, predictor=self.predictor, criterion=self.criterion)  # type: ignore[arg-type]


class Sweep:
    """The runs of a frontier."""

    def __init__(
        self, pipe: Any, profile: Profile, prompts: Sequence[str], seed: int, call_options: dict[str, Any], work: Work
    ) -> None:
        if not prompts:
            raise ValueError("got no prompts to measure the frontier on; allowed: one or more. Give more prompts.")
        self.pipe, self.profile, self.work = pipe, profile, work
        self.prompts, self.seed, self.call_options = list(prompts), seed, call_options
        screened = max(1, min(SCREENED, len(prompts) // 4))
        self.screened = range(screened)
        self.measured = range(screened if len(prompts) > 1 else 0, len(prompts))  # of one prompt both
        self.device = next(next(iter(find_denoisers(pipe).values())).parameters()).device
        self._panel = Panel(METRICS)
        self._baselines: dict[tuple[int, int], Shot] = {}

    def identity(self, steps: Sequence[int]) -> dict[str, Any]:
        """What two sweeps must have in common for one to go on with the other's runs."""
        return {
            "profile": hashlib.sha256(self.profile.to_json().encode()).hexdigest(),
            "prompts": self.prompts,
            "seed": self.seed,
            "steps": list(steps),
            "call options": {key: repr(value) for key, value in self.call_options.items()},
        }

    def expected_steps(self, steps: int) -> int:
        """Steps of the sampler that ``measure`` will take, about."""
        return steps * (BUDGETS * 6 * len(self.screened) + (BUDGETS + 2) * len(self.measured))

    def measure(self, steps: int) -> dict[str, Any]:
        """The best way at every budget of one number of steps, and its runs on the prompts that did not choose it."""
        solver = Solver(self.profile, *self._schedule(steps))
        tried = [Way(nfe, *choice) for nfe in _budgets(solver) for choice in _promising(solver, nfe)]
        keys = [(way, k) for way in tried for k in self.screened]
        found = self.work.map(f"tried-{steps}", [(*way, k) for way, k in keys], lambda key: self._try(steps, key))
        scores: dict[Way, list[float]] = {}
        for (way, _), score in zip(keys, found, strict=True):
            scores.setdefault(way, []).append(score)
        best: dict[int, Way] = {}
        for way in tried:
            best[way.nfe] = max(best.get(way.nfe, way), way, key=lambda one: mean_psnr(scores[one]))
        ways = [*best.values()]
        runs = self.work.map(f"measured-{steps}", self.measured, lambda k: self._measure(steps, ways, k))
        costs = [solver.cost(way.predictor, solver.paths(way.predictor, way.criterion)[way.nfe]) for way in ways]
        return {"steps": steps, "ways": ways, "costs": costs, "runs": runs}

    def _schedule(self, steps: int) -> tuple[Schedule, int]:
        """The noise schedule of a run of that many steps, as a run shows it, and the first step of a second expert."""
        self._take(steps, 0, Auto(max_nfe=steps))
        record = last_run(self.pipe)
        assert record is not None
        steps_of_run = [*{step.index: step for step in record.steps}.values()]
        timesteps, sigmas = ([getattr(step, name) for step in steps_of_run] for name in ("timestep", "sigma"))
        schedule = Schedule(
            len(steps_of_run),
            None if None in timesteps else tuple(timesteps),
            None if None in sigmas else tuple(sigmas),
            None if record.response is None else tuple(record.response[steps_of_run[0].index :]),
        )
        return schedule, sum(step.expert == steps_of_run[0].expert for step in steps_of_run)

    def _try(self, steps: int, key: tuple[int, str, str, int]) -> float:
        """PSNR of one way on one prompt."""
        nfe, predictor, criterion, k = key
        shot = self._take(steps, k, Way(nfe, predictor, criterion).strategy)
        baseline = self._baseline(steps, k)
        assert shot.pictures is not None
        assert baseline.pictures is not None
        return min(mean_psnr(psnr(shot.pictures, baseline.pictures).tolist()), IDENTICAL)

    def _measure(self, steps: int, ways: Sequence[Way], k: int) -> dict[str, Any]:
        """One prompt: seconds without a cache, also of a run of a quarter of the steps, and every way."""
        short = max(steps // 4, 2)
        baseline, shorter = self._take(steps, k, None), self._take(short, k, None)
        found: dict[str, Any] = {
            "seconds": [[steps, steps, self._seconds(baseline)], [short, short, self._seconds(shorter)]],
            "quality": [],
        }
        for way in ways:
            shot = self._take(steps, k, way.strategy)
            found["seconds"].append([steps, way.nfe, self._seconds(shot)])
            found["quality"].append(self._quality(shot, baseline))
        return found

    def _quality(self, shot: Shot, baseline: Shot) -> dict[str, float]:
        """The metrics that can be had here; one that cannot is asked for once."""
        judge(shot, baseline, self._panel)
        return shot.quality

    def _take(self, steps: int, k: int, strategy: Auto | None) -> Shot:
        shot = Shot(self.prompts[k], self.seed + k)
        configuration = None if strategy is None else Configuration(strategy, profile=self.profile)
        take(self.pipe, configuration, shot, steps, self.call_options)
        self.work.tally.add(steps, shot.prompt)
        return shot

    def _baseline(self, steps: int, k: int) -> Shot:
        if (steps, k) not in self._baselines:
            self._baselines[steps, k] = self._take(steps, k, None)
        return self._baselines[steps, k]

    def _seconds(self, shot: Shot) -> float:
        return shot.processor[-1] if self.device.type == "cpu" else shot.latencies[-1]


def _budgets(solver: Solver) -> list[int]:
    """Numbers of computed steps in equal ratios, from the fewest that there is a schedule for."""
    known = [*solver.paths("plain", "min_sum")]
    lowest, highest = min(known), max(min(known), math.floor(HIGHEST * solver.steps))
    ratios = np.geomspace(lowest, highest, BUDGETS)
    return sorted({min(known, key=lambda nfe: abs(nfe - ratio)) for ratio in ratios})


def _promising(solver: Solver, nfe: int) -> list[tuple[str, str]]:
    """Predictors whose expected cost is not far from the lowest, with both criteria where they differ."""
    costs = {name: solver.cost(name, solver.paths(name, "min_sum")[nfe]) for name in PREDICTORS}
    chosen = [name for name, cost in costs.items() if cost <= PROMISING * min(costs.values())]
    found: dict[tuple[str, tuple[int, ...]], tuple[str, str]] = {}
    for choice in itertools.product(chosen, CRITERIA):
        found.setdefault((choice[0], solver.paths(*choice)[nfe]), choice)
    return [*found.values()]


def _stored(profile: Profile, measured: Sequence[dict[str, Any]], sweep: Sweep) -> Profile:
    """The profile with what was measured."""
    columns: dict[str, list[float]] = {}
    shown = [quality for part in measured for run in part["runs"] for quality in run["quality"]]
    metrics = [name for name in QUALITIES if all(name in quality for quality in shown)]
    seconds: dict[tuple[int, int], list[float]] = {}
    for part in measured:
        for run in part["runs"]:
            for steps, nfe, taken in run["seconds"]:
                seconds.setdefault((steps, nfe), []).append(taken)
    median = {key: statistics.median(values) for key, values in seconds.items()}
    for part in measured:
        steps = part["steps"]
        for place, (way, cost) in enumerate(zip(part["ways"], part["costs"], strict=True)):
            row = {"steps": steps, "nfe": way.nfe, "predictor": [*PREDICTORS].index(way.predictor)}
            row |= {"criterion": [*CRITERIA].index(way.criterion), "cost": cost}
            row["speedup"] = median[steps, steps] / median[steps, way.nfe]
            row |= _summary([run["quality"][place] for run in part["runs"]], metrics)
            for name, value in row.items():
                columns.setdefault(name, []).append(_digits(value))
    arrays = {**profile.arrays, "frontier": columns, "time": time_shares(median)}
    told = {
        "prompts": len(sweep.measured),
        "chosen_on": len(sweep.screened),
        "seed": sweep.seed,
        "device": device_name(sweep.device),
        "threads": torch.get_num_threads(),
    }
    return replace(
        profile,
        arrays=arrays,
        axes=profile.axes | {array: [*axes] for array, axes in OF_FRONTIER.items()},
        provenance=profile.provenance | {"frontier": told},
    )


def _summary(qualities: Sequence[dict[str, float]], metrics: Sequence[str]) -> dict[str, float]:
    """Mean and standard deviation of each metric; identical pictures, whose PSNR is infinite, are left out of it."""
    found = {}
    for name in metrics:
        values = [one[name] for one in qualities if one[name] != math.inf]
        found[name] = statistics.fmean(values) if values else IDENTICAL
        found[f"{name}_spread"] = statistics.pstdev(values) if values else 0.0
    return found


def _digits(value: float) -> float:
    return float(f"{value:.6g}")
