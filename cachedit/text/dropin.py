"""A cache in the place of a model's forward, for loops that are not ours: what to compute is read off the ids."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch

from cachedit.errors import UnsupportedModelError
from cachedit.text.caching import CachedModel, inside
from cachedit.text.masks import mask_kind
from cachedit.text.record import TextRun, TextStep
from cachedit.text.session import ATTRIBUTE, Setting, remember
from cachedit.text.state import DecodeState

KNOWN = ("input_ids", "attention_mask", "position_ids")
PROBED = 32  # tokens of a block of most block-causal models, to find out whether one is


class DropIn:
    """Answers the calls of a decoding loop that hands over all ids every time.

    A pipeline works on the last block of what it hands over, and gets the logits of that block only. Any other loop
    gets logits for all tokens, zero where none were needed: at tokens that are decided.

    Attributes:
        pipeline: whose model it is; None for a model that is called by itself.
    """

    def __init__(self, setting: Setting, pipeline: Any = None) -> None:
        self.setting, self.pipeline = setting, pipeline
        self._forget()
        self._told: Mapping[str, Any] = {}
        self._kinds: dict[int, Literal["full", "block"]] = {}

    def attach(self) -> None:
        """Stand in for the forward of the model."""
        mine = vars(self.setting.model)
        self._before = mine.get("forward")  # where weights are offloaded the forward is already another one
        self._plain = self.setting.model.forward
        mine["forward"], mine[ATTRIBUTE] = self.forward, self

    def detach(self) -> None:
        """Give the model its own forward back."""
        mine = vars(self.setting.model)
        del mine["forward"], mine[ATTRIBUTE]
        if self._before is not None:
            mine["forward"] = self._before
        self._end("aborted")

    @contextmanager
    def run(self, told: Mapping[str, Any]) -> Iterator[None]:
        """One call of the pipeline, with these arguments."""
        self._end("aborted")
        self._told = told
        status = "aborted"
        try:
            yield
            status = "finished"
        finally:
            self._end(status)
            self._told = {}

    def _forget(self) -> None:
        self._state: DecodeState | None = None
        self._cached: CachedModel | None = None
        self._run: TextRun | None = None

    def _end(self, status: str) -> None:
        """End the run, whatever it was at, and let go of what was kept."""
        if self._run is not None and self._run.status == "running":
            self._run.status = status
        self._forget()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's answer; from the cache where a step of a decoding is recognised."""
        ids = kwargs.get("input_ids", args[0] if args else None)
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        others = [k for k, v in kwargs.items() if k not in KNOWN and v is not None]
        recognised = isinstance(ids, torch.Tensor) and ids.ndim == 2 and len(args) < 2 and not others
        whole = not isinstance(mask, torch.Tensor) or mask.ndim == 2
        training = torch.is_grad_enabled() or self.setting.model.training
        if inside.get() or training or not recognised or not whole:
            return self._plain(*args, **kwargs)
        assert isinstance(ids, torch.Tensor)
        return self._answer(ids, mask if isinstance(mask, torch.Tensor) else torch.ones_like(ids), positions)

    # -- one call -------------------------------------------------------------------------------------------------

    def _answer(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor | None) -> Any:
        began = time.perf_counter()
        state = self._follow(ids, mask.bool(), positions)
        assert self._cached is not None
        assert self._run is not None
        idle = ~state.masked.any(1, keepdim=True)
        wanted = (
            state.in_block if self.pipeline is not None else state.asked_for(state.masked) | (idle & state.in_block)
        )
        total = int(state.window.sum())
        found = self._cached.step(state, wanted)
        first = ids.shape[1] - int(wanted[0].sum()) if self.pipeline is not None else 0
        logits = found.logits.new_zeros(len(ids), ids.shape[1] - first, found.logits.shape[1])
        logits[found.rows, found.slots - first] = found.logits
        run, spent = self._run, 1e3 * (time.perf_counter() - began)
        run.cache_bytes_peak = max(run.cache_bytes_peak, self._cached.bytes)
        run.steps.append(TextStep(run.nfe, found.tokens, total, 0, bool(found.refreshed.any()), spent))
        from transformers.modeling_outputs import MaskedLMOutput

        return MaskedLMOutput(logits=logits)

    def _follow(self, ids: torch.Tensor, seen: torch.Tensor, positions: torch.Tensor | None) -> DecodeState:
        """The state, moved on to these ids; a new one where they do not follow from the last."""
        state, masked = self._state, ids == self._mask_token_id()
        if positions is None:
            positions = (seen.cumsum(1) - 1).clamp_min(0)
        positions = positions.expand_as(ids)
        if state is None or not self._follows(state, ids, masked):
            return self._begin(ids, seen, positions, masked)
        known = state.ids.shape[1]
        picked = ids[:, :known] != state.ids
        assert self._run is not None
        self._run.steps[-1].committed = int(picked.sum())
        state.commit(picked, ids[:, :known])
        state.mask(masked[:, :known])
        if ids.shape[1] > known:
            state.extend(*(x[:, known:] for x in (ids, seen, positions, self._blocks(ids, positions, masked), masked)))
        self._place(state)
        return state

    def _begin(
        self, ids: torch.Tensor, seen: torch.Tensor, positions: torch.Tensor, masked: torch.Tensor
    ) -> DecodeState:
        self._end("finished")
        attention = self._attention()
        exists = torch.ones_like(seen) if self.pipeline is not None else seen | masked
        blocks = self._blocks(ids, positions, masked)
        state = self._state = DecodeState(
            ids.clone(),
            seen,
            exists,
            positions,
            blocks,
            masked,
            attention == "block",
            attention == "prefix",
            self.setting.shift,
        )
        self._place(state)
        strategy, (batch, width) = self.setting.strategy, ids.shape
        self._cached = CachedModel(self.setting.layout, strategy, batch, width)
        prompt = int((~masked).cumprod(1).sum(1).min())
        self._run = TextRun(str(strategy), batch, prompt, self._told.get("gen_length"))
        for owner in (self.setting.model, self.pipeline):
            if owner is not None:
                remember(owner, self._run)
        return state

    def _place(self, state: DecodeState) -> None:
        """Say which block the rows work on: the last of what a pipeline hands over, whether it has masks or not."""
        if self.pipeline is None:
            state.enter_blocks()
        else:
            state.enter(state.block_of.amax(1))
        state.done = torch.zeros_like(state.done)

    def _blocks(self, ids: torch.Tensor, positions: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
        """Block of every token [B, S]; without a block length the answer is one block."""
        length = self._block_length()
        if length is not None:
            order = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
            return (order if self.pipeline is not None else positions) // length
        return (masked.cumsum(1) > 0).long() - 1

    # -- what the pipeline or the options tell ---------------------------------------------------------------------

    def _block_length(self) -> int | None:
        config = getattr(getattr(self.pipeline, "scheduler", None), "config", None)
        told = self._told.get("block_length") or getattr(config, "block_length", None)
        return self.setting.options.block_length if self.pipeline is None else told

    def _mask_token_id(self) -> int:
        told = self._told.get("mask_token_id")
        told = getattr(self.pipeline, "mask_token_id", None) if told is None else told
        return self.setting.mask_token_id() if told is None else int(told)

    def _attention(self) -> str:
        """Which tokens see each other when the pipeline calls the model; asked of the model itself, once per length."""
        told, known = self._block_length(), self.setting.options.block_length
        if told is not None and known is not None and told != known:
            raise ValueError(
                f"the pipeline works on blocks of {told} tokens, and the blocks of {type(self.setting.model).__name__} "
                f"have {known}. Allowed: block_length={known} in the call, or wrap(..., block_length={told})."
            )
        kind = self.setting.options.attention
        if kind is None:
            length = told or PROBED
            if length not in self._kinds:
                self._kinds[length] = mask_kind(self._plain, self.setting.model, length)
            kind = self._kinds[length]
        if kind == "block" and told is None:
            raise UnsupportedModelError(
                f"{type(self.setting.model).__name__} lets no token see a later block, and the length of a "
                "block is not known. Pass block_length= to wrap."
            )
        return self.setting.attention(kind)

    def _follows(self, state: DecodeState, ids: torch.Tensor, masked: torch.Tensor) -> bool:
        """Whether these ids are what a loop has made of the state.

        Where no pipeline tells, a run is over once a token that was decided is masked again; a pipeline may do that.
        """
        batch, known = state.ids.shape
        if len(ids) != batch or ids.shape[1] < known or ids.device != state.ids.device:
            return False
        return self.pipeline is not None or not bool((masked[:, :known] & ~state.masked).any())
