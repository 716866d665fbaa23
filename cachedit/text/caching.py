"""A language model behind its slots: from what a step computes to the logits that it wants."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch

from cachedit.text.features import Features
from cachedit.text.growing import Growth
from cachedit.text.layers import Layers
from cachedit.text.layouts import Layout
from cachedit.text.listening import LayerView, Listener, listening
from cachedit.text.slots import Pass, SlotCache
from cachedit.text.state import PROMPT_AGE, DecodeState
from cachedit.text.strategy import LayerPlan, TextStrategy

inside: ContextVar[bool] = ContextVar("cachedit_inside", default=False)  # the model is called by its own cache


@dataclass(frozen=True)
class Found:
    """What a step computed.

    Attributes:
        rows: row of each wanted token [M].
        slots: the token at which its logits are given [M].
        logits: [M, V].
        computed: tokens that were computed [B, S].
        refreshed: rows of which everything was computed [B].
        tokens: how many were computed, over all rows; where layers differ, on average over them.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    logits: torch.Tensor
    computed: torch.Tensor
    refreshed: torch.Tensor
    tokens: int


class CachedModel:
    """Computes what a strategy plans, and what must be computed whatever it plans."""

    def __init__(self, layout: Layout, strategy: TextStrategy, batch: int, capacity: int) -> None:
        self.layout, self.strategy = layout, strategy
        self.cache = SlotCache(batch, capacity) if strategy.caches else None
        name = type(strategy).__name__
        self.growth = Growth(Layers.of(layout.model, name)) if strategy.grows else None
        self.features = Features(Layers.of(layout.model, name)) if strategy.by_layer else None
        self._tokens = 0.0

    @property
    def bytes(self) -> int:
        """Bytes that are held."""
        return sum(held.bytes for held in (self.cache, self.growth, self.features) if held is not None)

    def step(self, state: DecodeState, wanted: torch.Tensor) -> Found:
        """Compute one step of every row that is not done; ``wanted`` [B, S] are the tokens whose logits are needed."""
        live = ~state.done[:, None]
        window = state.window & live
        if self.cache is None or self.features is not None:
            compute = window | (wanted & live)
        else:
            compute = ((self.strategy.plan(state).compute & state.window) | state.dirty | wanted) & live
        refreshed = (compute | ~window).all(1) & live[:, 0]
        parts, computed, self._tokens = [], compute.clone(), 0.0
        token = inside.set(True)
        try:
            for rows in self._groups(compute, refreshed):
                parts.append(self._forward(state, rows, compute, wanted))
                if self.features is not None:
                    computed[rows, : len(self.features.last)] = self.features.last
        finally:
            inside.reset(token)
        if self.features is not None:
            refreshed = (computed | ~window).all(1) & live[:, 0]
        state.computed_ids = torch.where(computed, state.ids, state.computed_ids)
        if self.cache is not None and bool((state.dirty & live).any()):
            raise AssertionError("keys and values of an earlier id would have been read; please report this")
        rows, slots, logits = (torch.cat(found) for found in zip(*parts, strict=True))
        return Found(rows, slots, logits, computed, refreshed, round(self._tokens))

    def _groups(self, compute: torch.Tensor, refreshed: torch.Tensor) -> Iterator[torch.Tensor]:
        """Rows that are computed together: those of which all is computed, and the others; or each alone."""
        busy = compute.any(1)
        if self.growth is not None or self.features is not None:
            yield from busy.nonzero()
            return
        for chosen in (busy & refreshed, busy & ~refreshed):
            if bool(chosen.any()):
                yield chosen.nonzero()[:, 0]

    def _forward(
        self, state: DecodeState, rows: torch.Tensor, compute: torch.Tensor, wanted: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows [M], slots [M] and logits [M, V] of the wanted tokens of some rows."""
        slots, real = self._slots(compute[rows])
        ids, positions, asked = (x[rows].gather(1, slots) for x in (state.ids, state.positions, wanted))
        asked &= real
        width = _width(state.window[rows] | compute[rows])
        leading = slots.shape[1] == width and bool((slots == torch.arange(width, device=slots.device)).all())
        keep = asked.any(0).nonzero()[:, 0]
        call = Pass(
            ids,
            positions,
            None if len(rows) == len(state.ids) else rows,
            None if leading else slots,
            width,
            _visible(state, rows, slots, width),
            None if len(keep) == slots.shape[1] else keep,
        )
        if self.cache is not None:
            self.cache.begin(call)
        with self._watching(state, rows, slots, call):
            logits = self.layout.logits(call, self.cache)
        self._count(state, rows, compute)
        asked = asked[:, keep]
        where = asked.nonzero()
        return rows[where[:, 0]], slots[:, keep][asked], logits[where[:, 0], where[:, 1]]

    @contextmanager
    def _watching(self, state: DecodeState, rows: torch.Tensor, slots: torch.Tensor, call: Pass) -> Iterator[None]:
        """What the strategy has asked to see or to steer of a pass."""
        growth, features, cache = self.growth, self.features, self.cache
        with ExitStack() as stack:
            if self.strategy.listens:
                stack.enter_context(listening(self._listener(state, rows, slots)))
            if growth is not None and cache is not None:
                order = torch.arange(call.width, device=slots.device)[None]
                ids, positions = (x[rows, : call.width] for x in (state.ids, state.positions))
                visible = _visible(state, rows, order, call.width)
                full = replace(call, ids=ids, positions=positions, slots=None, visible=visible)
                stack.enter_context(growth.running(full, int(rows), slots, cache))
            if features is not None and cache is not None:
                row, changed, window = int(rows), state.dirty[rows][0], state.window[rows][0]

                def plan(layer: int) -> LayerPlan:
                    asked = self.strategy.layer_plan(state, row, layer)
                    return replace(asked, compute=(asked.compute | changed) & window, checked=asked.checked & window)

                stack.enter_context(features.running(call, row, cache, plan))
            yield

    def _listener(self, state: DecodeState, rows: torch.Tensor, slots: torch.Tensor) -> Listener:
        growth = self.growth

        def listener(
            layer: int, queries: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor | None
        ) -> torch.Tensor | None:
            now = slots if growth is None else growth.slots
            view = LayerView(state, rows, now, layer, queries, keys, visible)
            found = self.strategy.reads(view)
            if growth is not None and now.shape[1] < keys.shape[2]:
                growth.wanted = self.strategy.grows_after(view)
            return found

        return listener

    def _count(self, state: DecodeState, rows: torch.Tensor, compute: torch.Tensor) -> None:
        """Add what the pass has computed."""
        if self.features is not None:
            self._tokens += self.features.tokens
            return
        tokens = float(compute[rows].sum())
        if self.growth is not None and self.growth.grown_at is not None:
            left_out = float((state.window & ~compute)[rows].sum())
            size = len(self.growth.layers.each)
            tokens += left_out * (size - self.growth.grown_at) / size
        self._tokens += tokens

    def _slots(self, compute: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots of the computed tokens [N, Q], and which of them are not there only to fill the row [N, Q]."""
        if self.cache is None or self.features is not None:  # all that a layer sees is what enters it
            leading = torch.arange(_width(compute), device=compute.device)
            return leading.expand(len(compute), -1), compute[:, : len(leading)]
        counts = compute.sum(1)
        most = int(counts.max())
        real = torch.arange(most, device=compute.device) < counts[:, None]
        if bool(real.all()):
            return compute.nonzero()[:, 1].view(len(compute), most), real
        # A shorter row computes its first token again: any other would be fresher than in a row alone.
        slots = compute.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :most]
        return torch.where(real, slots, slots[:, :1]), real


def _width(tokens: torch.Tensor) -> int:
    """Number of leading slots up to the last of these tokens."""
    return int(tokens.any(0).nonzero()[-1]) + 1


def _visible(state: DecodeState, rows: torch.Tensor, slots: torch.Tensor, width: int) -> torch.Tensor | None:
    """Which of the leading slots the tokens see [N, 1, Q, width]; None if each sees all."""
    keys = (state.seen & state.window)[rows, :width]
    visible = keys[:, None].expand(-1, slots.shape[1], -1)
    if state.block_causal:
        block = state.block_of[rows]
        visible = visible & (block[:, None, :width] <= block.gather(1, slots)[:, :, None])
    if state.prefix:
        answer = state.age[rows] < PROMPT_AGE
        visible = visible & ~(answer[:, None, :width] & ~answer.gather(1, slots)[:, :, None])
    if bool(visible.all()):
        return None
    blind = ~visible.any(-1, keepdim=True)  # padding must see something, or its softmax is not a number
    own = slots[:, :, None] == torch.arange(width, device=slots.device)
    return (visible | (blind & own))[:, None]
