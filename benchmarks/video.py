"""Rolling out video over a ring of keys and values against computing the frames before every chunk again.

    python benchmarks/video.py [--quick] [--chunks N] [--repeats N] [--json FILE]

A random Wan model of 2.7 M parameters, 36 tokens per latent frame, chunks of 3 frames in 4 steps, one CPU thread.
Times are process CPU times per chunk, the least of several repeats that are taken in turn; a cached chunk includes its
commit. The baselines are the stock model under a block-causal mask, with clean frames at timestep 0: all of them, or
those of the window. They need no commit.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from hardware import conditions

from cachedit.files import write_text
from cachedit.video import PRESETS, Branch, CausalNetwork, Preset
from cachedit.video.noise import Noise
from cachedit.video.rollout import Rollout
from cachedit.video.sampling import few_steps

FRAME, TOKENS = (1, 4, 12, 12), 36  # latents of a frame [B, C, h, w], in patches of 2 x 2
CHUNK, WINDOW, SINK = 3, 12, 3
BASE = PRESETS["self-forcing"]
CACHED: dict[str, dict[str, Any]] = {
    "cached": {"window": 10_000},
    "cached, window": {"window": WINDOW, "sink": SINK},
    "cached, window, sink_shift": {"window": WINDOW, "sink": SINK, "rope": "sink_shift"},
    "cached, window, relative": {"window": WINDOW, "sink": SINK, "rope": "relative"},
    "cached, window, int8": {"window": WINDOW, "sink": SINK, "quant": "int8"},
    "cached, window, fp8": {"window": WINDOW, "sink": SINK, "quant": "fp8"},
}
RECOMPUTED = {"recompute all": None, "recompute window": WINDOW}


class Masked(WanAttnProcessor):
    """The stock processor under a mask, which is made once per chunk."""

    mask: torch.Tensor | None = None

    def __call__(self, attn: Any, x: Any, text: Any = None, mask: Any = None, rotary: Any = None) -> torch.Tensor:
        """Self-attention is masked, cross-attention is not."""
        return super().__call__(attn, x, text, self.mask if text is None else None, rotary)


def build() -> Any:
    """The model, seeded."""
    torch.manual_seed(0)
    return WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=4, attention_head_dim=48, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=32, ffn_dim=768, num_layers=4, rope_max_seq_len=128,
    ).eval()  # fmt: skip


def text() -> torch.Tensor:
    """A prompt of 32 tokens."""
    return torch.randn(1, 32, 16, generator=torch.Generator().manual_seed(1))


def cached(model: Any, chunks: int, preset: Preset) -> tuple[list[float], list[float], int]:
    """Milliseconds of every chunk with its commit, and to its frames alone, and bytes of the ring."""
    window = min(preset.window, CHUNK * chunks)
    options = {"window": window, "sink": preset.sink, "rope": preset.rope, "quant": preset.quant}
    with CausalNetwork(model).attached() as network:
        cache = network.cache((1, 4, 1, *FRAME[2:]), **options)
        source = Noise(torch.Generator().manual_seed(0), torch.device("cpu"), torch.float32)
        rollout = Rollout(network, [Branch(text(), cache)], preset, FRAME, source)
        whole, shown = [], []
        for _ in range(chunks):
            began = time.process_time()
            latents = rollout.make()
            shown.append(1000 * (time.process_time() - began))
            rollout.commit(latents)
            whole.append(1000 * (time.process_time() - began))
    return whole, shown, cache.nbytes


def recomputed(model: Any, chunks: int, window: int | None) -> list[float]:
    """Milliseconds of every chunk where the clean frames before it are computed again at every step."""
    source = Noise(torch.Generator().manual_seed(0), torch.device("cpu"), torch.float32)
    masked, prompt, times = Masked(), text(), []
    clean = torch.zeros(1, 4, 0, *FRAME[2:])
    stock = [block.attn1.processor for block in model.blocks]
    for block in model.blocks:
        block.attn1.set_processor(masked)
    for _ in range(chunks):
        began = time.process_time()
        before = clean if window is None else clean[:, :, -(window - CHUNK) :]
        count = (before.shape[2] + CHUNK) // CHUNK
        block = torch.arange(count).repeat_interleave(CHUNK * TOKENS)
        masked.mask = block[:, None] >= block[None]

        def predict(x: torch.Tensor, timesteps: Sequence[float], before: torch.Tensor = before) -> torch.Tensor:
            frames = torch.cat([before, x], 2)
            each = torch.zeros(1, frames.shape[2] * TOKENS)
            each[:, -CHUNK * TOKENS :] = timesteps[0]
            with torch.no_grad():
                return model(frames, each, prompt, return_dict=False)[0][:, :, -CHUNK:]

        latents = few_steps(BASE, source, source.draw((1, 4, CHUNK, *FRAME[2:])), predict)
        clean = torch.cat([clean, latents], 2)
        times.append(1000 * (time.process_time() - began))
    for block, processor in zip(model.blocks, stock, strict=True):
        block.attn1.set_processor(processor)
    return times


def memory(model: Any, chunks: int) -> dict[str, Any]:
    """Bytes of the ring, and most bytes of the process, in the tenth chunk and at the end of a long rollout."""
    preset = BASE.changed(window=WINDOW, sink=SINK, sigmas=(1.0,))
    marks = []
    with CausalNetwork(model).attached() as network:
        cache = network.cache((1, 4, 1, *FRAME[2:]), window=WINDOW, sink=SINK)
        source = Noise(torch.Generator().manual_seed(0), torch.device("cpu"), torch.float32)
        rollout = Rollout(network, [Branch(text(), cache)], preset, FRAME, source)
        for index in range(chunks):
            rollout.commit(rollout.make())
            if index in (9, chunks - 1):
                marks.append((rollout.made, cache.nbytes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
    first, last = marks[0], marks[-1]
    return {
        "frames": [mark[0] for mark in marks],
        "cache_bytes": [mark[1] for mark in marks],
        "process_bytes": [mark[2] for mark in marks],
        "flat": first[1] == last[1] and last[2] - first[2] < 2**25,
    }


def measure(chunks: int, repeats: int, long: int) -> dict[str, Any]:
    """All methods in turn, and what follows from them."""
    model = build()
    takes: dict[str, Callable[[], Any]] = {
        **{name: lambda o=options: cached(model, chunks, BASE.changed(**o)) for name, options in CACHED.items()},  # type: ignore[misc]
        **{name: lambda w=window: (recomputed(model, chunks, w),) for name, window in RECOMPUTED.items()},  # type: ignore[misc]
    }
    cached(model, 2, BASE), recomputed(model, 2, None)  # warm up
    runs: dict[str, list[Any]] = {name: [] for name in takes}
    for _ in range(repeats):
        for name, take in takes.items():
            runs[name].append(take())
    rows = {
        name: [min(times) for times in zip(*(run[0] for run in every), strict=True)] for name, every in runs.items()
    }
    shown = [min(times) for times in zip(*(run[1] for run in runs["cached, window"]), strict=True)]
    bytes_of = {name: every[0][2] for name, every in runs.items() if name in CACHED}
    total = {name: sum(times) for name, times in rows.items()}
    window = total["cached, window"]
    kept = memory(model, long)
    return {
        "speedup_total": total["recompute all"] / total["cached"],
        "speedup_last_chunk": rows["recompute all"][-1] / rows["cached"][-1],
        "speedup_vs_window": total["recompute window"] / window,
        "speedup_vs_window_last_chunk": rows["recompute window"][-1] / rows["cached, window"][-1],
        "memory_flat": kept["flat"],
        "memory": kept,
        "over_absolute": {name: total[name] / window for name in CACHED if "window," in name},
        "bytes_over_fp32": {
            name: size / bytes_of["cached, window"] for name, size in bytes_of.items() if "window," in name
        },
        "first_chunk_ms": {"before its commit": shown[0], "behind it": rows["cached, window"][0]},
        "rows": [
            {"method": name, "chunk_ms": times, "cache_bytes": bytes_of.get(name)} for name, times in rows.items()
        ],
    }


def show(found: dict[str, Any]) -> None:
    """Print a table of the chunks and the ratios."""
    count = len(found["rows"][0]["chunk_ms"])
    print("| ms per chunk | " + " | ".join(str(index + 1) for index in range(count)) + " | total |")
    print("|---|" + "---:|" * (count + 1))
    for row in found["rows"]:
        times = row["chunk_ms"]
        print(f"| {row['method']} | " + " | ".join(f"{x:.0f}" for x in times) + f" | {sum(times):.0f} |")
    print(f"\nagainst recomputing all: {found['speedup_total']:.2f}x, last chunk {found['speedup_last_chunk']:.2f}x")
    last = found["speedup_vs_window_last_chunk"]
    print(f"against recomputing the window: {found['speedup_vs_window']:.2f}x, last chunk {last:.2f}x")
    for name, ratio in found["over_absolute"].items():
        print(f"{name}: {ratio:.2f}x the time, {found['bytes_over_fp32'][name]:.2f}x the bytes of the fp32 window")
    first = found["first_chunk_ms"]
    print(
        f"first chunk: {first['before its commit']:.0f} ms to its frames, {first['behind it']:.0f} ms with its commit"
    )
    kept = found["memory"]
    print(f"memory flat: {found['memory_flat']} (frames {kept['frames']}, process bytes {kept['process_bytes']})")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 chunks, once: to see that it runs")
    parser.add_argument("--chunks", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    chunks, repeats, long = (4, 1, 20) if options.quick else (options.chunks, options.repeats, 334)
    found = measure(chunks, repeats, long)
    show(found)
    if options.json:
        setting = {
            **conditions(torch.device("cpu")),
            "threads": 1,
            "repeats": repeats,
            "clock": "CPU time of the process",
        }
        found = {"conditions": setting, **found}
        write_text(options.json, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
