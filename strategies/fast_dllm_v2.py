"""Fast-dLLM v2: finished blocks are final, and inside a block a part of it is decoded at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from cachedit.strategies.checks import check_count
from cachedit.text.state import LAST, DecodeState
from cachedit.text.strategy import StepPlan, TextStrategy


@dataclass(frozen=True)
class FastDLLMV2(TextStrategy):
    """Keep finished blocks exactly, and decode a block in parts that see the rest of it stale (arXiv 2509.26328).

    For block-causal models. The whole block is computed on entering it, and whenever the first token of a part is still
    masked; all other steps compute the part alone. With a part as long as the block nothing is approximate.

    part: tokens of a block that are decoded before the next ones (paper: 8 of 32).
    """

    part: int = 8

    paper: ClassVar[str] = "arXiv 2509.26328"
    block_causal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range.
        """
        check_count(self, "part", lowest=1)

    def candidates(self, state: DecodeState) -> torch.Tensor:
        """The masked tokens of the first part that has any."""
        return state.masked & self._part(state)

    def plan(self, state: DecodeState) -> StepPlan:
        """The part, or the block with it; and what an earlier block that has just been finished made wrong."""
        part = self._part(state)
        first = part & (part.cumsum(1) == 1)
        whole = (first & state.masked).any(1) | (state.block_step == 0)
        earlier = state.dirty & (state.block_of < state.block[:, None])
        changed = torch.where(earlier, state.block_of, LAST).amin(1)
        finished = (state.block_of >= changed[:, None]) & (state.block_of < state.block[:, None])
        return StepPlan(finished | part | (state.in_block & whole[:, None]))

    def _part(self, state: DecodeState) -> torch.Tensor:
        """All tokens of the part that a row works on."""
        place = (state.in_block.cumsum(1) - 1) // self.part
        current = torch.where(state.masked & state.in_block, place, LAST).amin(1, keepdim=True)
        return state.in_block & (place == current)
