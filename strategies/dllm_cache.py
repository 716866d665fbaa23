"""dLLM-Cache: whole features are kept, the prompt's long and the answer's until their values turn."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from cachedit.strategies.checks import check_count, check_number
from cachedit.text.state import PROMPT_AGE, DecodeState
from cachedit.text.strategy import LayerPlan, TextStrategy


@dataclass(frozen=True)
class DllmCache(TextStrategy):
    """Keep what attention and feed-forward of every token gave, and refresh what changes most (arXiv 2506.06295).

    Between refreshes the values of the answer are computed in every layer, and the tokens whose values have turned most
    are computed whole. The first layer is always computed. Tokens that were just decided are always among those that
    are computed, which the paper does not ask for.

    prompt_interval: steps between refreshes of the prompt (paper: 10 to 100).
    answer_interval: steps between refreshes of the answer (paper: 1 to 8).
    share:           of the answer that is computed between refreshes (paper: 0.25).
    """

    prompt_interval: int = 50
    answer_interval: int = 7
    share: float = 0.25

    paper: ClassVar[str] = "arXiv 2506.06295"
    by_layer: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range.
        """
        check_count(self, "prompt_interval", "answer_interval", lowest=1)
        check_number(self, "share", highest=1)

    def layer_plan(self, state: DecodeState, row: int, layer: int) -> LayerPlan:
        """Whatever is due for a refresh, and of the answer else the share that has turned most."""
        step = int(state.step[row])
        answer = (state.age[row] < PROMPT_AGE) & state.exists[row]
        prompt = ~answer & state.exists[row]
        prompt_due, answer_due = (
            layer == 0 or step % interval == 0 for interval in (self.prompt_interval, self.answer_interval)
        )
        compute = (prompt & prompt_due) | (answer & answer_due)
        count = 0 if answer_due else math.floor(self.share * int(answer.sum()))
        return LayerPlan(compute, answer, count)
