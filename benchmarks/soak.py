"""The long trials: turns on one pipeline, crowds of threads, two ranks, damaged profiles, and the cost of nothing.

    python benchmarks/soak.py [--runs N] [--rank-runs N] [--files N] [--thread-runs N] [--seed N] [--json FILE]

From a checkout, for the trials lie in ``tests/trials``; ``tests/test_soak.py`` runs their short forms. A fault ends it
with the seed that shows it. Times are wall-clock seconds; nothing is concluded from them.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
from conftest import FLAT
from hardware import conditions
from test_threads_ranks import ranks
from trials import rank_runs
from trials.call_counts import MODELS, costs
from trials.pipeline_runs import Turns
from trials.profile_files import fuzz
from trials.thread_runs import crowd

import cachedit
from cachedit.files import write_text
from zoo.pipelines import PIPELINES, run


def turns(options: argparse.Namespace) -> dict[str, Any]:
    """Runs of one pipeline, each beside one of a fresh wrap."""
    gc.collect()
    gc.freeze()  # what the imports made need not be walked after every run
    series, most = Turns(options.seed), []
    for _ in range(options.runs):
        series.turn()
        most.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    series.finish()
    gc.unfreeze()
    tenth = max(len(series.objects) // 10, 1)
    return {
        **series.tally,
        "steps reused by strategy": dict(series.reused),
        "tensors held behind a run, beyond the pipeline's own": {"most": max(series.strangers)},
        "objects alive behind a run without a wrap": {
            "first tenth, most": max(series.objects[:tenth]),
            "last tenth, most": max(series.objects[-tenth:]),
        },
        "peak bytes of the process": {"a tenth of the way": most[len(most) // 10], "at the end": most[-1]},
    }


def threads(options: argparse.Namespace) -> dict[str, Any]:
    """Eight threads on one pipeline."""
    built = PIPELINES["flux_true_cfg"]()
    cachedit.wrap(built.pipe, "mag_cache", profile=FLAT)
    expected = {(seed, steps): run(built, seed, steps) for seed in (0, 1, 2) for steps in (6, 10)}
    tally = crowd(lambda key: run(built, *key), expected, torch.equal, runs=options.thread_runs, seed=options.seed)
    return {"threads": 8, "runs": 8 * options.thread_runs, **tally}


def two_ranks(options: argparse.Namespace) -> dict[str, Any]:
    """Two gloo processes over random schedules."""
    first, second = ranks(Path(rank_runs.__file__), str(options.rank_runs), patience=600)
    by_strategy: dict[str, list[str]] = {}
    for row in first:
        by_strategy.setdefault(row["strategy"], []).append(row["strip"])
    return {
        "runs": len(first),
        "runs with equal decisions": sum(one == other for one, other in zip(first, second, strict=True)),
        "steps reused by strategy": {name: "".join(strips).count("□") for name, strips in by_strategy.items()},
        "steps": sum(len(row["strip"]) for row in first),
    }


def files(options: argparse.Namespace) -> dict[str, Any]:
    """Damaged profiles."""
    with tempfile.TemporaryDirectory() as folder:
        first = options.seed * options.files
        return fuzz(range(first, first + options.files), Path(folder))


def nothing(options: argparse.Namespace) -> dict[str, Any]:
    """Python calls per block pass of strategies that never reuse."""
    rows = [{**dataclasses.asdict(cost), "added": cost.share} for model in MODELS for cost in costs(model)]
    return {"definition": sys.modules["trials.call_counts"].__doc__, "rows": rows}


TRIALS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "turns": turns, "threads": threads, "ranks": two_ranks, "profiles": files, "cost of nothing": nothing,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all trials, print what they found, and write it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=500, metavar="N", help="of one pipeline")
    parser.add_argument("--rank-runs", type=int, default=50, metavar="N", help="of two ranks")
    parser.add_argument("--files", type=int, default=10_000, metavar="N", help="damaged profiles")
    parser.add_argument("--thread-runs", type=int, default=50, metavar="N", help="of each of 8 threads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found: dict[str, Any] = {"conditions": {**conditions(torch.device("cpu")), "threads": 1, "seed": options.seed}}
    for name, trial in TRIALS.items():
        began = time.perf_counter()
        found[name] = {**trial(options), "seconds": round(time.perf_counter() - began, 1)}
        print(f"{name}: {json.dumps(found[name], indent=1, ensure_ascii=False)}", flush=True)
    if options.json:
        write_text(options.json, json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
