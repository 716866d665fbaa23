"""generate and stream: what is computed, in closed form; what is told on the way; and what is refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from language_models import MASK, causal_llama, model, prompts

import cachedit
from cachedit import UnsupportedModelError

P, G, B = 10, 24, 8
OPTIONS: dict[str, Any] = {"gen_length": G, "block_length": B}


def computed(strategy: str, name: str = "llama", **options: Any) -> list[int]:
    """Tokens computed at every step."""
    cachedit.generate(model(name), prompts(1, P), strategy, **{**OPTIONS, **options})
    return [step.computed for step in cachedit.last_run(model(name)).steps]


def masks(steps: Iterable[int]) -> list[int]:
    """Masked tokens at the start of these steps, one commit each."""
    return [G - step for step in steps]


@pytest.mark.parametrize("interval", [1, 2, 5, 100])
def test_decode_computes_the_masks_and_what_was_just_decided(interval: int) -> None:
    expected = [P + G if step % interval == 0 else G - step + 1 for step in range(G)]
    assert computed("dkv-cache", interval=interval) == expected


def test_prefill_computes_the_answer() -> None:
    assert computed("dkv-cache", variant="prefill") == [P + G] + [G] * (G - 1)


def test_pd_refreshes_the_answer_alone() -> None:
    expected = [P + G] + [G if step % 4 == 0 else G - step + 1 for step in range(1, G)]
    assert computed("dkv-cache", variant="pd", interval=4) == expected


@pytest.mark.parametrize("window", [0, 3, 100])
def test_greedy_computes_what_is_decided_now_and_before_and_a_window(window: int) -> None:
    found = computed("dkv-cache", variant="greedy", interval=6, window=window, order="random")
    expected = [P + G if step % 6 == 0 else 1 + 1 + min(window, G - step - 1) for step in range(G)]
    assert found == expected


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_a_block_costs_one_full_pass(cache: str) -> None:
    expected = []
    for start in range(0, G, B):
        part = B if cache == "dual" else G - start
        expected += [P + G] + [part] * (B - 1)
    assert computed("fast-dllm", cache=cache) == expected


def test_a_shift_keeps_the_token_before_a_mask() -> None:
    # the masks and the one just decided, and the token before the one that is decided now unless it is one of them
    plain = computed("dkv-cache", "dream", interval=100, order="random", generator=torch.Generator().manual_seed(0))
    assert plain[0] == P + G
    assert all(0 <= found - (G - step + 1) <= 1 for step, found in enumerate(plain) if step)


def test_greedy_with_an_endless_window_is_decode() -> None:
    options = {**OPTIONS, "order": "random", "interval": 1000}
    tokens = [
        cachedit.generate(
            model("llama"), prompts(1, P), "dkv-cache", generator=torch.Generator().manual_seed(3), **options, **variant
        )
        for variant in ({"variant": "decode"}, {"variant": "greedy", "window": 1000})
    ]
    assert torch.equal(*tokens)


def test_a_stream_tells_what_every_step_did() -> None:
    ids, seen = prompts(2, P), torch.zeros(2, P + G, dtype=torch.bool)
    events = list(cachedit.text.stream(model("llama"), ids, "dkv-cache", threshold=0.5, **OPTIONS))
    before = torch.cat([ids, torch.full((2, G), MASK)], 1)
    for index, event in enumerate(events):
        assert event.step == index
        assert event.prompt_length == P
        assert event.tokens_computed == int(event.computed.sum())
        assert torch.equal(event.sequences != before, event.committed)
        assert not bool((event.committed & seen).any())
        assert bool(((event.confidence > 0) == event.committed).all())
        assert event.finished == (index == len(events) - 1)
        before, seen = event.sequences, seen | event.committed
    assert bool(seen[:, P:].all())
    run = cachedit.last_run(model("llama"))
    assert run.nfe == len(events)
    assert run.tokens_committed == 2 * G
    assert run.tokens_computed == sum(event.tokens_computed for event in events)
    assert run.status == "finished"
    assert run.token_ratio == run.tokens_total / run.tokens_computed
    assert '"token_ratio"' in run.to_json()
    assert f"{run.tokens_committed} tokens committed" in str(run)


def test_a_closed_stream_is_an_aborted_run_and_the_next_is_right() -> None:
    lm, ids = model("llama"), prompts(1, P)
    plain = cachedit.generate(lm, ids, "dkv-cache", **OPTIONS)
    events = cachedit.text.stream(lm, ids, "dkv-cache", **OPTIONS)
    for _ in range(3):
        next(events)
    events.close()  # type: ignore[attr-defined]
    run = cachedit.last_run(lm)
    assert (run.status, run.nfe) == ("aborted", 3)
    assert torch.equal(cachedit.generate(lm, ids, "dkv-cache", **OPTIONS), plain)


def test_two_streams_of_one_model_do_not_mix() -> None:
    lm = model("llama")
    kinds = [("fast-dllm", prompts(1, P, seed=5)), ("dkv-cache", prompts(1, P, seed=6))]
    alone = [cachedit.generate(lm, ids, strategy, **OPTIONS) for strategy, ids in kinds]
    both = [cachedit.text.stream(lm, ids, strategy, **OPTIONS) for strategy, ids in kinds]
    last = list(zip(*both, strict=True))[-1]
    for event, plain in zip(last, alone, strict=True):
        assert torch.equal(event.sequences, plain)


def test_a_model_that_is_causal_by_default_gets_full_attention() -> None:
    options = {**OPTIONS, "gen_length": 8}
    ours = cachedit.generate(causal_llama(), prompts(1, P), "no-cache", **options)
    assert torch.equal(ours, cachedit.generate(model("llama"), prompts(1, P), "no-cache", **options))


def test_memory_is_that_of_the_slots() -> None:
    cachedit.generate(model("llama"), prompts(2, P), "dkv-cache", **OPTIONS)
    assert (
        cachedit.last_run(model("llama")).cache_bytes_peak == 2 * 3 * 2 * 2 * (P + G) * 8 * 8
    )  # K and V, layers, rows
    cachedit.generate(model("llama"), prompts(2, P), "no-cache", **OPTIONS)
    assert cachedit.last_run(model("llama")).cache_bytes_peak == 0


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        ({"strategy": "block-exact"}, UnsupportedModelError, "attention='block'"),
        ({"strategy": "dkv-cache", "variant": "greedy"}, ValueError, "order='random'"),
        ({"strategy": "dkv-cache", "variant": "x"}, ValueError, "allowed"),
        ({"strategy": "fora"}, ValueError, "no strategy for text"),
        ({"strategy": "dkv-cache", "windo": 3}, TypeError, "windo"),
        ({"gen_length": 0}, ValueError, "gen_length"),
        ({"steps": 2}, ValueError, "3 blocks"),
        ({"temperature": -1.0}, ValueError, "temperature"),
        ({"attention_mask": torch.ones(1, 3)}, ValueError, "attention_mask"),
        ({"generator": [torch.Generator()] * 2}, ValueError, "generators"),
        ({"attention": "half"}, ValueError, "attention"),
        ({"input_ids": torch.ones(1, 3)}, ValueError, "integers"),
    ],
)
def test_what_is_impossible_is_said_before_the_first_step(changed: Any, error: type[Exception], said: str) -> None:
    call = {"input_ids": prompts(1, P), "strategy": "no-cache", **OPTIONS, **changed}
    with pytest.raises(error, match=said):
        cachedit.text.stream(model("llama"), **call)


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="no attention that a text cache knows"):
        cachedit.generate(torch.nn.Linear(2, 2), prompts(1, P), "no-cache")
    with pytest.raises(UnsupportedModelError, match="language model"):
        cachedit.wrap(object(), "dkv-cache")
    lm: Any = causal_llama()
    del lm.config.mask_token_id
    with pytest.raises(ValueError, match="mask_token_id"):
        cachedit.generate(lm, prompts(1, P), "no-cache")


def test_an_empty_prompt_needs_logits_for_its_own_place() -> None:
    assert cachedit.generate(model("llama"), prompts(1, 0), "dkv-cache", **OPTIONS).shape == (1, G)
    with pytest.raises(ValueError, match="empty prompt"):
        cachedit.generate(model("dream"), prompts(1, 0), "dkv-cache", **OPTIONS)
