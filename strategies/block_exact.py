"""Block-exact: what block-causal attention makes final is kept, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from cachedit.text.state import DecodeState
from cachedit.text.strategy import StepPlan, TextStrategy


@dataclass(frozen=True)
class BlockExact(TextStrategy):
    """Keep the blocks that no longer change; the tokens are those of a decoding without a cache (ours).

    For models in which no token sees a block later than its own (LLaDA2, Fast-dLLM v2, SDAR). From the first block
    with a changed token on, everything is computed: the tokens of that block saw the old one. So on entering a block
    the one before is computed once more with its final tokens, in the same pass. Editing is covered: an edited token
    has changed.
    """

    block_causal: ClassVar[bool] = True

    @classmethod
    def trials(cls) -> Sequence[TextStrategy]:
        """The only setting."""
        return (cls(),)

    def plan(self, state: DecodeState) -> StepPlan:
        """All tokens from the first block with a changed one, or from the block that a row works on."""
        changed = torch.where(state.dirty, state.block_of, state.block[:, None]).amin(1)
        return StepPlan(state.block_of >= torch.minimum(changed, state.block)[:, None])
