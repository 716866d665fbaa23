"""What one of two processes does that share the tokens of a diffusers model; prints what it saw as JSON."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from conftest import FLAT, SIGMAS, record_of
from diffusers import ContextParallelConfig

import cachedit
from cachedit import Profile
from zoo.models import CASES, Case

LISTENED = Profile(
    arrays={"indicator_polynomial": {"all": [0.0, 0.0, 0.0, 1.0, 0.0]}}, axes={"indicator_polynomial": ["power"]}
)
STATIC: dict[str, dict[str, Any]] = {"magcache": {"profile": FLAT}, "taylorseer": {}, "fora": {}}
LISTENING: dict[str, dict[str, Any]] = {
    "first_block_cache": {},
    "easycache": {"threshold": 0.3},
    "teacache": {"threshold": 0.5, "profile": LISTENED},
}
THRESHOLDS = {"flux": 0.388, "wan": 0.24}
"""Of FirstBlockCache, between what each rank hears of its own tokens at step 2: 0.384 and 0.401, 0.260 and 0.236.

Flux divides its tokens at its root, Wan at its first block.
"""


def outputs(case: Case, name: str, order: str) -> tuple[list[torch.Tensor], str]:
    """What a run of ten steps gives, in which half of the tokens rest, and its strip."""
    model = case.build()
    options = {**STATIC, **LISTENING}[name]
    if name == "first_block_cache":
        options = {"threshold": THRESHOLDS[case.name]}
    if order == "parallel, then wrapped":
        model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))
    cachedit.wrap(model, name, num_inference_steps=len(SIGMAS), **options)
    if order == "wrapped, then parallel":
        model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))
    x = case.inputs(0, 1)["hidden_states"]
    along = 1 if x.ndim == 3 else 2  # tokens [B, N, C], or frames of [B, C, F, H, W]
    count = x.shape[along]
    moves = (torch.arange(count) > (count - 1) // 2).reshape([-1 if k == along else 1 for k in range(x.ndim)])
    found = [case.call(model, sigma, hidden_states=x * (1 + 2 * sigma * moves), return_dict=False) for sigma in SIGMAS]
    return found, record_of(model).strip()


def main(rank: int, world: int, address: str) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    torch.accelerator.device_count = lambda: 1  # diffusers divides by it, and on a machine without one it is 0
    patience = timedelta(seconds=30)  # ranks that disagree wait for each other
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world, timeout=patience)
    seen = []
    for case in map(CASES.__getitem__, THRESHOLDS):
        for name in (*STATIC, *LISTENING):
            whole, strip = outputs(case, name, "alone")
            for order in ("wrapped, then parallel", "parallel, then wrapped"):
                shared, found = outputs(case, name, order)
                error = max(float((a - b).abs().max()) for a, b in zip(whole, shared, strict=True))
                seen.append(
                    {"model": case.name, "strategy": name, "order": order, "alone": strip, "shared": found}
                    | {"error": error}
                )
    dist.barrier()
    dist.destroy_process_group()
    return seen


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))
