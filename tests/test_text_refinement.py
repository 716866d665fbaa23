"""Block refinement with editing: our loop decodes what diffusers' LLaDA2Pipeline decodes, with every cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from language_models import MASK, BlockCausal, llama, model, prompts
from test_text_batch import VARIANTS, options_of, padded
from test_text_pipeline import CALL, pipeline

import cachedit
from cachedit.text import DecodeState, stream
from cachedit.text.commit import BlockRefinement

P, G, BLOCK = 21, 43, 16  # the first block is partly prompt, and the last one is whole


class NeverMask(BlockCausal):
    """Block-causal, and never proposes the mask token: the pipeline would take it, and our loop does not."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = super().forward(*args, **kwargs)
        found.logits[..., MASK] = -1e9
        return found


def refined(steps: int = 8, threshold: float = 2.0, editing: float | None = None, post: int = 16) -> dict[str, Any]:
    return {
        "refinement_steps": steps, "threshold": threshold, "editing_threshold": editing, "max_post_steps": post,
        "gen_length": G, "block_length": BLOCK, "attention": "block",
    }  # fmt: skip


def of_the_pipeline(lm: Any, ids: torch.Tensor, asked: dict[str, Any], **more: Any) -> torch.Tensor:
    pipe = pipeline(BLOCK)
    pipe.model = lm
    call = {name: asked[name] for name in ("threshold", "editing_threshold", "max_post_steps")}
    call |= {"num_inference_steps": asked["refinement_steps"], "gen_length": G, "block_length": BLOCK}
    found: torch.Tensor = pipe(**{**CALL, **call, **more}, input_ids=ids).sequences
    return found


SETTINGS = [
    refined(),
    refined(threshold=0.1),
    refined(steps=3, threshold=0.03),
    refined(editing=0.02, post=0),
    refined(editing=0.02, post=3),
    refined(editing=0.05),
    refined(threshold=0.1, editing=0.05),
    refined(steps=16, editing=0.02),  # every step is used up by masks in a block that is all answer
    refined(steps=30, threshold=0.1, editing=0.02, post=3),  # more steps than tokens
]


@pytest.mark.parametrize("asked", SETTINGS)
def test_tokens_are_those_of_the_pipeline_with_and_without_the_exact_cache(asked: dict[str, Any]) -> None:
    lm, ids = NeverMask(llama(), BLOCK).eval(), prompts(1, P)
    expected = of_the_pipeline(lm, ids, asked)
    passed = lm.tokens
    for strategy in ("no-cache", "block-exact"):
        assert torch.equal(cachedit.generate(lm, ids, strategy, **asked)[:, P:], expected)
        run = cachedit.last_run(lm)
        assert run.tokens_committed == G
        if asked["editing_threshold"]:  # without editing the pipeline looks once more at a finished block, in vain
            assert run.tokens_total == passed
    assert run.tokens_computed < run.tokens_total


def test_editing_changes_tokens() -> None:
    lm, ids = NeverMask(llama(), BLOCK).eval(), prompts(1, P)
    events = list(stream(lm, ids, "block-exact", **refined(editing=0.02)))
    before = [event.sequences for event in events[:-1]]
    edits = sum(
        int((event.committed & (earlier != MASK)).sum()) for earlier, event in zip(before, events[1:], strict=True)
    )
    assert edits > 0
    for earlier, event in zip(before, events[1:], strict=True):
        assert torch.equal(event.committed, earlier != event.sequences)
        assert not bool(event.committed[:, :P].any())
    assert not torch.equal(events[-1].sequences, cachedit.generate(lm, ids, "block-exact", **refined()))


def test_it_ends_where_the_pipeline_ends() -> None:
    lm, ids, asked = NeverMask(llama(), BLOCK).eval(), prompts(1, P), refined(threshold=0.05, editing=0.05)
    end = int(of_the_pipeline(lm, ids, asked)[0, 20])
    expected = of_the_pipeline(lm, ids, asked, eos_early_stop=True, eos_token_id=end)[0].tolist()
    found = cachedit.generate(lm, ids, "block-exact", eos_token_id=end, pad_token_id=0, **asked)[0, P:].tolist()
    stop = expected.index(end) + 1
    assert found[:stop] == expected[:stop]
    assert found[stop:] == [0] * (G - stop)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "dkv greedy"])
def test_rows_of_a_batch_are_edited_as_alone_by_every_strategy(variant: str) -> None:
    strategy, options = options_of(variant)
    options |= {"refinement_steps": 4, "threshold": 0.1, "editing_threshold": 0.02, "max_post_steps": 3}
    rows = [prompts(1, length, seed=length)[0] for length in (5, 9)]
    ids, mask = padded(rows, "left")
    together = cachedit.generate(model("llama"), ids, strategy, attention_mask=mask, **options)
    assert cachedit.last_run(model("llama")).tokens_committed == 2 * 21
    assert not bool((together == MASK).any())
    for i, row in enumerate(rows):
        alone = cachedit.generate(model("llama"), row, strategy, **options)
        assert torch.equal(together[i, ids.shape[1] :], alone[0, len(row) :])


def by_hand(ids: list[int], masked: list[bool], confidence: list[float], proposed: list[int]) -> DecodeState:
    """One block of four tokens, the first of them prompt."""
    row = torch.tensor([ids])
    seen, zeros = torch.ones_like(row, dtype=torch.bool), torch.zeros_like(row)
    found = DecodeState(row, seen, seen, zeros, zeros, torch.tensor([masked]))
    found.confidence, found.proposed = torch.tensor([confidence]), torch.tensor([proposed])
    return found


def test_what_a_step_decides_and_changes() -> None:
    rule = BlockRefinement(block_length=4, steps=2, threshold=0.9, editing_threshold=0.5, max_post_steps=1)
    at = by_hand([5, 9, 9, 9], [False, True, True, True], [0.99, 0.4, 0.3, 0.2], [7, 1, 2, 3])
    rule.begin(at, [None])

    def step(confidence: list[float], proposed: list[int]) -> list[int]:
        at.confidence, at.proposed, at.editable = (
            torch.tensor([confidence]),
            torch.tensor([proposed]),
            rule.editable(at),
        )
        picked = rule.select(at)
        at.commit(picked, at.proposed)
        rule.after(at)
        at.enter_blocks()
        return at.ids[0].tolist()

    assert step([0.99, 0.4, 0.3, 0.2], [7, 1, 2, 3]) == [5, 1, 2, 9]  # two of four a step; the prompt stays
    assert at.held.tolist() == [True]
    assert step([0.99, 0.5, 0.6, 0.2], [7, 4, 4, 3]) == [5, 1, 4, 3]  # above 0.5, not at it
    assert at.held.tolist() == [False]  # both steps are used up
    assert at.done.tolist() == [True]


def test_further_steps_are_counted() -> None:
    rule = BlockRefinement(block_length=4, steps=8, threshold=0.1, editing_threshold=0.5, max_post_steps=1)
    at = by_hand([5, 9, 9, 9], [False, True, True, True], [0.0, 0.9, 0.9, 0.9], [5, 1, 1, 1])
    rule.begin(at, [None])
    held = []
    for token in (1, 2, 3, 4):
        at.proposed, at.editable = torch.tensor([[5, token, token, token]]), rule.editable(at)
        at.commit(rule.select(at), at.proposed)
        rule.after(at)
        at.enter_blocks()
        held.append(bool(at.held))
        if not held[-1]:
            break
    assert held == [True, True, False]  # one with masks, and two that changed something: one may be followed by another
    assert at.ids.tolist() == [[5, 3, 3, 3]]


@pytest.mark.parametrize(
    "asked",
    [
        {"editing_threshold": 0.5},
        {"refinement_steps": 0},
        {"refinement_steps": 4, "steps": 8},
        {"refinement_steps": 4, "factor": 1.0},
        {"refinement_steps": 4, "order": "random"},
        {"refinement_steps": 4, "editing_threshold": -1.0},
        {"refinement_steps": 4, "max_post_steps": -1},
    ],
)
def test_what_does_not_go_together_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="allowed"):
        cachedit.generate(model("llama"), prompts(1, 5), "no-cache", **asked)
