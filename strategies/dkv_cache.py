"""dKV-Cache: keys and values of a token are kept one step after it is decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from cachedit.strategies.checks import check_choice, check_count
from cachedit.text.state import PROMPT_AGE, DecodeState
from cachedit.text.strategy import StepPlan, TextStrategy

INTERVALS = 2, 4, 8, 16  # that a probe tries


@dataclass(frozen=True)
class DkvCache(TextStrategy):
    """Keep a decided token's keys and values once they are computed with its final id (arXiv 2505.15781).

    A token that was decided at a step is computed at the next one and then read from the cache.

    variant:  "decode":  every masked token is computed at every step, decided ones are kept;
              "prefill": only the prompt is kept, from the first step on, and never computed again;
              "pd":      the prompt is kept so, the answer as in "decode";
              "greedy":  only the tokens that this step and the last one decide, and ``window`` masked ones beside
                         them; takes an order that is drawn beforehand (``order="random"``).
    interval: every so many steps everything is computed, in "pd" the answer (paper: 8 for LLaDA, 4 for Dream, 2 for
              "greedy"); 1 always. "prefill" has no use for it.
    window:   masked tokens nearest to those that a step decides, of "greedy".
    """

    variant: Literal["decode", "greedy", "prefill", "pd"] = "decode"
    interval: int = 8
    window: int = 4

    paper: ClassVar[str] = "arXiv 2505.15781"

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range.
        """
        check_choice(self, "variant", ("decode", "greedy", "prefill", "pd"))
        check_count(self, "interval", lowest=1)
        check_count(self, "window")

    @classmethod
    def trials(cls) -> Sequence[TextStrategy]:
        """The prompt kept from the first step on, and all that is decided kept for some steps; or both."""
        aged = [cls(variant, interval) for variant in ("decode", "pd") for interval in INTERVALS]
        return cls("prefill"), *aged

    def plan(self, state: DecodeState) -> StepPlan:
        """What the variant computes, or at a refresh all that it ever computes."""
        answer = state.age < PROMPT_AGE
        if self.variant == "prefill":
            return StepPlan(answer)
        everything = answer if self.variant == "pd" else state.exists
        refresh = (state.step % self.interval == 0)[:, None]
        part = self._near(state) if self.variant == "greedy" else state.masked
        return StepPlan(part | (refresh & everything))

    @property
    def needs_foresight(self) -> bool:
        """Only a known order tells what the next tokens are."""
        return self.variant == "greedy"

    def _near(self, state: DecodeState) -> torch.Tensor:
        """What this step decides, and the masked tokens nearest to any of it; of two equally near ones the earlier."""
        assert state.planned is not None
        far, order = 2 * state.ids.shape[1], torch.arange(state.ids.shape[1], device=state.ids.device)
        before = torch.where(state.planned, order, -far).cummax(1).values
        behind = torch.where(state.planned, order, far).flip(1).cummin(1).values.flip(1)
        others = state.masked & ~state.planned
        away = torch.minimum(order - before, behind - order).masked_fill(~others, 2 * far)
        ranked = away.argsort(dim=1, stable=True)
        nearest = torch.zeros_like(others).scatter_(1, ranked[:, : self.window], True) & others
        return state.planned | nearest
