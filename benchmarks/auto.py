"""Auto on the sample: does it keep what the profile promises, and does a profile serve other steps and samplers?

    python benchmarks/auto.py targets  [--prompts N] [--profile FILE] [--json FILE] [--markdown FILE]
    python benchmarks/auto.py transfer [--prompts N] [--profile FILE] [--json FILE] [--markdown FILE]

targets: for speed-ups asked for at 28 steps, what the profile expects and what is reached. transfer: the profile, made
at 50 steps of Euler, against profiles made natively at every other number of steps and sampler, from the first of the
same prompts and noises, at equal computed steps and with the same predictor; and against the schedule of 50 steps
copied by nearest index. "+-" is the standard error of PSNR with the profile minus PSNR with the native one, over the
prompts. These are of scenes that neither training nor calibration has seen. One process, one thread; times are CPU
times of whole calls, baseline and cache in turns for every prompt, medians.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from diffusers import UniPCMultistepScheduler

from cachedit import Profile
from cachedit.calibration import calibrate
from cachedit.evaluate.compare import Configuration, judge, take
from cachedit.evaluate.comparison import Shot
from cachedit.evaluate.conditions import describe
from cachedit.evaluate.loading import load_pipeline, load_prompts
from cachedit.evaluate.metrics import mean_psnr
from cachedit.evaluate.sweep import halves
from cachedit.files import write_text
from cachedit.samples import sample_path
from cachedit.samples.scenes import all_scenes, held_out
from cachedit.shipped import shipped
from cachedit.strategies.auto import Auto
from cachedit.strategy import Context, FeatureStrategy, Schedule
from cachedit.wrap import last_run, unwrap

SEED = 7000  # far from those of calibration
STEPS, SPEEDUPS = 28, (1.5, 2.0, 3.0, 4.0)
TRANSFER = {28: (14, 10, 8), 20: (10, 8, 7)}  # steps -> computed steps
NATIVE_PROMPTS = 8


class FlowUniPC(UniPCMultistepScheduler):
    """UniPC on the flow's own noise levels, for a pipeline that hands Euler's to its scheduler."""

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: Any = None,
        timesteps: Any = None,
        sigmas: Any = None,
        mu: float | None = None,
    ) -> None:
        super().set_timesteps(len(sigmas) if sigmas is not None else num_inference_steps, device=device)


@dataclass(frozen=True)
class Copied(FeatureStrategy, abstract=True):
    """The plan of another number of steps, copied by nearest index: its computed steps and its weights."""

    computed: tuple[int, ...] = ()
    rows: Mapping[int, tuple[float, ...]] = field(default_factory=dict, hash=False)

    history: ClassVar[int] = 2
    needs_schedule: ClassVar[bool] = True

    def should_compute(self, ctx: Context) -> bool:
        """The copied steps."""
        return ctx.step in self.computed

    def weights(self, ctx: Context) -> Sequence[float] | None:
        """Those of the nearest step, if it was forecast from as many."""
        row = self.rows.get(ctx.step)
        return row if row is not None and len(row) == len(ctx.computed_steps) else None


def copied(profile: Profile, budget: int, predictor: str, steps: int) -> Copied:
    """The plan of the calibrated steps that gives ``budget`` computed ones of ``steps``."""
    assert profile.sigmas is not None
    known = len(profile.sigmas)
    schedule = Schedule(known, sigmas=tuple(profile.sigmas))
    for more in range(budget, known):
        auto = Auto(max_nfe=more, predictor=predictor, criterion="minimax").configured(profile)
        plan = auto.plan(schedule, profile)
        chosen = tuple(sorted({round(step * (steps - 1) / (known - 1)) for step in plan.computed}))
        if len(chosen) == budget:
            break
    solver = auto.planner(schedule, profile).solver
    rows: dict[int, tuple[float, ...]] = {}
    for step in range(steps):
        nearest = round(step * (known - 1) / (steps - 1))
        before = [place for place in plan.computed if place < nearest]
        if step not in chosen and before:
            rows[step] = tuple(solver.weights(predictor, before[-2:], nearest))
    return Copied(chosen, rows)


class Bench:
    """The sample with one sampler, and its uncached pictures."""

    def __init__(self, count: int, scheduler: Any = None) -> None:
        self.pipe = load_pipeline(str(sample_path("image")))
        if scheduler is not None:
            self.pipe.scheduler = scheduler
        unseen = [scene.prompt for scene in all_scenes() if held_out(scene)]
        order = torch.randperm(len(unseen), generator=torch.Generator().manual_seed(SEED)).tolist()
        self.prompts = [unseen[number] for number in order[:count]]
        self._bare: dict[int, list[Shot]] = {}

    def shot(self, k: int, steps: int, configuration: Configuration | None) -> Shot:
        """One prompt, timed."""
        shot = Shot(self.prompts[k], SEED + k)
        take(self.pipe, configuration, shot, steps, {})
        return shot

    def quality(self, steps: int, strategy: FeatureStrategy, profile: Profile | None) -> tuple[list[float], int]:
        """PSNR of every prompt, and computed steps."""
        if steps not in self._bare:
            self._bare[steps] = [self.shot(k, steps, None) for k in range(len(self.prompts))]
        found = []
        for k, bare in enumerate(self._bare[steps]):
            shot = self.shot(k, steps, Configuration(strategy, profile=profile))
            judge(shot, bare)
            found.append(shot)
        record = last_run(self.pipe)
        unwrap(self.pipe)
        assert record is not None
        return [shot.psnr or 0.0 for shot in found], record.nfe


def targets(bench: Bench, profile: Profile) -> list[dict[str, Any]]:
    """One row per speed-up that is asked for."""
    rows = []
    for target in SPEEDUPS:
        configuration, times, shots = Configuration(Auto(target_speedup=target), profile=profile), [], []
        for k in [0, *range(len(bench.prompts))]:  # the first run of each is not counted
            bare, shot = bench.shot(k, STEPS, None), bench.shot(k, STEPS, configuration)
            judge(shot, bare)
            times.append(bare.processor[-1] / shot.processor[-1])
            shots.append(shot)
        run = shots[-1].run
        assert run is not None
        rows.append(
            {"target": target, "nfe": run.nfe, "speedup": statistics.median(times[1:])}
            | {f"expected_{name}": value for name, value in run.expected.items() if isinstance(value, float)}
            | {"predictor": run.expected["predictor"], "psnr": mean_psnr([shot.psnr or 0.0 for shot in shots[1:]])}
            | {name: statistics.fmean(getattr(s, name) or 0.0 for s in shots[1:]) for name in ("ssim", "st_lpips")}
        )
        print(rows[-1], file=sys.stderr, flush=True)
    unwrap(bench.pipe)
    return rows


def transfer(count: int, profile: Profile) -> list[dict[str, Any]]:
    """One row per sampler, number of steps and budget."""
    rows = []
    prompts = load_prompts(str(sample_path("image") / "calibration_prompts.txt"), None, None)
    known = halves(prompts)[0][:NATIVE_PROMPTS]
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 1.0}
    for sampler, scheduler in (("Euler", None), ("UniPC", FlowUniPC(**flow))):
        bench = Bench(count, scheduler)
        for steps, budgets in TRANSFER.items():
            seed = profile.provenance["seed"]
            native = calibrate(bench.pipe, "auto", prompts=known, num_inference_steps=steps, seed=seed)
            for budget in budgets:
                predictor = "fitted" if budget * 3 > steps else "damped"
                auto = Auto(max_nfe=budget, predictor=predictor, criterion="minimax")
                row: dict[str, Any] = {"sampler": sampler, "steps": steps, "nfe": budget, "predictor": predictor}
                found: dict[str, list[float]] = {}
                for name, strategy, read in (
                    ("profile", auto, profile),
                    ("native", auto, native),
                    ("nearest", copied(profile, budget, predictor, steps), None),
                ):
                    found[name], nfe = bench.quality(steps, strategy, read)
                    assert nfe == budget, (name, nfe, row)
                    row[name] = mean_psnr(found[name])
                row["+-"] = standard_error([a - b for a, b in zip(found["profile"], found["native"], strict=True)])
                rows.append(row)
                print(row, file=sys.stderr, flush=True)
    return rows


def standard_error(values: Sequence[float]) -> float:
    """Of the mean of these, without those that are not finite."""
    finite = [value for value in values if math.isfinite(value)]
    return statistics.stdev(finite) / math.sqrt(len(finite))


def table(names: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as Markdown."""
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for row in rows:
        cells = [f"{row[name]:.4g}" if isinstance(row[name], float) else str(row[name]) for name in names]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("targets", "transfer"))
    parser.add_argument("--prompts", type=int, default=32, metavar="N", help="held-out prompts (32)")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="default: the shipped one of the sample")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    profile = Profile.load(options.profile) if options.profile else shipped()["image-auto"]
    bench = Bench(options.prompts)
    if options.what == "targets":
        rows = targets(bench, profile)
        names = ["target", "nfe", "predictor", "expected_speedup", "speedup", "expected_psnr", "psnr"]
        names += ["expected_ssim", "ssim", "expected_st_lpips", "st_lpips"]
    else:
        rows = transfer(options.prompts, profile)
        names = ["sampler", "steps", "nfe", "predictor", "profile", "native", "+-", "nearest"]
    shape = tuple(bench.shot(0, 2, None).pictures.shape)  # type: ignore[union-attr]
    found = describe(bench.pipe, bench.prompts, STEPS, SEED, 1, {}, shape) | {
        "command": shlex.join(["python", *sys.argv]),
        "profile": profile.command,
        "load average at the end": " ".join(f"{load:.1f}" for load in os.getloadavg()),
    }
    told = "\n".join(f"- {name}: {value}" for name, value in found.items() if name != "prompts")
    text = table(names, rows) + "\n\n" + told + "\n"
    print("\n" + text)
    if options.markdown:
        write_text(options.markdown, text)
    if options.json:
        write_text(options.json, json.dumps({"conditions": found, "rows": rows}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
