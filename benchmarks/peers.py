"""What a reused step costs: cachedit, the least possible plugin, diffusers' MagCache and cache-dit on one schedule.

    python benchmarks/peers.py [--json FILE] [--models flux dit wan] [--sizes tiny small] [--repeats N] [--quick]

Everything runs in one process on one thread, on real architectures with random weights. Times are CPU times of that
thread, so that a busy machine disturbs them little. Calls are Python calls (``sys.setprofile``), which have no noise.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from peer_methods import Method, methods_for
from peer_models import MASK, MODELS, SIGMAS, SIZES, Setup

from cachedit.files import write_text

COLUMNS = (
    "model", "size", "method", "run_ratio", "ms_reused", "ms_reused_floor", "extra_calls_reused",
    "extra_calls_computed", "rel_l2", "cache_bytes",
)  # fmt: skip
REUSED = [step for step, mark in enumerate(MASK) if mark == "0"]
COMPUTED = [step for step, mark in enumerate(MASK) if mark == "1"]
CALL_LIMIT, MS_LIMIT = 60, 0.1


@dataclass
class Counts:
    """What a run did, free of noise.

    Attributes:
        calls: per step, Python calls by code object.
        blocks: per step, how many of the model's blocks were run.
        cache_bytes: the most that the method held after a step.
        latent: where the run ended.
    """

    calls: list[Counter[CodeType]]
    blocks: list[int]
    cache_bytes: int
    latent: torch.Tensor

    def per_step(self, steps: Sequence[int]) -> int:
        """Median Python calls of a denoiser call over these steps."""
        return int(statistics.median(self.calls[step].total() for step in steps))


@dataclass
class Times:
    """CPU milliseconds: of whole runs, and of every denoiser call at a reused step."""

    runs: list[float]
    reused: list[float]


def run(setup: Setup, method: Method, call: Callable[[int, dict[str, Any]], tuple[torch.Tensor, ...]]) -> torch.Tensor:
    """One trip through the schedule by Euler steps; returns the final latent."""
    method.begin()
    latent, ends = setup.latent, [*SIGMAS[1:], 0.0]
    for step, (sigma, end) in enumerate(zip(SIGMAS, ends, strict=True)):
        velocity = call(step, {**setup.inputs, "hidden_states": latent, "timestep": setup.times[step]})[0]
        latent = method.advance(velocity, step, latent) if method.advance else latent + (end - sigma) * velocity
    return latent


@torch.no_grad()
def count(setup: Setup, method: Method) -> Counts:
    """Run once with every Python call counted, after a run that warms up."""
    run(setup, method, lambda step, inputs: method.denoise(**inputs))
    block_codes = {type(block).forward.__code__ for block in setup.blocks}
    counts = Counts([], [], 0, setup.latent)

    def call(step: int, inputs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        seen: Counter[CodeType] = Counter()

        def note(frame: FrameType, event: str, argument: Any) -> None:
            if event == "call":
                seen[frame.f_code] += 1

        sys.setprofile(note)
        try:
            out = method.denoise(**inputs)
        finally:
            sys.setprofile(None)
        counts.calls.append(seen)
        counts.blocks.append(sum(seen[code] for code in block_codes))
        counts.cache_bytes = max(counts.cache_bytes, method.cache_bytes())
        return out

    counts.latent = run(setup, method, call)
    return counts


@torch.no_grad()
def measure(setup: Setup, methods: dict[str, Method], counts: dict[str, Counts], repeats: int) -> dict[str, Times]:
    """Time whole runs, method by method in turns.

    Raises:
        RuntimeError: a timed run did not end where the counted one did, so it did not compute the same steps.
    """
    times = {name: Times([], []) for name in methods}
    order = list(methods)
    for _ in range(repeats):
        for name in order:
            milliseconds: list[float] = []

            def call(step: int, inputs: dict[str, Any], name=name, noted=milliseconds) -> tuple[torch.Tensor, ...]:
                start = time.thread_time_ns()
                out = methods[name].denoise(**inputs)
                noted.append((time.thread_time_ns() - start) / 1e6)
                return out

            gc.collect()
            gc.disable()
            start = time.thread_time_ns()
            latent = run(setup, methods[name], call)
            times[name].runs.append((time.thread_time_ns() - start) / 1e6)
            gc.enable()
            times[name].reused += [milliseconds[step] for step in REUSED]
            if not torch.equal(latent, counts[name].latent):
                raise RuntimeError(f"{name} on {setup.model} {setup.size}: a timed run differs from the counted one")
        order = [*order[1:], order[0]]
    return times


def rounds(size: str, repeats: int) -> int:
    """Tiny models are quick to run, and their times need more repeats."""
    return 3 * repeats if size == "tiny" and repeats > 1 else repeats


def rows_of(setup: Setup, counts: dict[str, Counts], times: dict[str, Times]) -> list[dict[str, Any]]:
    """The table of one denoiser.

    Raises:
        RuntimeError: a method did not compute exactly the steps of the schedule.
    """
    plain, least = counts["uncached"], counts["floor"]
    rows = []
    for name, found in counts.items():
        steps = "".join("1" if ran == len(setup.blocks) else "0" for ran in found.blocks)
        if steps != (MASK if name != "uncached" else "1" * len(MASK)):
            raise RuntimeError(f"{name} on {setup.model} {setup.size} computed {steps} instead of {MASK}")
        ratios = [one / base for one, base in zip(times[name].runs, times["uncached"].runs, strict=True)]
        error = (found.latent - plain.latent).norm() / plain.latent.norm()
        reuses = name != "uncached"
        values = (
            setup.model, setup.size, name, statistics.median(ratios),
            statistics.median(times[name].reused) if reuses else None, statistics.median(times["floor"].reused),
            found.per_step(REUSED) - least.per_step(REUSED) if reuses else None,
            found.per_step(COMPUTED) - plain.per_step(COMPUTED), float(error), found.cache_bytes,
        )  # fmt: skip
        rows.append({**dict(zip(COLUMNS, values, strict=True)), "steps": steps})
    return rows


def excess(found: Counts, base: Counts, step: int, at_least: int = 1) -> list[tuple[str, int]]:
    """Functions that ``found`` calls more often at ``step`` than ``base``, and how much more often."""
    more = found.calls[step] - base.calls[step]
    named = [(f"{Path(code.co_filename).name}:{code.co_qualname}", calls) for code, calls in more.items()]
    return sorted([entry for entry in named if entry[1] >= at_least], key=lambda entry: -entry[1])


def print_profile(setup: Setup, counts: dict[str, Counts]) -> None:
    """Where cachedit spends its Python calls, one reused and one computed step."""
    for kind, step, base in (("reused", REUSED[-1], "floor"), ("computed", COMPUTED[-2], "uncached")):
        print(f"\n{setup.model} {setup.size}: calls of cachedit beyond {base} at step {step} ({kind})")
        for function, calls in excess(counts["cachedit"], counts[base], step):
            print(f"  {calls:4d}  {function}")


def verdicts(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Whether each target is reached, denoiser by denoiser."""
    lines = []
    for row in (row for row in rows if row["method"] == "cachedit"):
        place = (row["model"], row["size"])
        here = {other["method"]: other for other in rows if (other["model"], other["size"]) == place}
        checks = {
            f"within {MS_LIMIT} ms of the floor": row["ms_reused"] - row["ms_reused_floor"] <= MS_LIMIT,
            "at or below MagCache": row["ms_reused"] <= here["diffusers-magcache"]["ms_reused"],
            f"reused <= {CALL_LIMIT} calls": row["extra_calls_reused"] <= CALL_LIMIT,
            f"computed <= {CALL_LIMIT} calls": row["extra_calls_computed"] <= CALL_LIMIT,
            "bytes of one residual": row["cache_bytes"] == here["floor"]["cache_bytes"],
        }
        marks = ", ".join(f"{name}: {'yes' if good else 'NO'}" for name, good in checks.items())
        lines.append(f"{row['model']} {row['size']}: {marks}")
    return lines


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    titles = (
        "model", "size", "method", "run / uncached", "ms reused", "over floor", "calls reused (over floor)",
        "calls computed (over uncached)", "rel. L2", "cache bytes",
    )  # fmt: skip
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * 3 + "---:|" * 7]
    for row in rows:
        reused, calls = row["ms_reused"], row["extra_calls_reused"]
        cells = (
            row["model"], row["size"], row["method"], f"{row['run_ratio']:.3f}",
            "-" if reused is None else f"{reused:.3f}",
            "-" if reused is None else f"{reused - row['ms_reused_floor']:+.3f}",
            "-" if calls is None else f"{calls:+d}", f"{row['extra_calls_computed']:+d}", f"{row['rel_l2']:.1e}",
            f"{row['cache_bytes']:,}",
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def conditions(setups: Sequence[Setup], repeats: int) -> dict[str, Any]:
    """What the numbers depend on."""
    found = {
        "command": shlex.join(["python", *sys.argv]),
        "cpu": _cpu(),
        "load average at the end": " ".join(f"{load:.1f}" for load in os.getloadavg()),
        "threads": torch.get_num_threads(),
        "clock": "CPU time of the thread, garbage collection off",
        "repeats": ", ".join(f"{size} {rounds(size, repeats)}" for size in SIZES) + "; methods in turns; medians",
        "schedule": MASK,
        "driven": "bare module under torch.no_grad(), float32, batch 1, one branch, Euler steps, no cache_context",
        "sizes (blocks x width x tokens)": {f"{setup.model} {setup.size}": setup.shape for setup in setups},
        "python": platform.python_version(),
    }
    for package in ("torch", "diffusers", "cachedit", "cache-dit"):
        missing = importlib.util.find_spec(package.replace("-", "_")) is None
        found[package] = "not installed, so it has no rows" if missing else importlib.metadata.version(package)
    return found


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write conditions and rows here")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    parser.add_argument("--calls", action="store_true", help="list where cachedit spends its Python calls")
    parser.add_argument("--quick", action="store_true", help="flux, tiny, one repeat: for the counts, not the times")
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error(f"--repeats {options.repeats}: at least 1")
    if options.quick:
        options.models, options.sizes, options.repeats = ["flux"], ["tiny"], 1
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write if asked to."""
    options = parse(arguments)
    torch.set_num_threads(1)
    rows, setups = [], []
    for name in options.models:
        for size in options.sizes:
            print(f"{name} {size} ...", file=sys.stderr, flush=True)
            setup = MODELS[name](size)
            methods = {method: make(setup) for method, make in methods_for(setup).items()}
            counts = {method: count(setup, made) for method, made in methods.items()}
            times = measure(setup, methods, counts, rounds(size, options.repeats))
            rows += rows_of(setup, counts, times)
            setups.append(setup)
            if options.calls:
                print_profile(setup, counts)
    found = conditions(setups, options.repeats)
    print("\n" + markdown(rows) + "\n")
    print("\n".join(f"- {name}: {value}" for name, value in found.items()) + "\n")
    print("\n".join(verdicts(rows)))
    if options.json:
        write_text(options.json, json.dumps({"conditions": found, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
