"""Sparse-dLLM: of what lies outside a block only the keys that matter to it are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn import functional

from cachedit.strategies.checks import check_count, check_number
from cachedit.text.commit import leading
from cachedit.text.listening import LayerView
from cachedit.text.state import DecodeState
from cachedit.text.strategy import StepPlan, TextStrategy


@dataclass(frozen=True)
class SparseDLLM(TextStrategy):
    """Compute a block over the keys that its queries scored highest, per layer (arXiv 2508.02558).

    The first two steps of a block compute everything; at the second one each layer scores the keys outside the block by
    the mean of the block's queries, smooths the scores over neighbours and keeps the best for the rest of the block.

    share: of the keys outside the block that is kept (paper: 0.5).
    width: neighbours over which scores are pooled by their maximum; odd (paper: 3).
    """

    share: float = 0.5
    width: int = 3

    paper: ClassVar[str] = "arXiv 2508.02558"
    listens: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range.
        """
        check_number(self, "share", highest=1)
        check_count(self, "width", lowest=1)
        if self.width % 2 == 0:
            raise ValueError(f"SparseDLLM width={self.width}; allowed: an odd integer")

    def plan(self, state: DecodeState) -> StepPlan:
        """Everything at two steps of a block, then the block."""
        return StepPlan(state.in_block | (state.block_step < 2)[:, None])

    def reads(self, view: LayerView) -> torch.Tensor | None:
        """The kept keys and the block, once they are chosen."""
        state, rows, width = view.state, view.rows, view.keys.shape[2]
        block = state.in_block[rows, :width]
        kept = state.notes.setdefault(view.layer, torch.ones_like(state.masked))
        step = state.block_step[rows]
        chosen = (step == 1)[:, None]
        if bool(chosen.any()):
            kept[rows, :width] = torch.where(chosen, self._best(view, block), kept[rows, :width])
        everything = step < 2
        return None if bool(everything.all()) else (kept[rows, :width] | block | everything[:, None])[:, None]

    def _best(self, view: LayerView, block: torch.Tensor) -> torch.Tensor:
        """The keys outside the block with the highest scores, [N, W]."""
        outside = (view.state.seen & view.state.window)[view.rows, : block.shape[1]] & ~block
        mine = block.gather(1, view.slots)[:, None, :, None]
        mean = (view.queries * mine).sum(2) / mine.sum(2)  # [N, H, D]
        keys = view.keys.repeat_interleave(mean.shape[1] // view.keys.shape[1], 1)
        score = torch.einsum("nhd,nhwd->nw", mean, keys) / mean.shape[1]
        # Pooled along the keys outside, without the block between them: gather them to the front, and back again.
        order = outside.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
        front = score.gather(1, order).masked_fill(~outside.gather(1, order), -torch.inf)
        pooled = functional.max_pool1d(front[:, None], self.width, 1, self.width // 2)[:, 0]
        back = torch.zeros_like(pooled).scatter_(1, order, pooled)
        return leading(back, outside, (self.share * outside.sum(1)).floor().long())
