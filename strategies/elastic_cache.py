"""Elastic-Cache: once the attention of the most attended tokens drifts, the deeper layers compute everything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.nn import functional

from cachedit.strategies.checks import check_count
from cachedit.text.commit import leading
from cachedit.text.listening import LayerView
from cachedit.text.state import DecodeState
from cachedit.text.strategy import StepPlan, TextStrategy


@dataclass(frozen=True)
class ElasticCache(TextStrategy):
    """Compute a sliding window of masks; refresh from the layer on where attention drifts (arXiv 2510.14973).

    In every layer the decided tokens that the window attends to most are watched: if their own attention is less like
    that of the step before than ``limit``, all layers behind compute every token. Likeness is the cosine over the keys,
    mean over heads and watched tokens.

    window:  masked tokens from the left that are computed and may be decided, whatever their block (paper: 16).
    limit:   cosine below which is refreshed (paper: 0.9); below -1 never, above 1 always.
    watched: tokens that are watched per layer (paper: 1).
    """

    window: int = 16
    limit: float = 0.9
    watched: int = 1

    paper: ClassVar[str] = "arXiv 2510.14973"
    listens: ClassVar[bool] = True
    grows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range.
        """
        check_count(self, "window", "watched", lowest=1)
        if isinstance(self.limit, bool) or not isinstance(self.limit, (int, float)):
            raise ValueError(f"ElasticCache limit={self.limit!r}; allowed: a number")

    def candidates(self, state: DecodeState) -> torch.Tensor:
        """The first masked tokens."""
        return state.masked & (state.masked.cumsum(1) <= self.window)

    def plan(self, state: DecodeState) -> StepPlan:
        """Everything at the first step; then the window and what any layer watches."""
        watched = torch.zeros_like(state.masked)
        for (kind, _, row), noted in state.notes.items():
            if kind == "layer":
                watched[row] |= noted["watched"]
        return StepPlan(self.candidates(state) | watched | (state.step == 0)[:, None])

    def reads(self, view: LayerView) -> None:
        """Compare the attention of the watched tokens with that of the step before, and watch anew."""
        state, row, width = view.state, int(view.rows), view.keys.shape[2]
        noted: dict[str, Any] = state.notes.setdefault(("layer", view.layer, row), {})
        if "queries" not in noted:
            noted["queries"] = view.queries.new_zeros(
                *view.queries.shape[:2], *state.ids.shape[1:], view.queries.shape[3]
            )
        noted["queries"].index_copy_(2, view.slots[0], view.queries)
        noted["drifted"] = False
        if "watched" in noted:
            now = view.weights(noted["queries"][:, :, noted["watched"]])
            alike = functional.cosine_similarity(now, noted["attention"], dim=-1).mean()
            noted["drifted"] = float(alike) < self.limit
        asking = self.candidates(state)[row][view.slots[0]]
        mass = view.weights(view.queries[:, :, asking]).sum((1, 2))[0]  # [W]
        decided = (~state.masked & state.seen)[row, :width]
        best = leading(mass[None], decided[None], torch.full_like(view.rows, self.watched))[0]
        noted["watched"] = functional.pad(best, (0, state.ids.shape[1] - width))
        noted["attention"] = view.weights(noted["queries"][:, :, noted["watched"]])

    def grows_after(self, view: LayerView) -> bool:
        """Whether the attention of this layer has drifted."""
        return bool(view.state.notes["layer", view.layer, int(view.rows)]["drifted"])
