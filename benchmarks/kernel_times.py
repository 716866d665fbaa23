"""The kernel benchmark itself: passes by counting, times by the clock of the device, one row per case."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from hardware import conditions, device_of
from kernel_cases import Case, Inputs, cases
from traffic import traffic

from cachedit.files import write_text

TURNS = 512 * 2**20  # bytes of arguments that take turns, so that no cache of the device holds them
SETS, REPLAYS, QUANTILES = 8, 30, (20, 50, 80)
Times = dict[str, float]


def quantiles(samples: Sequence[float]) -> Times:
    """Some quantiles of times in ms."""
    cuts = statistics.quantiles(samples, n=100, method="inclusive")
    return {f"p{q}": cuts[q - 1] for q in QUANTILES}


@torch.no_grad()
def time_cuda(run: Callable[..., Any], sets: Sequence[Inputs]) -> Times:
    """Times of one call inside a CUDA graph over all sets: what the device needs, without the host's launches."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # compile and allocate before the capture
        for _ in range(3):
            for given in sets:
                run(*given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for given in sets:
            run(*given)
    samples = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) / len(sets))
    return quantiles(samples)


@torch.no_grad()
def time_cpu(run: Callable[..., Any], sets: Sequence[Inputs]) -> Times:
    """CPU times of one call on this thread."""
    samples: list[float] = []
    until = time.perf_counter() + 0.5
    for given in sets:
        run(*given)
    while time.perf_counter() < until or len(samples) < 10:
        for given in sets:
            begin = time.thread_time_ns()
            run(*given)
            samples.append((time.thread_time_ns() - begin) / 1e6)
    return quantiles(samples)


def row_of(case: Case, device: torch.device, timed: bool, compiled: bool, copy_rate: float) -> dict[str, Any]:
    """Everything about one case."""
    given = case.inputs(device)
    unit = case.unit(given)
    ours, eager = (traffic(lambda form=form: form(*given)) for form in (case.ours, case.eager))
    row: dict[str, Any] = {
        "op": case.op, "model": case.model, "shape": case.shape, "passes": round(ours.moved / unit, 2),
        "floor": round(case.floor, 2), "eager_passes": round(eager.moved / unit, 2), "launches": ours.launches,
        "eager_launches": eager.launches, "floor_bytes": int(unit * case.floor),
    }  # fmt: skip
    if not timed:
        return row
    count = min(SETS, max(2, -(-TURNS // max(ours.moved, 1)))) if device.type == "cuda" else 2
    sets = [given] + [case.inputs(device) for _ in range(count - 1)]
    clock = time_cuda if device.type == "cuda" else time_cpu
    row["ms"], row["eager_ms"] = clock(case.ours, sets), clock(case.eager, sets)
    if compiled:
        torch._dynamo.reset()
        row["compiled_ms"] = clock(torch.compile(case.eager), sets)
    if copy_rate:
        row["floor_ms"] = row["floor_bytes"] / copy_rate / 1e6
        row["share_of_copy"] = row["floor_ms"] / row["ms"]["p50"]
    return row


def copy_rate_of(device: torch.device) -> float:
    """GB/s that a plain copy reads and writes."""
    source, target = (torch.empty(2**29, dtype=torch.bfloat16, device=device) for _ in range(2))
    return 2 * source.nbytes / 1e6 / time_cuda(target.copy_, [(source,)])["p50"]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows in Markdown; times in microseconds."""
    titles = (
        "op", "model", "passes", "floor", "eager passes", "launches", "eager launches", "us", "eager us", "compiled us",
        "floor us", "% of copy",
    )  # fmt: skip
    lines = ["| " + " | ".join(titles) + " |", "|---|---|" + "---:|" * (len(titles) - 2)]
    for row in rows:
        times = [row[name]["p50"] if name in row else None for name in ("ms", "eager_ms", "compiled_ms")]
        cells = [
            row["op"], row["model"],
            *(f"{row[name]:g}" for name in ("passes", "floor", "eager_passes", "launches", "eager_launches")),
            *("-" if ms is None else f"{1e3 * ms:.1f}" for ms in (*times, row.get("floor_ms"))),
            f"{100 * row['share_of_copy']:.0f}" if "share_of_copy" in row else "-",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(prog="benchmarks/kernels.py", description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: small sizes, and only counts")
    parser.add_argument("--times", action="store_true", help="take times on the CPU, too")
    parser.add_argument("--compile", action="store_true", help="on the CPU, add the eager form under torch.compile")
    parser.add_argument("--full", action="store_true", help="on the CPU, the sizes of real models; needs memory")
    parser.add_argument("--only", nargs="+", metavar="OP", help="these operations")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write conditions and rows here")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write if asked to."""
    options = parse(arguments)
    torch.set_num_threads(1)
    device, cuda = device_of(options.device), options.device == "cuda"
    copy_rate = copy_rate_of(device) if cuda else 0.0
    rows = []
    for case in cases(small=not cuda and not options.full):
        if options.only and case.op not in options.only:
            continue
        rows.append(row_of(case, device, cuda or options.times, cuda or options.compile, copy_rate))
        if cuda:
            torch.cuda.empty_cache()
    found = conditions(device) | ({"copy GB/s": round(copy_rate)} if cuda else {})
    print("\n".join(f"- {name}: {value}" for name, value in found.items()) + "\n")
    print(table(rows))
    if options.json:
        write_text(options.json, json.dumps({"conditions": found, "rows": rows}, indent=1) + "\n")
