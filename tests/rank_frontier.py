"""What one of two processes does in the test of a frontier that is shared; prints what it saw as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from painter import contents
from test_sweep import FEW_RUNS, Clockwork, measured

from cachedit.evaluate import sweep


def main(rank: int, world: int, address: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    clockwork, told = Clockwork(), []
    vars(sweep).update(FEW_RUNS, take=clockwork.take)
    profile = measured(progress=lambda *now: told.append(now[:2]))
    dist.barrier()
    dist.destroy_process_group()
    return {"profile": contents(profile), "runs": clockwork.taken, "told": told}


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))
