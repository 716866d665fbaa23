"""What one of several ranks does that share the tokens of a model and draw the same runs; prints its decisions as JSON.

Inside every block all ranks talk to each other, so that ranks which disagree would wait for each other for ever. Their
tokens differ in how fast they move, so that each would decide otherwise if it heard its own alone.
"""

from __future__ import annotations

import json
import random
import sys
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from conftest import FLAT, record_of
from torch import nn

import cachedit

WIDTH, TOKENS = 8, 4
STRATEGIES: dict[str, Any] = {
    "first_block_cache": lambda draw: {"threshold": draw.uniform(0.02, 0.6)},
    "tea_cache": lambda draw: {"threshold": draw.uniform(0.05, 0.8)},
    "easy_cache": lambda draw: {"threshold": draw.uniform(0.05, 0.8)},
    "dbcache": lambda draw: {"front": 1, "back": 1, "warmup": 1, "threshold": draw.uniform(0.05, 0.6)},
    "di_cache": lambda draw: {"threshold": draw.uniform(0.05, 0.8)},
    "mag_cache": lambda draw: {"profile": FLAT},
}


class Attention(nn.Module):
    """Mixes tokens with the mean over the tokens of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Talk to the other ranks."""
        mean = x.mean(1, keepdim=True)
        every = [torch.empty_like(mean) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mean)
        return self.linear(x + torch.stack(every).mean(0))


class Block(nn.Module):
    """A residual block whose attention sees the input scaled by time."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """Add what attention gives."""
        return x + torch.tanh(self.attn(x * (1 + time)))


class Model(nn.Module):
    """Four blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])

    def forward(self, x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        """Call the blocks one after the other."""
        for block in self.blocks:
            x = block(x, timestep)
        return x


def decide(model: nn.Module, draw: random.Random, rank: int) -> dict[str, Any]:
    """Wrap anew, run one random schedule, perhaps not to its end; every rank draws the same."""
    name = draw.choice(list(STRATEGIES))
    options = STRATEGIES[name](draw)
    steps = draw.randint(5, 20)
    times = sorted((draw.uniform(0.01, 1.0) for _ in range(steps)), reverse=True)
    made = steps if draw.random() < 0.8 else draw.randint(1, steps)
    moves, noise = draw.uniform(0.2, 3.0), torch.Generator().manual_seed(draw.randrange(1000))
    every = torch.randn(dist.get_world_size(), 1, TOKENS, WIDTH, generator=noise)
    cachedit.wrap(model, name, timesteps=times, few_step_guard=False, process_group=dist.group.WORLD, **options)
    x = every[rank]
    for time in times[:made]:
        x = x - 0.1 * moves * (rank + 0.2) * model(x, torch.tensor(time))
    return {"strategy": name, "strip": record_of(model).strip(), "steps": steps}


def main(rank: int, world: int, address: str, runs: str) -> list[dict[str, Any]]:
    """All runs of this rank."""
    torch.set_num_threads(1)
    patience = timedelta(seconds=30)  # ranks that disagree wait for each other
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world, timeout=patience)
    torch.manual_seed(0)
    model, draw = Model().eval(), random.Random(0)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seen = [decide(model, draw, rank) for _ in range(int(runs))]
    dist.barrier()
    dist.destroy_process_group()
    return seen


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])))
