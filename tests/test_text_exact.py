"""Where a text cache must give what a decoding without one gives: the exactness table of the issue, E1 to E8."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from language_models import MASK, MODELS, llama, model, prompts
from torch.nn import functional
from transformers import AutoModelForMaskedLM, AutoTokenizer

import cachedit
from cachedit import UnsupportedModelError
from cachedit.samples import sample_path
from cachedit.samples.ciphers import draw_ciphers
from cachedit.samples.text_accuracy import exact_match, write
from cachedit.strategies.block_exact import BlockExact
from cachedit.strategies.dkv_cache import DkvCache
from cachedit.strategies.no_cache import NoCache
from cachedit.text import DecodeState, StepPlan, TextStrategy
from cachedit.text.caching import CachedModel
from cachedit.text.decode import Decoding, Request
from cachedit.text.layouts import layout_of
from cachedit.text.options import TextOptions
from cachedit.text.session import Setting
from cachedit.text.slots import Pass

every_model = pytest.mark.parametrize("name", MODELS)
PLAIN: dict[str, Any] = {"gen_length": 24, "block_length": 8}


def started(name: str, prompt: torch.Tensor, length: int, **options: Any) -> DecodeState:
    """The state before the first step."""
    setting = Setting.of(model(name), NoCache(), TextOptions(mask_token_id=MASK, **options))
    return Decoding(setting, prompt, Request(gen_length=length, block_length=8)).state


def steps_of(name: str, strategy: TextStrategy, **options: Any) -> list[torch.Tensor]:
    """Logits of every step, and the tokens at the end."""
    found: list[torch.Tensor] = []
    step = CachedModel.step

    def noted(self: CachedModel, state: DecodeState, wanted: torch.Tensor) -> Any:
        found.append(step(self, state, wanted))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CachedModel, "step", noted)
        tokens = cachedit.generate(model(name), prompts(2, 11), strategy, **{**PLAIN, **options})
    return [*(one.logits for one in found), tokens]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@every_model
def test_refreshing_at_every_step_is_bit_equal_to_no_cache(name: str) -> None:  # E1
    assert same(steps_of(name, DkvCache(interval=1)), steps_of(name, NoCache()))


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_one_block_without_a_prompt_is_bit_equal_to_no_cache(cache: str) -> None:  # E2
    empty, options = prompts(2, 0), {"gen_length": 16, "block_length": 16}
    plain = cachedit.generate(model("llama"), empty, "no-cache", **options)
    assert torch.equal(cachedit.generate(model("llama"), empty, "fast-dllm", cache=cache, **options), plain)


@every_model
def test_any_tokens_in_any_order_repeat_a_full_pass_on_fresh_slots(name: str) -> None:  # E3
    state, layout = started(name, prompts(2, 11), 13, attention="full"), layout_of(model(name))
    cached, everything = CachedModel(layout, DkvCache(), 2, 24), torch.ones_like(state.masked)
    with torch.no_grad():
        full = cached.step(state, everything).logits.view(2, 24, -1)
        for count in (1, 5, 24):
            chosen = torch.stack([torch.randperm(24, generator=torch.Generator().manual_seed(row)) for row in range(2)])
            slots = chosen[:, :count]
            call = Pass(state.ids.gather(1, slots), slots, None, slots, 24, None)
            assert cached.cache is not None
            cached.cache.begin(call)
            part = layout.logits(call, cached.cache)
            assert (part - full.gather(1, slots[:, :, None].expand_as(part))).abs().max() < 1e-12


def test_a_token_is_computed_once_with_its_final_id_and_then_rests() -> None:  # E4
    state = started("llama", prompts(1, 5), 12)
    cached = CachedModel(layout_of(model("llama")), DkvCache(interval=100), 1, 17)
    kept: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for _ in range(12):
            found = cached.step(state, state.open)
            assert cached.cache is not None
            rows = torch.stack([*cached.cache.keys.values(), *cached.cache.values.values()])
            for slot, before in kept.items():
                assert torch.equal(rows[:, 0, :, slot], before)
            for slot in (state.age >= 0)[0].nonzero()[:, 0].tolist():
                if slot not in kept:
                    assert found.computed[0, slot]
                    kept[slot] = rows[:, 0, :, slot].clone()
            first = state.open & (state.open.cumsum(1) == 1)
            state.commit(first, torch.full_like(state.ids, 7))
            state.enter_blocks()
    assert set(range(16)) == set(kept)


@pytest.mark.parametrize("strategy", ["dkv-cache", "fast-dllm"])
def test_the_first_layer_is_never_stale(strategy: str) -> None:  # E5
    """Its keys depend on token and place alone, so every kept one equals a fresh one at every step."""
    step = CachedModel.step

    def checked(self: CachedModel, state: DecodeState, wanted: torch.Tensor) -> Any:
        found = step(self, state, wanted)
        fresh = CachedModel(self.layout, DkvCache(), len(state.ids), state.ids.shape[1])
        state.computed_ids, kept = torch.full_like(state.ids, -1), state.computed_ids
        step(fresh, state, state.exists)
        state.computed_ids = kept
        assert self.cache is not None
        assert fresh.cache is not None
        assert torch.allclose(self.cache.keys[0], fresh.cache.keys[0], atol=1e-12, rtol=0)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CachedModel, "step", checked)
        cachedit.generate(model("llama"), prompts(2, 11), strategy, **PLAIN)


@pytest.mark.parametrize("name", ["llama", "qwen", "eurobert", "causal_llama", "llada2"])
def test_blocks_that_no_later_block_changes_are_kept_exactly(name: str) -> None:  # E6
    options = {**PLAIN, "attention": "block"}
    plain = cachedit.generate(model(name), prompts(2, 11), "no-cache", **options)
    assert torch.equal(cachedit.generate(model(name), prompts(2, 11), BlockExact(), **options), plain)
    run = cachedit.last_run(model(name))
    # 11 + 24 on a grid of 8: blocks 1 (5 masks), 2, 3 and 4 (3 tokens). The first step has blocks 0 and 1, the first of
    # each later block also the block before, and all others have their own.
    assert run.tokens_computed == 2 * ((16 + 4 * 8) + 2 * (16 + 7 * 8) + (8 + 3 + 2 * 3))
    assert run.tokens_total == 2 * (5 * 16 + 8 * 24 + 8 * 32 + 3 * 35)


def test_the_fused_layout_is_block_causal_by_itself_and_reads_its_slots_under_its_own_checks() -> None:
    options = {**PLAIN, "gen_length": 21}
    lm, ids = model("llada2"), prompts(2, 11)
    cachedit.generate(lm, ids, "auto", **options)
    assert cachedit.last_run(lm).strategy == "BlockExact()"
    state = started("llada2", ids, 21)
    assert state.block_causal
    block = state.block_of
    hidden = block[:, None, None] > block[:, None, :, None]
    mask = torch.zeros_like(hidden, dtype=torch.float64).masked_fill(hidden, torch.finfo(torch.float64).min)
    while bool(state.masked.any()):  # the model alone, with a mask made by hand
        with torch.no_grad():
            logits = lm(input_ids=state.ids, attention_mask=mask, position_ids=state.positions).logits
        logits[..., MASK] = -torch.inf
        state.confidence, tokens = logits.softmax(-1).max(-1)
        best = state.confidence.masked_fill(~state.open, -1).argmax(1)
        state.commit(functional.one_hot(best, state.ids.shape[1]).bool(), tokens)
        state.enter_blocks()
    assert torch.equal(cachedit.generate(lm, ids, "block-exact", **options), state.ids)


def test_without_the_commit_pass_blocks_would_be_wrong() -> None:
    class Stale(BlockExact, abstract=True):
        def plan(self, state: DecodeState) -> Any:
            return StepPlan(state.in_block)

    options = {**PLAIN, "attention": "block"}
    plain = steps_of("llama", NoCache(), **options)
    assert not same(steps_of("llama", Stale(), **options), plain)


@every_model
def test_a_full_pass_through_the_slots_is_bit_equal_to_the_plain_model(name: str) -> None:  # E8
    state = started(name, prompts(2, 11), 13, attention="full")
    cached = CachedModel(layout_of(model(name)), DkvCache(), 2, 24)
    with torch.no_grad():
        ours = cached.step(state, torch.ones_like(state.masked)).logits.view(2, 24, -1)
        seen = {
            "causal_llama": torch.ones(2, 1, 24, 24, dtype=torch.bool),
            "llada2": torch.zeros(2, 1, 24, 24).double(),
        }
        extra = {"is_causal": False} if "llama" in name or name == "qwen" else {}
        theirs = model(name)(input_ids=state.ids, attention_mask=seen.get(name), **extra).logits
    assert torch.equal(ours, theirs)
    assert not any("forward" in vars(module) or "attention" in vars(module) for module in model(name).modules())


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_that_does_not_see_the_answer_is_kept_exactly(name: str) -> None:  # E7
    options = {**PLAIN, "attention": "prefix"}
    ids, lm = prompts(2, 11), model(name)
    plain = cachedit.generate(lm, ids, "no-cache", **options)
    if name != "llada":  # whose random weights say one token again and again, whatever they see
        assert not torch.equal(plain, cachedit.generate(lm, ids, "no-cache", **{**options, "attention": "full"}))
    for strategy in (DkvCache("prefill"), "auto"):
        assert torch.equal(cachedit.generate(lm, ids, strategy, **options), plain)
        run = cachedit.last_run(lm)
        last = int(name == "dream")  # of the prompt, whose logits are for the first answer token until that is decided
        assert run.steps[0].computed == 2 * 35
        assert all(2 * 24 <= step.computed <= 2 * (24 + last) for step in run.steps[1:])
        assert run.steps[-1].computed == 2 * 24
    with pytest.raises(UnsupportedModelError, match="prefix attention"):
        cachedit.generate(lm, ids, "block-exact", **options)


def test_rows_of_the_prompt_are_those_of_the_prompt_alone() -> None:
    """What "prefix" means: whatever the answer holds, the prompt computes the same."""
    state = started("llama", prompts(2, 11), 13, attention="prefix")
    cached = CachedModel(layout_of(model("llama")), NoCache(), 2, 24)
    with torch.no_grad():
        ours = cached.step(state, torch.ones_like(state.masked)).logits.view(2, 24, -1)
        alone = model("llama")(input_ids=state.ids[:, :11], is_causal=False).logits
    assert (ours[:, :11] - alone).abs().max() < 1e-12


def test_a_trained_prefix_model_gives_the_same_tokens() -> None:  # E7, on weights that were trained so half of the time
    lm = AutoModelForMaskedLM.from_pretrained(sample_path("text")).eval()
    tokenizer = AutoTokenizer.from_pretrained(sample_path("text"))
    ciphers = draw_ciphers(6, torch.Generator().manual_seed(1), held=True)
    plain = write(lm, tokenizer, ciphers, "no-cache", attention="prefix")
    assert write(lm, tokenizer, ciphers, DkvCache("prefill"), attention="prefix") == plain
    assert exact_match(plain, ciphers) > 0.5
    assert write(lm, tokenizer, ciphers, "auto", attention="prefix") == plain
    assert cachedit.last_run(lm).strategy == str(DkvCache("prefill"))  # not what a probe with full attention has found


def test_in_a_loop_that_is_not_ours_too() -> None:
    lm, ids = cachedit.wrap(llama(), "dkv-cache", variant="prefill", attention="prefix"), prompts(1, 11)
    row = torch.cat([ids, torch.full((1, 6), MASK)], 1)
    bare = CachedModel(layout_of(model("llama")), NoCache(), 1, 17)
    for at in range(11, 17):
        state = started("llama", ids, 6, attention="prefix")
        state.ids = row.clone()
        with torch.no_grad():
            logits = lm(input_ids=row).logits
            plain = bare.step(state, torch.ones_like(state.masked)).logits.view(1, 17, -1)
        assert (logits[:, at:] - plain[:, at:]).abs().max() < 1e-12
        row[0, at] = 5 + at
