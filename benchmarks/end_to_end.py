"""What a step costs under a cache at the size of a real model, with random weights: no checkpoint is needed.

    python benchmarks/end_to_end.py [--device cpu] [--models NAME ...] [--strategies NAME ...] [--steps N] [--runs N]
                                    [--json FILE]

One run per class of strategies: plain reuse of the whole stack, a forecast from three residuals, a decision after the
first block, and the outputs of every attention and MLP. Every second step after the first three is computed; rho is the
time of a reused step over that of a computed one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from diffusers import FluxTransformer2DModel, WanTransformer3DModel
from hardware import conditions, device_of
from torch import nn

import cachedit
from cachedit.files import write_text
from cachedit.predictors import lagrange
from cachedit.strategy import Context, FeatureStrategy, Module, Site, Stack

WARMUP = 3
Inputs = dict[str, Any]


@dataclass(frozen=True)
class Alternate(FeatureStrategy, abstract=True):
    """Computes the first steps and then every second one, and reuses the whole stack."""

    def should_compute(self, ctx: Context) -> bool | str:
        return ctx.step < WARMUP or ctx.step % 2 == 0


@dataclass(frozen=True)
class Forecasting(Alternate, abstract=True):
    """The same with a forecast from three residuals."""

    history: ClassVar[int] = 3

    def weights(self, ctx: Context) -> Sequence[float]:
        return lagrange(ctx.computed_steps, ctx.step, order=2)


@dataclass(frozen=True)
class Probing(Alternate, abstract=True):
    """The same behind a first block that always runs and is listened to."""

    site: ClassVar[Site] = Stack(1)
    signal: ClassVar[str] = "first_blocks"


@dataclass(frozen=True)
class Modules(Alternate, abstract=True):
    """The same with the outputs of every attention and MLP."""

    @property
    def sites(self) -> tuple[Site, ...]:
        return Module("attn"), Module("mlp")


STRATEGIES: dict[str, FeatureStrategy] = {
    "reuse": Alternate(), "forecast of three": Forecasting(), "first block": Probing(), "modules": Modules(),
}  # fmt: skip


def flux(device: torch.device) -> tuple[nn.Module, Inputs]:
    """FLUX.1 at 1024 x 1024: 4096 image and 512 text tokens, 12 billion parameters."""
    real = device.type == "cuda"
    side, text, width = (64, 512, 4096) if real else (8, 16, 64)
    size = {} if real else {
        "num_layers": 2, "num_single_layers": 4, "attention_head_dim": 32, "num_attention_heads": 4,
        "joint_attention_dim": width, "pooled_projection_dim": 768, "axes_dims_rope": (8, 12, 12),
    }  # fmt: skip
    ids = torch.zeros(side, side, 3, device=device)
    ids[..., 1], ids[..., 2] = torch.arange(side, device=device)[:, None], torch.arange(side, device=device)
    inputs = {
        "hidden_states": torch.randn(1, side * side, 64, device=device),
        "encoder_hidden_states": torch.randn(1, text, width, device=device),
        "pooled_projections": torch.randn(1, 768, device=device),
        "img_ids": ids.reshape(-1, 3), "txt_ids": torch.zeros(text, 3, device=device),
    }  # fmt: skip
    if real:
        inputs["guidance"] = torch.full((1,), 3.5, device=device)
    return FluxTransformer2DModel(in_channels=64, guidance_embeds=real, **size), inputs


def wan(device: torch.device, heads: int, depth: int, ffn: int, height: int, width: int) -> tuple[nn.Module, Inputs]:
    """Wan 2.1 with 81 frames: 21 latent ones of that height and width."""
    frames, text = (21, 512) if device.type == "cuda" else (3, 16)
    model = WanTransformer3DModel(num_attention_heads=heads, attention_head_dim=128, num_layers=depth, ffn_dim=ffn)
    inputs = {
        "hidden_states": torch.randn(1, 16, frames, height, width, device=device),
        "encoder_hidden_states": torch.randn(1, text, 4096, device=device),
    }
    return model, inputs


MODELS: dict[str, Callable[[torch.device], tuple[nn.Module, Inputs]]] = {
    "flux": flux,
    "wan-1.3b": lambda device: (
        wan(device, 12, 30, 8960, 60, 104) if device.type == "cuda" else wan(device, 1, 3, 256, 8, 8)
    ),
    "wan-14b": lambda device: (
        wan(device, 40, 40, 13824, 90, 160) if device.type == "cuda" else wan(device, 2, 4, 512, 8, 8)
    ),
}


def build(name: str, device: torch.device) -> tuple[nn.Module, Inputs]:
    """A model with random weights, made where it stays: in bf16 on a GPU, in fp32 on a CPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    with device:
        torch.set_default_dtype(dtype)
        try:
            model, inputs = MODELS[name](device)
        finally:
            torch.set_default_dtype(torch.float32)
    floating = {key: x.to(dtype) if key != "img_ids" and key != "txt_ids" else x for key, x in inputs.items()}
    return model.eval(), floating


@torch.no_grad()
def steps_of(model: nn.Module, inputs: Inputs, device: torch.device, steps: int, runs: int) -> list[float]:
    """Milliseconds of every step of the last of some runs."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    scale = 1000.0 if isinstance(model, WanTransformer3DModel) else 1.0
    times: list[float] = []
    for _ in range(runs):
        times = []
        for step in range(steps):
            moment = torch.full((1,), scale * (1 - step / steps), device=device)
            wait()
            begin = time.perf_counter()
            model(**inputs, timestep=moment, return_dict=False)
            wait()
            times.append(1e3 * (time.perf_counter() - begin))
    return times


def row_of(
    name: str, label: str, model: nn.Module, inputs: Inputs, device: torch.device, steps: int, runs: int
) -> dict[str, Any]:
    """One strategy on one model."""
    cachedit.wrap(model, STRATEGIES[label], num_inference_steps=steps)
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    times = steps_of(model, inputs, device, steps, runs)
    run = cachedit.last_run(model)
    assert run is not None
    computed = [ms for ms, step in zip(times, run.steps, strict=True) if step.computed]
    reused = [ms for ms, step in zip(times, run.steps, strict=True) if not step.computed]
    found = {
        "model": name, "strategy": label, "t_computed_ms": statistics.median(computed),
        "t_reused_ms": statistics.median(reused), "rho": statistics.median(reused) / statistics.median(computed),
        "cache_bytes": run.cache_bytes_peak, "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
    }  # fmt: skip
    cachedit.unwrap(model)
    return found


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    titles = ("model", "strategy", "t_full ms", "t_computed ms", "t_reused ms", "rho %", "cache MB", "peak MB")
    lines = ["| " + " | ".join(titles) + " |", "|---|---|" + "---:|" * (len(titles) - 2)]
    for row in rows:
        numbers = [row["t_full_ms"], row["t_computed_ms"], row["t_reused_ms"], 100 * row["rho"]]
        numbers += [row["cache_bytes"] / 1e6, (row["peak_bytes"] or 0) / 1e6]
        lines.append(f"| {row['model']} | {row['strategy']} | " + " | ".join(f"{x:.3g}" for x in numbers) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: small models in fp32")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--runs", type=int, default=2, metavar="N", help="runs of each, of which the last is timed")
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="steps of a run, at least 6")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write conditions and rows here")
    options = parser.parse_args(arguments)
    if options.steps < 6 or options.runs < 1:
        parser.error(f"--steps {options.steps}, --runs {options.runs}: at least 6, so that some are reused, and 1")
    torch.set_num_threads(1)
    device, rows = device_of(options.device), list[dict[str, Any]]()
    for name in options.models:
        print(f"{name} ...", file=sys.stderr, flush=True)
        model, inputs = build(name, device)
        full = statistics.median(steps_of(model, inputs, device, 3, options.runs))
        for label in options.strategies:
            row = row_of(name, label, model, inputs, device, options.steps, options.runs)
            rows.append({"t_full_ms": full, **row})
        del model
        if device.type == "cuda":
            torch.cuda.empty_cache()
    found = conditions(device)
    print("\n".join(f"- {name}: {value}" for name, value in found.items()) + "\n\n" + table(rows))
    if options.json:
        write_text(options.json, json.dumps({"conditions": found, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
