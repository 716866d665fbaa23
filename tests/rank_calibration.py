"""What one of two processes does in the tests of calibrations that are shared; prints what it saw as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from painter import Painter, contents

from cachedit import ProfileError
from cachedit.calibration import calibrate

STRATEGIES = ("lemica", "ertacache", "cachequant", "hyca")


class Stop(BaseException):
    """Something that is no Exception, as Ctrl-C is none."""


def calibrated(name: str, pipe: Any = None, **options: Any) -> str:
    arguments = {"prompts": ["a sphere", "two cubes", "a cone"], "num_inference_steps": 9, **options}
    return contents(calibrate(pipe or Painter(), name, **arguments))


class Failing(Painter):
    """Fails in the fifth run of the process."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(self.prompts) == 4:
            raise self.error
        return super().__call__(*args, **kwargs)


def outcome(error: BaseException | None, path: Path) -> list[Any]:
    """How a calibration ends in which a rank fails, how many units are kept, and what it gives when resumed."""
    pipe = Painter() if error is None else Failing(error)
    try:
        calibrated("lemica", pipe, checkpoint=path)
    except BaseException as raised:
        ended = [type(raised).__name__, str(raised)]
    dist.barrier()
    kept = len([*path.glob("*.pt")])
    dist.barrier()
    return [*ended, kept, calibrated("lemica", checkpoint=path, resume=True)]


def main(rank: int, world: int, address: str, folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    pipes = {name: Painter() for name in STRATEGIES}
    told: list[Any] = []
    profiles = {
        name: calibrated(name, pipe, progress=lambda *now: told.append(now[:2])) for name, pipe in pipes.items()
    }
    seen = {
        "profiles": profiles,
        "runs": {name: len(pipe.prompts) for name, pipe in pipes.items()},
        "told": told,
        "failed": outcome([None, MemoryError("out of memory")][rank], folder / "failed"),
        "refused": outcome([None, ProfileError("zero features")][rank], folder / "refused"),
        "interrupted": outcome([KeyboardInterrupt(), None][rank], folder / "interrupted"),
        "stopped": outcome([None, Stop("now")][rank], folder / "stopped"),
    }
    dist.barrier()
    dist.destroy_process_group()
    return seen


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))))
