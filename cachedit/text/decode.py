"""The decoding loop: plan, compute, commit, until nothing is masked."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch

from cachedit.profile import Profile
from cachedit.registry import Strategy
from cachedit.text.attachment import setting_on
from cachedit.text.caching import CachedModel, Found
from cachedit.text.commit import BlockRefinement, CommitRule, commit_rule
from cachedit.text.layouts import is_language_model, layout_of
from cachedit.text.options import TextOptions, split_options
from cachedit.text.record import TextRun, TextStep
from cachedit.text.sampling import propose
from cachedit.text.session import Setting, remember
from cachedit.text.state import DecodeState
from cachedit.text.strategy import TextStrategy


@dataclass(frozen=True)
class Event:
    """What one step did. Tensors are [B, P + G].

    Attributes:
        step: number of the step, from 0.
        sequences: token ids after the step, a copy; the mask token where nothing is decided yet.
        committed: tokens that the step decided, or decided anew.
        computed: tokens whose keys and values the step computed; the others were taken from the cache.
        confidence: of the model in those tokens, 0 elsewhere.
        tokens_computed: how many tokens the step computed, over all rows; on average over layers that differ.
        prompt_length: where the answer starts.
        finished: True for the last event.
    """

    step: int
    sequences: torch.Tensor
    committed: torch.Tensor
    computed: torch.Tensor
    confidence: torch.Tensor
    tokens_computed: int
    prompt_length: int
    finished: bool


@dataclass(frozen=True)
class Request:
    """What is asked of a decoding; ``generate`` describes it."""

    attention_mask: torch.Tensor | None = None
    gen_length: int = 128
    block_length: int = 32
    steps: int | None = None
    threshold: float | None = None
    factor: float | None = None
    entropy_bound: float | None = None
    refinement_steps: int | None = None
    editing_threshold: float | None = None
    max_post_steps: int = 16
    order: Literal["confidence", "random"] = "confidence"
    temperature: float = 0.0
    generator: torch.Generator | list[torch.Generator] | None = None
    num_return_sequences: int = 1
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range.
        """
        for name in ("gen_length", "block_length", "num_return_sequences"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r}; allowed: an integer, 1 or more")
        if isinstance(self.temperature, bool) or not self.temperature >= 0:
            raise ValueError(f"temperature={self.temperature!r}; allowed: a number, 0 (the likeliest token) or more")

    def rule(self) -> CommitRule:
        """What decides which tokens are committed.

        Raises:
            ValueError: more than one rule is asked for, or a value is out of range.
        """
        if self.refinement_steps is None:
            if self.editing_threshold is not None:
                raise ValueError(f"got editing_threshold={self.editing_threshold!r}; allowed: with refinement_steps=")
            return commit_rule(self.steps, self.order, self.threshold, self.factor, self.entropy_bound)
        sure, editing = self.threshold, self.editing_threshold
        refinement = BlockRefinement(self.block_length, self.refinement_steps, sure, editing, self.max_post_steps)
        return commit_rule(self.steps, self.order, None, self.factor, self.entropy_bound, refinement)

    def generators(self, rows: int) -> list[torch.Generator | None]:
        """One generator per row.

        Raises:
            ValueError: another number was given.
        """
        if not isinstance(self.generator, (list, tuple)):
            return [self.generator] * rows
        if len(self.generator) != rows:
            raise ValueError(f"got {len(self.generator)} generators for {rows} rows; allowed: one for each, or one")
        return list(self.generator)


def generate(model: Any, input_ids: torch.Tensor, strategy: str | Strategy | None = None, **options: Any) -> Any:
    """Decode the answers to a batch of prompts with a masked diffusion language model.

    Row i of a batch gets the tokens that it would get alone, whatever the other rows are and however they are padded.

    Args:
        model: a language model, wrapped or not.
        input_ids: the prompts, integers [P] or [B, P].
        strategy: name or instance of a text strategy; None for what the model is wrapped with, else "auto".
        **options: the strategy's own options, and

            * ``attention_mask`` [B, P]: 0 for padding, on either side; the answer follows the last prompt token;
            * ``gen_length``: tokens of the answer (128);
            * ``block_length``: tokens of a block, decoded in turn; None for what the model is known to have, else 32;
            * ``steps``: in all, at least one per block; None for one per token. Instead, for parallel commits:
              ``threshold``, ``factor`` or ``entropy_bound`` (``cachedit.text.commit``);
            * ``refinement_steps``: of a block, as LLaDA2Pipeline decodes: at each its share of the block, or all with a
              confidence above ``threshold`` (0.95) if those are more; ``editing_threshold``: confidence above which a
              decided token of the block is replaced, None for never; ``max_post_steps``: further steps for that (16);
            * ``order``: "confidence", or "random" for an order drawn beforehand, with ``steps``;
            * ``temperature``: 0 for the likeliest token; ``generator``: one, or a list with one per returned row;
            * ``num_return_sequences``: answers per prompt, next to each other;
            * ``eos_token_id``: ends a row once all before it is decided; the rest is ``pad_token_id``, or that token;
            * ``mask_token_id``: None for the one in the model's configuration;
            * ``attention``: "full", "prefix" for models trained with prompts that do not see the answer, or "block" for
              those trained block-causally; None for what the layout tells;
            * ``shift``: 1 if logits are for the next token; None for what the layout tells;
            * ``profile``: of "auto", which ``cachedit.text.probe`` made; None for the one of this model.

    Returns:
        Token ids [B * num_return_sequences, P + gen_length], the prompts included.

    Raises:
        UnsupportedModelError: no text cache knows the model, or the strategy is wrong for it.
        ProfileError: the profile does not fit the model.
        TypeError, ValueError: an unknown strategy or an impossible option.
    """
    sequences = input_ids
    for event in stream(model, input_ids, strategy, **options):
        sequences = event.sequences
    return sequences


def stream(
    model: Any, input_ids: torch.Tensor, strategy: str | Strategy | None = None, **options: Any
) -> Iterator[Event]:
    """``generate``, step by step: tokens as they are committed. Takes the same arguments and raises the same errors.

    Closing the iterator ends the run; ``last_run`` then says that it was aborted.
    """
    names = {field.name for field in fields(Request)} - {"block_length"}
    asked = {name: value for name, value in options.items() if name in names}
    rest = {name: value for name, value in options.items() if name not in names and name != "profile"}
    setting = _setting(model, strategy, rest, options.get("profile"))
    request = Request(**asked, block_length=setting.options.block_length or Request.block_length)
    return Decoding(setting, input_ids, request).events()


def _setting(
    model: Any, strategy: str | Strategy | None, options: dict[str, Any], profile: Profile | str | Path | None
) -> Setting:
    own, common = split_options(options)
    on_model = setting_on(model)
    if strategy is None and on_model is not None:
        strategy, common = on_model.strategy, _over(common, on_model.options)
    from cachedit import strategies  # noqa: F401  (fills the registry)

    found = Strategy.find(Strategy.unasked().name if strategy is None else strategy, own, model)
    if not isinstance(found, TextStrategy):
        if not is_language_model(model):
            layout_of(model)  # which says why not
        raise ValueError(f"{found.name} is no strategy for text. Allowed: {', '.join(TextStrategy.of_kind())}.")
    return Setting.of(model, found, common, profile)


def _over(given: TextOptions, before: TextOptions) -> TextOptions:
    """What is given now, and else what was given before."""
    chosen = {}
    for field in fields(TextOptions):
        now = getattr(given, field.name)
        chosen[field.name] = getattr(before, field.name) if now is None else now
    return TextOptions(**chosen)


class Decoding:
    """One decoding of a batch, before its first step and during it.

    Attributes:
        state: where it stands.
        run: its record.
    """

    def __init__(self, setting: Setting, input_ids: torch.Tensor, request: Request) -> None:
        """Prepare everything; whatever is impossible is said here.

        Raises:
            UnsupportedModelError: the strategy is wrong for the model.
            ValueError: an impossible option.
        """
        self.setting, self.request = setting, request
        self.mask_token_id = setting.mask_token_id()
        self.state = self._before_the_first_step(input_ids)
        batch, width = self.state.ids.shape
        self.prompt_length = width - request.gen_length
        self.rule = request.rule()
        self.generators = request.generators(batch)
        self.rule.begin(self.state, self.generators)
        strategy = setting.strategy
        if strategy.needs_foresight and self.rule.foresee(self.state) is None:
            raise ValueError(
                f"{strategy} must know the order of the commits beforehand, and confidence tells it only afterwards. "
                "Allowed: order='random'."
            )
        self.model = CachedModel(setting.layout, strategy, batch, width)
        self.run = TextRun(str(strategy), batch, self.prompt_length, request.gen_length)

    def _before_the_first_step(self, input_ids: torch.Tensor) -> DecodeState:
        request, ids = self.request, torch.atleast_2d(input_ids)
        if ids.ndim != 2 or ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"got input_ids {ids.dtype} {list(input_ids.shape)}; allowed: integers [P] or [B, P]")
        mask = torch.ones_like(ids) if request.attention_mask is None else torch.atleast_2d(request.attention_mask)
        if mask.shape != ids.shape:
            raise ValueError(
                f"got an attention_mask {list(mask.shape)} for input_ids {list(ids.shape)}; allowed: equal"
            )
        repeats, shift = request.num_return_sequences, self.setting.shift
        ids, mask = (x.long().repeat_interleave(repeats, 0) for x in (ids, mask.to(ids.device)))
        (batch, prompt), length = ids.shape, request.gen_length
        if shift and not bool(mask.any(1).all()):
            raise ValueError(
                "got an empty prompt; allowed: one token or more, whose logits are for the first answer token"
            )
        attention = self.setting.attention()
        block_causal = attention == "block"
        seen = torch.cat([mask, mask.new_ones(batch, length)], 1).bool()
        positions = (seen.cumsum(1) - 1).clamp_min(0)
        behind = torch.arange(-prompt, length, device=ids.device).expand(batch, -1)
        block_of = (
            (positions if block_causal else behind).div(request.block_length, rounding_mode="floor").clamp_min(-1)
        )
        ids = torch.cat([ids, ids.new_full((batch, length), self.mask_token_id)], 1)
        kind = block_causal, attention == "prefix"
        return DecodeState(ids, seen, seen, positions, block_of, behind >= 0, *kind, shift)

    @torch.no_grad()
    def events(self) -> Iterator[Event]:
        """Step until every row is done."""
        remember(self.setting.model, self.run)
        try:
            while not bool(self.state.done.all()):
                event = self._step()
                if event.finished:
                    self.run.status = "finished"
                yield event
        finally:
            if self.run.status == "running":
                self.run.status = "aborted"

    @property
    def total(self) -> int:
        """Tokens that the next step would compute without a cache, over all rows."""
        return int((self.state.window & ~self.state.done[:, None]).sum())

    def look(self) -> tuple[Found, torch.Tensor]:
        """What the strategy computes at this step, and the tokens that the model proposes [B, P + G]."""
        state, strategy = self.state, self.setting.strategy
        state.narrowed = strategy.candidates(state)
        state.planned, state.editable = self.rule.foresee(state), self.rule.editable(state)
        found = self.model.step(state, state.asked_for(state.candidates))
        entropy = self.rule.needs_entropy or strategy.needs_entropy
        temperature = self.request.temperature
        state.proposed = propose(state, found, self.mask_token_id, temperature, self.generators, entropy)
        return found, state.proposed

    def decide(self, picked: torch.Tensor, tokens: torch.Tensor) -> None:
        """Commit the picked ones of these tokens [B, P + G], and go on to the next step."""
        request, state = self.request, self.state
        state.commit(picked, tokens)
        self.rule.after(state)
        if request.eos_token_id is not None:
            filler = request.eos_token_id if request.pad_token_id is None else request.pad_token_id
            state.end_at(request.eos_token_id, filler, self.prompt_length)
        state.enter_blocks()

    def _step(self) -> Event:
        began, state, run, total = time.perf_counter(), self.state, self.run, self.total
        found, tokens = self.look()
        picked = self.rule.select(state)
        decided = int((picked & state.masked).sum())
        self.decide(picked, tokens)
        event = Event(
            run.nfe,
            state.ids.clone(),
            picked,
            found.computed,
            state.confidence.masked_fill(~picked, 0),
            found.tokens,
            self.prompt_length,
            bool(state.done.all()),
        )
        run.cache_bytes_peak = max(run.cache_bytes_peak, self.model.bytes)
        spent, refreshed = 1e3 * (time.perf_counter() - began), bool(found.refreshed.any())
        run.steps.append(TextStep(run.nfe, event.tokens_computed, total, decided, refreshed, spent))
        return event
