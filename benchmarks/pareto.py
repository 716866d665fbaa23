"""Speed against fidelity: every strategy at several settings, beside the caches of diffusers and cache-dit.

    python benchmarks/pareto.py [--prompts N] [--strategies NAME ...] [--peers NAME ...] [--settings FILE]
                                [--profiles DIR] [--steps N] [--json FILE] [--markdown FILE] [--plot FILE]

Runs the trained sample pipeline at its default guidance, in one process on one thread. Quality is that of the final
pictures against the uncached ones of the same noise, over prompts that neither training nor calibration has seen. Times
are CPU times of that thread over whole calls (text encoder, denoiser, decoder); the settings of a method and the
uncached pipeline take turns. FLOPs are those of matrix products and attention in the denoiser.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import importlib.metadata
import importlib.util
import inspect
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from diffusers import DiffusionPipeline
from diffusers.utils import logging as diffusers_logging
from pareto_methods import Method, Ready, Trial, cachedit_methods, settings_for
from pareto_peers import cache_dit_methods, diffusers_methods
from pareto_table import AXES, Row, answers, markdown, sentences
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from cachedit.evaluate.conditions import describe
from cachedit.evaluate.metrics import MetricUnavailable, mean_psnr, psnr, ssim, st_lpips
from cachedit.evaluate.pictures import pictures
from cachedit.files import write_text
from cachedit.samples import sample_path
from cachedit.samples.scenes import all_scenes, held_out, sample_scenes, training_scenes
from cachedit.strategy import canonical

CALIBRATION_PROMPTS, CALIBRATION_SEED, SEED = 3, 1000, 0
TIMED_PROMPTS = 3  # runs that are timed take turns over this many prompts
HALF = 0.5  # of a full call's work, above which a call counts as computed
SAME_PICTURE = 50.0  # dB between the picture of a prompt alone and in a batch
"""Far above what the caches reach, far below what float32 loses by another order of sums."""


class Work(TorchDispatchMode):
    """Counts floating-point operations of matrix products, convolutions and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
            self.flops += sdpa_flop_count(*(tensor.shape for tensor in args[:3]))
        elif packet in flop_registry:
            self.flops += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        return out


@dataclasses.dataclass
class Drawing:
    """The pictures of a few prompts, ``[N, 3, H, W]``, and the work of every denoiser call."""

    pictures: torch.Tensor
    work: list[int]


class Bench:
    """The prompts, the uncached pipeline, and what is measured on both.

    Args:
        trial: the pipeline and the length of the runs.
        prompts: to judge quality on.
        repeats: timed runs of every method.
    """

    def __init__(self, trial: Trial, prompts: Sequence[str], repeats: int) -> None:
        self.trial, self.prompts, self.repeats = trial, list(prompts), repeats
        self.bare = Ready(trial.own_pipe(), lambda: None, True)
        self._drawn: dict[bool, list[Drawing]] = {}

    def run(self, ready: Ready, shots: Sequence[int], work: Work | None = None) -> Drawing:
        """Draw these prompts in one batch; with ``work`` under way, count that of every call of the denoiser."""
        counts: list[int] = []
        handles = []
        if work is not None:
            denoiser = ready.pipe.transformer
            handles = [
                denoiser.register_forward_pre_hook(lambda *_: counts.append(-work.flops)),
                denoiser.register_forward_hook(lambda *_: counts.append(counts.pop() + work.flops)),
            ]
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", r"cachedit: .* reused no step", UserWarning)
                output = ready.pipe(
                    prompt=[self.prompts[k] for k in shots],
                    num_inference_steps=self.trial.steps,
                    generator=[torch.Generator().manual_seed(SEED + k) for k in shots],
                    output_type="pt",
                )
        finally:
            for handle in handles:
                handle.remove()
        return Drawing(pictures(output), counts)

    def draw(self, ready: Ready, batched: bool) -> list[Drawing]:
        """All prompts, in one batch or one by one."""
        everything = list(range(len(self.prompts)))
        found = []
        for shots in [everything] if batched else [[k] for k in everything]:
            ready.begin()
            with Work() as work:
                found.append(self.run(ready, shots, work))
        return found

    def uncached(self, batched: bool) -> list[Drawing]:
        """The same without a cache, drawn once."""
        if batched not in self._drawn:
            self._drawn[batched] = self.draw(self.bare, batched)
        return self._drawn[batched]

    def judge(self, row: Row, drawn: list[Drawing], batched: bool) -> None:
        """Quality and work, into the row."""
        bare = self.uncached(batched)
        a, b = (torch.cat([drawing.pictures for drawing in part]) for part in (drawn, bare))
        values = psnr(a, b).tolist()
        row.psnr, row.worst_psnr, row.ssim = mean_psnr(values), min(values), float(ssim(a, b).mean())
        with contextlib.suppress(MetricUnavailable):
            row.st_lpips = float(st_lpips(a, b).mean())
        shares = [
            [ours / full for ours, full in zip(drawing.work, reference.work, strict=True)]
            for drawing, reference in zip(drawn, bare, strict=True)
        ]
        row.calls = len(shares[0])
        row.computed = statistics.fmean(sum(share > HALF for share in run) for run in shares)
        row.flops = statistics.fmean(statistics.fmean(run) for run in shares)
        row.strips = [strip(run, self.trial.steps) for run in shares]

    def time(self, rows: Sequence[tuple[Row, Ready, torch.Tensor]]) -> None:
        """Time methods and the uncached pipeline in turns; medians into the rows.

        A run that draws another picture than the quality run did is an error of that method.
        """
        seconds: list[list[float]] = [[] for _ in range(len(rows) + 1)]
        for turn in range(self.repeats):
            shot = turn % min(TIMED_PROMPTS, len(self.prompts))
            for number, (row, ready, drawn) in enumerate([(None, self.bare, None), *rows]):
                if row is not None and row.error:
                    continue
                try:
                    ready.begin()
                    gc.collect()
                    start = time.thread_time()
                    picture = self.run(ready, [shot]).pictures
                    seconds[number].append(time.thread_time() - start)
                    if drawn is not None and (value := float(psnr(picture, drawn[shot : shot + 1]))) < SAME_PICTURE:
                        raise RuntimeError(f"a second run is only {value:.0f} dB near to the first")
                except Exception as error:
                    if row is None:
                        raise
                    row.error = explained(error)
        base = statistics.median(seconds[0])
        for (row, _, _), own in zip(rows, seconds[1:], strict=True):
            if not row.error:
                row.speedup = base / statistics.median(own)


def strip(shares: Sequence[float], steps: int) -> str:
    """One mark per step: computed, partly computed, reused."""
    branches = max(1, len(shares) // steps)
    means = [statistics.fmean(shares[i : i + branches]) for i in range(0, len(shares), branches)]
    return "".join("■" if mean > 0.999 else "▨" if mean > HALF else "□" for mean in means)


def explained(error: Exception) -> str:
    """The error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


# -- the run ----------------------------------------------------------------------------------------------------------


def measure(bench: Bench, methods: Sequence[Method]) -> list[Row]:
    """The rows of the methods of one name; what fails has its reason in the row."""
    rows, timed = [], []
    for method in methods:
        row = Row(method.group, method.name, method.settings)
        rows.append(row)
        start = time.perf_counter()
        try:
            ready = method.prepare()
            drawn = bench.draw(ready, ready.batched)
            bench.judge(row, drawn, ready.batched)
            timed.append((row, ready, torch.cat([drawing.pictures for drawing in drawn])))
        except Exception as error:
            row.error = explained(error)
        seconds = time.perf_counter() - start
        text = row.error or f"{row.psnr:.2f} dB, {row.flops_ratio:.2f} times less work"
        print(f"{row.group} {row.name} {row.label}: {text} ({seconds:.0f} s)", file=sys.stderr, flush=True)
    bench.time(timed)
    return rows


def conditions(bench: Bench) -> dict[str, Any]:
    """What the numbers depend on."""
    trial, pipe = bench.trial, bench.bare.pipe
    guidance = inspect.signature(type(pipe).__call__).parameters["guidance_scale"].default
    picture = tuple(bench.uncached(True)[0].pictures[:1].shape)
    found = describe(pipe, bench.prompts, trial.steps, SEED, bench.repeats, {"guidance_scale": guidance}, picture)
    peers = {"cache-dit": importlib.util.find_spec("cache_dit")}
    return found | {
        "protocol": "quality: prompts in one batch where nothing depends on the batch, else one by one; times: one "
        "prompt, whole calls, CPU time of the thread, the settings of a method and uncached in turns, medians",
        "command": shlex.join(["python", *sys.argv]),
        "load average at the end": " ".join(f"{load:.1f}" for load in os.getloadavg()),
        "calibration prompts": list(trial.prompts),
        "calibration seeds": [trial.seed + k for k in range(len(trial.prompts))],
        **{name: importlib.metadata.version(name) if spec else "not installed" for name, spec in peers.items()},
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16, metavar="N", help="held-out prompts (16)")
    parser.add_argument("--steps", type=int, default=28, metavar="N")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="timed runs of every setting (3)")
    parser.add_argument("--strategies", nargs="*", metavar="NAME", help="all by default; none without a NAME")
    parser.add_argument("--peers", nargs="*", metavar="NAME", help="diffusers, cache-dit or a cache of theirs; all")
    parser.add_argument(
        "--settings", type=Path, metavar="FILE", help="JSON: strategy -> list of options, in place of ours"
    )
    parser.add_argument("--profiles", type=Path, metavar="DIR", help="keep calibrated profiles here, and use those")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="FILE.png and FILE.svg")
    options = parser.parse_args(arguments)
    for name in ("prompts", "steps", "repeats"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: at least 1")
    return options


def chosen_methods(options: argparse.Namespace, trial: Trial, folder: Path) -> dict[tuple[str, str], list[Method]]:
    """(group, name) -> its settings, as the command line asks for."""
    settings = settings_for(trial.steps)
    if options.settings:
        given = json.loads(options.settings.read_text(encoding="utf-8"))
        names = {canonical(name) for name in given}
        settings = {name: own for name, own in settings.items() if canonical(name) not in names} | {
            name: [{key: tuple(v) if isinstance(v, list) else v for key, v in own.items()} for own in choices]
            for name, choices in given.items()
        }
    found: dict[tuple[str, str], list[Method]] = {}
    for makers, wanted in (
        ([cachedit_methods(trial, settings, folder)], options.strategies),
        ([diffusers_methods(trial), cache_dit_methods(trial)], options.peers),
    ):
        asked = None if wanted is None else {canonical(name) for name in wanted}
        for method in (method for maker in makers for method in maker):
            if asked is None or asked & {canonical(method.group), canonical(method.name)}:
                found.setdefault((method.group, method.name), []).append(method)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write if asked to."""
    options = parse(arguments)
    torch.set_num_threads(1)
    diffusers_logging.set_verbosity_error()
    diffusers_logging.disable_progress_bar()
    draw = torch.Generator().manual_seed(SEED)
    unseen = [scene.prompt for scene in all_scenes() if held_out(scene)]
    order = torch.randperm(len(unseen), generator=draw).tolist()
    prompts = [unseen[number] for number in order[: options.prompts]]
    known = [scene.prompt for scene in sample_scenes(training_scenes(), CALIBRATION_PROMPTS, draw)]
    trial = Trial(DiffusionPipeline.from_pretrained(sample_path("image")), options.steps, known, CALIBRATION_SEED)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.profiles or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(trial, prompts, options.repeats)
        rows = [row for methods in chosen_methods(options, trial, folder).values() for row in measure(bench, methods)]
        found = conditions(bench)
    replies = answers(rows)
    told = "\n".join(f"- {name}: {value}" for name, value in found.items())
    text = markdown(rows) + "\n\n" + "\n".join(f"- {line}" for line in sentences(replies)) + "\n\n" + told + "\n"
    print("\n" + text)
    if options.markdown:
        write_text(options.markdown, text)
    if options.json:
        result = {"conditions": found, "axes": AXES, "rows": [row.to_dict() for row in rows], "answers": replies}
        write_text(options.json, json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    if options.plot:
        from pareto_plot import plot

        plot(rows, found, options.plot)


if __name__ == "__main__":
    main()
