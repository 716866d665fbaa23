"""What one of two processes does in the test of a report that is shared; prints what it saw as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from test_demo import profile, tiny_pipeline

from cachedit.evaluate.compare import Configuration
from cachedit.evaluate.report import measure

STEPS = 4


class Counting:
    """The tiny pipeline, which tells how often it was called."""

    def __init__(self) -> None:
        self.pipe, self.runs = tiny_pipeline(), 0

    def count(self) -> None:
        call = type(self.pipe).__call__

        def counted(
            pipe: Any, prompt: Any = None, num_inference_steps: int = 50, generator: Any = None, **more: Any
        ) -> Any:
            self.runs += 1
            return call(pipe, prompt, num_inference_steps=num_inference_steps, generator=generator, **more)

        type(self.pipe).__call__ = counted  # type: ignore[method-assign]


def main(rank: int, world: int, address: str, folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    counting = Counting()
    counting.count()
    report = measure(
        counting.pipe,
        [Configuration("magcache", {"few_step_guard": False, "retention_ratio": 0.1}, profile())],
        ["red star", "blue moon", "red moon"],
        STEPS,
        folder=folder / "out",
        call_options={"height": 32, "width": 32},
    )
    report.write()
    dist.barrier()
    seen = {
        "runs": counting.runs,
        "strips": [shot.strip for shot in report.comparison.rows[1].shots],
        "files": sorted(path.name for path in (folder / "out").iterdir()),
        "processes": report.comparison.conditions["processes"],
    }
    dist.barrier()
    dist.destroy_process_group()
    return seen


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))))
