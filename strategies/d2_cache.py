"""d2Cache: compute the masks that will soon be decided, and the tokens that attention flows through."""

from __future__ import annotations

import math
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
class D2Cache(TextStrategy):
    """Compute likely masks and the decided tokens of the highest attention rollout (arXiv 2509.23094).

    A mask is likely if the model was sure of it and if much is decided around it. The rollout multiplies the attention
    of all layers of the last step; ours sweeps it from the last layer down, which gives the same sums without a matrix
    product per layer. The tokens of a block are decided before those of the next.

    masks: masked tokens that are computed (paper: 32).
    share: of the rollout's mass, whose tokens are computed (paper: 0.1); 1 computes all decided tokens.
    sigma: width in tokens of what counts as around a mask (paper: 10).
    """

    masks: int = 32
    share: float = 0.1
    sigma: float = 10.0

    paper: ClassVar[str] = "arXiv 2509.23094"
    listens: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range.
        """
        check_count(self, "masks", lowest=1)
        check_number(self, "share", highest=1)
        check_number(self, "sigma")

    def candidates(self, state: DecodeState) -> torch.Tensor:
        """The masked tokens of the block that are computed."""
        return self._likely(state) & state.in_block

    def plan(self, state: DecodeState) -> StepPlan:
        """Everything at the first step; then likely masks and what the last step's attention flowed through."""
        return StepPlan(self._likely(state) | self._central(state) | (state.step == 0)[:, None])

    def reads(self, view: LayerView) -> None:
        """Remember the attention of every layer, until the next step has made its sums."""
        if view.layer == 0:
            view.state.notes.setdefault("passes", []).append((view.rows, view.slots, []))
        view.state.notes["passes"][-1][2].append(view.weights().mean(1))

    def _likely(self, state: DecodeState) -> torch.Tensor:
        """Masked tokens by confidence times density, those of the block first; all at the first step."""
        score = state.confidence.clamp_min(0) * self._density(state)
        score = score + torch.where(state.in_block, 2.0, 0.0) + torch.where(state.confidence < 0, 1e-9, 0.0)
        found = leading(score, state.masked, torch.full_like(state.step, self.masks))
        return torch.where((state.step == 0)[:, None], state.masked, found)

    def _density(self, state: DecodeState) -> torch.Tensor:
        """Share of decided tokens around each, [B, S]; what lies left of the answer is decided."""
        radius = math.ceil(3 * self.sigma)
        if not radius:
            return torch.ones_like(state.confidence)
        away = torch.arange(-radius, radius + 1, device=state.ids.device, dtype=state.confidence.dtype)
        kernel = torch.exp(-0.5 * (away / self.sigma) ** 2)
        decided = (~state.masked).to(kernel.dtype)
        ends = decided.new_ones(len(decided), radius), decided[:, -1:].expand(-1, radius)
        rows = torch.cat([ends[0], decided, ends[1]], 1)
        return functional.conv1d(rows[:, None], (kernel / kernel.sum())[None, None])[:, 0]

    def _central(self, state: DecodeState) -> torch.Tensor:
        """The fewest decided tokens with the asked share of the rollout's column sums."""
        flow = state.notes.setdefault("flow", torch.ones_like(state.confidence))
        for rows, slots, layers in state.notes.pop("passes", []):
            flow[rows, : layers[0].shape[2]] = rollout(slots, layers).to(flow.dtype)
        allowed = ~state.masked & state.seen
        mass = flow.masked_fill(~allowed, 0)
        ranked = mass.sort(dim=1, descending=True, stable=True).values
        before = ranked.cumsum(1) - ranked
        count = (before < self.share * mass.sum(1, keepdim=True)).sum(1).clamp_min(1)
        return leading(mass, allowed, torch.full_like(count, mass.shape[1]) if self.share == 1 else count)


def rollout(slots: torch.Tensor, layers: list[torch.Tensor]) -> torch.Tensor:
    """Column sums [N, W] of the product of all layers' attention, each halved with the identity.

    Args:
        slots: of the queries [N, Q]; all other tokens pass a layer unchanged.
        layers: attention [N, Q, W] of each layer, from the first on.
    """
    flow = layers[0].new_ones(len(slots), layers[0].shape[2])
    again = slots == slots[:, :1]  # a row is filled up with its first token
    again[:, 0] = False
    for attention in reversed(layers):
        half = flow.gather(1, slots).masked_fill(again, 0) / 2
        flow = flow.scatter_add(1, slots, -half) + torch.einsum("nq,nqw->nw", half, attention)
    return flow
