"""EntropyCache: what was just decided with doubt makes everything be computed anew."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from cachedit.strategies.checks import check_count, check_number
from cachedit.text.commit import leading
from cachedit.text.state import PROMPT_AGE, DecodeState
from cachedit.text.strategy import StepPlan, TextStrategy


@dataclass(frozen=True)
class EntropyCache(TextStrategy):
    """Compute the masks of the block and the newest tokens; all when an entropy was high (arXiv 2603.18489).

    The paper's code is not public and its numbers are not in the text that we have: both defaults are ours.

    limit:  entropy in nats; once a step decides a token with more, the next step computes everything.
    recent: so many of the last decided tokens stay fresh.
    """

    limit: float = 1.0
    recent: int = 8

    paper: ClassVar[str] = "arXiv 2603.18489"
    needs_entropy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range.
        """
        check_number(self, "limit")
        check_count(self, "recent")

    def plan(self, state: DecodeState) -> StepPlan:
        """Everything at first and after doubt; else the masks of the block and the newest tokens."""
        newest = torch.where(state.age == 0, state.entropy, 0).amax(1)
        refresh = (state.step == 0) | (newest > self.limit)
        decided = (state.age >= 0) & (state.age < PROMPT_AGE)
        fresh = leading(-state.age.double(), decided, torch.full_like(state.step, self.recent))
        return StepPlan((state.masked & state.in_block) | fresh | refresh[:, None])
