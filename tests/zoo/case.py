"""What a test needs to know about one tiny denoiser, and a counter of the blocks that really ran."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

Inputs = Callable[[int, int], dict[str, Any]]
Time = Callable[[float, int], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A tiny denoiser of one family with everything needed to call it at a noise level.

    name:    key in ``CASES``.
    build:   makes the model: equal non-trivial weights each time, eval mode.
    inputs:  (seed, batch) -> keyword arguments of forward without the timestep; row i depends on seed + i alone.
    time:    (sigma in [0, 1], batch) -> the timestep argument in the family's own name, scale and direction.
    stack:   names of the block lists that a whole-stack cache covers, in execution order. Latte alone alternates.
    control: (seed, batch) -> extra arguments that make something be added between blocks.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Inputs
    time: Time
    stack: tuple[str, ...]
    control: Inputs | None = None

    @torch.no_grad()
    def call(self, model: nn.Module, sigma: float = 0.5, seed: int = 0, batch: int = 1, **extra: Any) -> torch.Tensor:
        """Run ``model`` once at noise level ``sigma`` and return its prediction ``[batch, ...]``.

        Entries of ``extra`` are passed on to forward; they replace inputs of the same name.
        """
        output = model(**{**self.inputs(seed, batch), **self.time(sigma, batch), **extra})
        output = output if isinstance(output, torch.Tensor) else output[0]
        return torch.stack(output) if isinstance(output, list) else output

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """List all blocks of the stack, list after list."""
        return [block for name in self.stack for block in getattr(model, name)]


@dataclass
class BlockCount:
    """How often each block ran: ``per_block`` in the order of ``Case.blocks``."""

    per_block: list[int] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Executions of all blocks together."""
        return sum(self.per_block)

    def clear(self) -> None:
        """Start counting from zero again."""
        self.per_block[:] = [0] * len(self.per_block)


@contextmanager
def count_blocks(model: nn.Module, case: Case) -> Iterator[BlockCount]:
    """Count real executions of every block of the stack; the hooks are gone on exit."""
    blocks = case.blocks(model)
    count = BlockCount([0] * len(blocks))

    def counter(index: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            count.per_block[index] += 1

        return hook

    handles = [block.register_forward_pre_hook(counter(index)) for index, block in enumerate(blocks)]
    try:
        yield count
    finally:
        for handle in handles:
            handle.remove()


def thousands(sigma: float, batch: int) -> dict[str, Any]:
    """Float timestep from 1000 (noise) to 0: SD3, Wan, LTX, HunyuanVideo, Sana."""
    return {"timestep": torch.full((batch,), 1000.0 * sigma)}


def discrete(sigma: float, batch: int) -> dict[str, Any]:
    """Integer timestep from 999 (noise) to 0: DiT, PixArt, CogVideoX, CogView4, Latte, Allegro."""
    return {"timestep": torch.full((batch,), round(999 * sigma), dtype=torch.long)}


def unit(sigma: float, batch: int) -> dict[str, Any]:
    """Timestep from 1 (noise) to 0: Flux, Flux2, Chroma, QwenImage, AuraFlow."""
    return {"timestep": torch.full((batch,), sigma)}


def ascending_unit(sigma: float, batch: int) -> dict[str, Any]:
    """Timestep from 0 (noise) to 1: Lumina2."""
    return {"timestep": torch.full((batch,), 1.0 - sigma)}


def ascending_thousands(sigma: float, batch: int) -> dict[str, Any]:
    """Timestep from 0 (noise) to 1000: Mochi."""
    return {"timestep": torch.full((batch,), 1000.0 * (1.0 - sigma))}
