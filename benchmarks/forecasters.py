"""Our forecasts against cache-dit's Taylor-2, on the models and the schedule of peers.py.

    python benchmarks/forecasters.py [--json FILE]

All forecast the skipped residual from the last three computed ones and run the first block afresh. Reported is the
relative L2 error of the final latent against the uncached run; no times are taken, so nothing here has noise.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from peer_methods import Masked, Method, cache_dit, cachedit_by_hand, uncached
from peer_models import MASK, MODELS, SIZES, STEPS, Setup
from peers import run

from cachedit.files import write_text
from cachedit.predictors import bdf2, lagrange, taylor
from cachedit.strategy import Context, Stack

PREDICTORS: dict[str, Callable[[Sequence[float], float], list[float]]] = {
    "divided differences": partial(lagrange, order=2),
    "Taylor-2": partial(taylor, order=2),
    "BDF2": bdf2,
}


@dataclass(frozen=True)
class Forecast(Masked, abstract=True):
    """Computes the marked steps and forecasts from the newest three, behind a first block that always runs."""

    predictor: str = ""

    history: ClassVar[int] = 3
    site: ClassVar[Stack] = Stack(1, None)

    def weights(self, ctx: Context) -> Sequence[float]:
        """Those of the predictor, over the step index."""
        return PREDICTORS[self.predictor](ctx.computed_steps, ctx.step)


METHODS: dict[str, Callable[[Setup], Method]] = {
    "plain reuse": cachedit_by_hand,
    **{name: partial(cachedit_by_hand, strategy=Forecast(predictor=name)) for name in PREDICTORS},
    "cache-dit Taylor-2": partial(cache_dit, first_blocks=1, taylor_order=2),
}


@torch.no_grad()
def error(setup: Setup, method: Method, truth: torch.Tensor) -> float:
    """Relative L2 error of the final latent, in the second run of a method."""
    for _ in range(2):
        method.begin()
        latent = run(setup, method, lambda step, inputs: method.denoise(**inputs))
    return float((latent - truth).norm() / truth.norm())


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    print("| model | size | " + " | ".join(METHODS) + " |\n|---|---|" + "---:|" * len(METHODS))
    for name, make in MODELS.items():
        for size in SIZES:
            setup = make(size)
            with torch.no_grad():
                plain = uncached(setup)
                truth = run(setup, plain, lambda step, inputs, plain=plain: plain.denoise(**inputs))
            errors = {method: error(setup, build(setup), truth) for method, build in METHODS.items()}
            rows.append({"model": name, "size": size, **errors})
            print(f"| {name} | {size} | " + " | ".join(f"{value:.2e}" for value in errors.values()) + " |", flush=True)
    print(f"\nschedule {MASK}, {STEPS} Euler steps, random weights, float32")
    if options.json:
        write_text(options.json, json.dumps({"schedule": MASK, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
