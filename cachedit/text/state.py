"""Where a decoding stands: the tokens, what is decided, and with which ids keys and values were computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

NEVER = -1  # id of a token whose keys and values were never computed
PROMPT_AGE = 1 << 30
LAST = 1 << 30  # the block of a row that is done


@dataclass
class DecodeState:
    """The tokens of a batch. All tensors are [B, S] unless said otherwise, and rows know nothing of each other.

    Attributes:
        ids: token ids; the mask token where nothing is decided.
        seen: tokens that others may see; padding is not.
        exists: tokens that may be computed.
        positions: place of a token in its row, padding left out.
        block_of: block of a token; the prompt has -1 where blocks start behind it.
        masked: tokens that are still to be decided.
        block_causal: no token sees a later block than its own.
        prefix: no token of the prompt sees the answer.
        shift: the logits at a token are for the token so many places later.
        age: steps since a token was decided; 0 at the step after, -1 while it is masked, very large in the prompt.
        computed_ids: the ids with which the kept keys and values were computed.
        confidence: probability that the model last gave to its choice for a token; -1 where it was never asked.
        entropy: of what the model last gave, in nats; only where a strategy or a commit rule asks for it.
        block: block that a row works on [B].
        step: steps that a row has made [B].
        block_step: steps that a row has made in its block [B].
        block_masks: masked tokens of the block when the row entered it [B].
        done: rows that are finished [B].
        planned: tokens that this step will commit, where the commit rule knows; else None.
        narrowed: masked tokens that a strategy lets this step commit; None for those of the block.
        editable: decided tokens that this step may change; None for none.
        proposed: what the model proposed at this step for the candidates, the ids elsewhere.
        held: rows that stay in their block although nothing of it is masked [B].
        notes: what a strategy remembers of earlier steps; rows of a batch have rows of their own there.
    """

    ids: torch.Tensor
    seen: torch.Tensor
    exists: torch.Tensor
    positions: torch.Tensor
    block_of: torch.Tensor
    masked: torch.Tensor
    block_causal: bool = False
    prefix: bool = False
    shift: int = 0
    planned: torch.Tensor | None = None
    narrowed: torch.Tensor | None = None
    editable: torch.Tensor | None = None
    notes: dict[Any, Any] = field(default_factory=dict)
    proposed: torch.Tensor = field(init=False)
    held: torch.Tensor = field(init=False)
    age: torch.Tensor = field(init=False)
    computed_ids: torch.Tensor = field(init=False)
    confidence: torch.Tensor = field(init=False)
    entropy: torch.Tensor = field(init=False)
    block: torch.Tensor = field(init=False)
    step: torch.Tensor = field(init=False)
    block_step: torch.Tensor = field(init=False)
    block_masks: torch.Tensor = field(init=False)
    done: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        """Start before the first step."""
        self.proposed = self.ids
        self.age = torch.where(self.masked, -1, PROMPT_AGE)
        self.computed_ids = torch.full_like(self.ids, NEVER)
        self.confidence = torch.full(self.ids.shape, -1.0, device=self.ids.device)
        self.entropy = torch.zeros_like(self.confidence)
        self.step = torch.zeros_like(self.ids[:, 0])
        self.block = torch.full_like(self.step, NEVER)
        self.block_step = torch.zeros_like(self.step)
        self.block_masks = torch.zeros_like(self.step)
        self.done = torch.zeros_like(self.step, dtype=torch.bool)
        self.held = torch.zeros_like(self.done)
        self.first_block = self.enter_blocks()
        self.before = self._before() if self.shift else None

    def enter_blocks(self) -> torch.Tensor:
        """Move every row that is not held to the first block with masked tokens; a row without any is done.

        Returns:
            The blocks [B].
        """
        block = torch.where(self.held, self.block, torch.where(self.masked, self.block_of, LAST).amin(1))
        self.done = self.done | (block == LAST)
        self.enter(torch.where(block == LAST, self.block, block))
        return self.block

    def enter(self, block: torch.Tensor) -> None:
        """Move every row to this block [B]; what is counted per block starts anew in rows where it is another one."""
        entered = block != self.block
        self.block = block
        self.block_step = torch.where(entered, 0, self.block_step)
        self.block_masks = torch.where(entered, (self.masked & self.in_block).sum(1), self.block_masks)

    def extend(
        self,
        ids: torch.Tensor,
        seen: torch.Tensor,
        positions: torch.Tensor,
        block_of: torch.Tensor,
        masked: torch.Tensor,
    ) -> None:
        """Add the tokens of a window that has grown, which nothing was computed of yet."""
        kind = self.block_causal, self.prefix
        more = DecodeState(ids.clone(), seen, torch.ones_like(seen), positions, block_of, masked, *kind)
        for name in ("seen", "exists", "positions", "block_of", "masked", "age", "computed_ids", "ids"):
            setattr(self, name, torch.cat([getattr(self, name), getattr(more, name)], 1))
        for name in ("confidence", "entropy"):
            kept = getattr(self, name)
            setattr(self, name, torch.cat([kept, getattr(more, name).to(kept.dtype)], 1))
        self.before = self._before() if self.shift else None

    def _before(self) -> torch.Tensor:
        """The token before each in its row, padding left out."""
        order = torch.arange(self.ids.shape[1], device=self.ids.device).expand_as(self.ids)
        last = torch.where(self.seen, order, NEVER).cummax(1).values
        return torch.cat([torch.full_like(last[:, :1], NEVER), last[:, :-1]], 1)

    @property
    def in_block(self) -> torch.Tensor:
        """Tokens of the block that a row works on."""
        return self.exists & (self.block_of == self.block[:, None])

    @property
    def from_block(self) -> torch.Tensor:
        """Tokens of that block and all later ones."""
        return self.exists & (self.block_of >= self.block[:, None])

    @property
    def window(self) -> torch.Tensor:
        """Tokens that the model would compute without a cache: later blocks only where they are seen."""
        return self.exists & (self.block_of <= self.block[:, None]) if self.block_causal else self.exists

    @property
    def dirty(self) -> torch.Tensor:
        """Tokens that are seen and whose keys and values belong to another id."""
        return (self.computed_ids != self.ids) & self.seen & self.window

    @property
    def open(self) -> torch.Tensor:
        """Tokens that this step may commit."""
        allowed = self.in_block if self.narrowed is None else self.narrowed
        return self.masked & allowed & ~self.done[:, None]

    @property
    def candidates(self) -> torch.Tensor:
        """Tokens that the model must propose something for."""
        found = self.open if self.planned is None else self.planned
        return found if self.editable is None else found | self.editable

    def asked_for(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens at which the logits for ``tokens`` are given."""
        if self.before is None:
            return tokens
        rows, slots = tokens.nonzero(as_tuple=True)
        asked = torch.zeros_like(tokens)
        asked[rows, self.before[rows, slots]] = True
        return asked

    def commit(self, picked: torch.Tensor, tokens: torch.Tensor) -> None:
        """Decide the picked tokens, and end the step of every row that is not done; ``enter_blocks`` comes after."""
        live = ~self.done
        self.ids = torch.where(picked, tokens, self.ids)
        self.masked = self.masked & ~picked
        self.age = torch.where((self.age >= 0) & (self.age < PROMPT_AGE) & live[:, None], self.age + 1, self.age)
        self.age = torch.where(picked, 0, self.age)
        self.step = self.step + live
        self.block_step = self.block_step + live

    def mask(self, masked: torch.Tensor) -> None:
        """Say which tokens are masked, where the loop is not ours: a model may decide on the mask token itself."""
        self.masked = masked.clone()
        self.age = torch.where(masked, -1, self.age)

    def end_at(self, token: int, filler: int, start: int) -> None:
        """End every row that has decided on ``token`` from ``start`` on, and on all before it; the rest is filled."""
        order = torch.arange(self.ids.shape[1], device=self.ids.device).expand_as(self.ids)
        ends = (self.ids == token) & ~self.masked & (order >= start)
        first = torch.where(ends, order, self.ids.shape[1]).amin(1, keepdim=True)
        ended = ends.any(1) & ~(self.masked & (order < first)).any(1)
        rest = ended[:, None] & (order > first)
        self.ids = torch.where(rest, filler, self.ids)
        self.masked = self.masked & ~rest
        self.held = self.held & ~ended
