"""Fast-dLLM: one full pass per block, then only the block, or the block and what lies behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from cachedit.strategies.checks import check_choice
from cachedit.text.state import DecodeState
from cachedit.text.strategy import StepPlan, TextStrategy


@dataclass(frozen=True)
class FastDLLM(TextStrategy):
    """Compute everything at the first step of a block, and a part of it at the others (arXiv 2505.22618).

    The paper decodes with a threshold on the confidence beside it: ``generate(..., threshold=0.9)``.

    cache: "prefix" keeps what lies before the block; "dual" also the masked tokens behind it.
    """

    cache: Literal["prefix", "dual"] = "prefix"

    paper: ClassVar[str] = "arXiv 2505.22618"

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range.
        """
        check_choice(self, "cache", ("prefix", "dual"))

    @classmethod
    def trials(cls) -> Sequence[TextStrategy]:
        """Both caches."""
        return cls("prefix"), cls("dual")

    def plan(self, state: DecodeState) -> StepPlan:
        """Everything on entering a block."""
        part = state.in_block if self.cache == "dual" else state.from_block
        return StepPlan(part | (state.block_step == 0)[:, None])
