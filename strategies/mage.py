"""MAGE: the first step of a block tells which keys the rest of it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from cachedit.strategies.checks import check_count
from cachedit.text.commit import leading
from cachedit.text.listening import LayerView
from cachedit.text.state import DecodeState
from cachedit.text.strategy import StepPlan, TextStrategy


@dataclass(frozen=True)
class MAGE(TextStrategy):
    """Read, per layer and key head, only what the block read most at its first step (arXiv 2602.14209).

    keys: that are read beside the block itself (paper: 512).
    """

    keys: int = 512

    paper: ClassVar[str] = "arXiv 2602.14209"
    listens: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range.
        """
        check_count(self, "keys")

    def plan(self, state: DecodeState) -> StepPlan:
        """Everything on entering a block, then the block."""
        return StepPlan(state.in_block | (state.block_step == 0)[:, None])

    def reads(self, view: LayerView) -> torch.Tensor | None:
        """The block and the chosen keys, bool [N, Hk, W]."""
        state, rows, width = view.state, view.rows, view.keys.shape[2]
        block, heads = state.in_block[rows, :width], view.keys.shape[1]
        kept = state.notes.setdefault(view.layer, state.masked[:, None].repeat(1, heads, 1))
        start = state.block_step[rows] == 0
        if bool(start.any()):
            mine = block.gather(1, view.slots)[:, None, :, None]
            mass = (view.weights() * mine).sum(2).unflatten(1, (heads, -1)).sum(2).flatten(0, 1)
            outside = ((state.seen & state.window)[rows, :width] & ~block).repeat_interleave(heads, 0)
            best = leading(mass, outside, torch.full_like(rows, self.keys).repeat_interleave(heads))
            best = best.unflatten(0, (-1, heads))
            kept[rows, :, :width] = torch.where(start[:, None, None], best, kept[rows, :, :width])
        return None if bool(start.all()) else kept[rows, :, :width] | block[:, None] | start[:, None, None]
