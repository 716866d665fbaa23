"""What each strategy must equal at the ends of its options (E9), and what it computes in between."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from language_models import model, prompts, stepwise

import cachedit
from cachedit import UnsupportedModelError
from cachedit.strategies.d2_cache import rollout

P, G, B = 10, 24, 8
OPTIONS: dict[str, Any] = {"gen_length": G, "block_length": B}
every_model = pytest.mark.parametrize("name", ["llama", "qwen", "eurobert"])


def logits_of(name: str, strategy: Any, **options: Any) -> list[torch.Tensor]:
    """Logits of the tokens asked for, step by step, and the tokens at the end."""
    return stepwise(model(name), prompts(2, P), strategy, **{**OPTIONS, **options})


@functools.cache
def plain(name: str, attention: str | None = None) -> list[torch.Tensor]:
    return logits_of(name, "no-cache", attention=attention)


def close(ours: list[torch.Tensor], theirs: list[torch.Tensor], tolerance: float = 1e-10) -> bool:
    """Equal tokens, and logits that differ by no more than another order of sums makes."""
    same = torch.equal(ours[-1], theirs[-1])
    pairs = zip(ours[:-1], theirs[:-1], strict=True)
    return same and all(a.shape == b.shape and bool((a - b).abs().max() < tolerance) for a, b in pairs)


def computed(strategy: str, name: str = "llama", **options: Any) -> list[int]:
    cachedit.generate(model(name), prompts(1, P), strategy, **{**OPTIONS, **options})
    return [step.computed for step in cachedit.last_run(model(name)).steps]


@every_model
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("d2-cache", {"masks": G, "share": 1}),
        ("dllm-cache", {"prompt_interval": 1, "answer_interval": 1}),
        ("entropy-cache", {"limit": 0.0}),
        ("mage", {"keys": 0, "block_length": 1}),
        ("sparse-dllm", {"share": 0.0, "block_length": 1}),
    ],
)
def test_with_everything_fresh_it_is_no_cache(name: str, strategy: str, options: dict[str, Any]) -> None:
    length = options.get("block_length", B)
    theirs = plain(name) if length == B else logits_of(name, "no-cache", block_length=length)
    assert close(logits_of(name, strategy, **options), theirs)


@every_model
def test_a_part_as_long_as_the_block_is_exact(name: str) -> None:
    assert close(logits_of(name, "fast-dllm-v2", part=B, attention="block"), plain(name, "block"))
    assert not close(logits_of(name, "fast-dllm-v2", part=2, attention="block"), plain(name, "block"))


def test_parts_are_decoded_in_turn_and_the_block_is_computed_where_a_part_starts() -> None:
    # an aligned prompt: 8 tokens, then blocks of 8 in parts of 4, decided one by one. On entering a block also the one
    # before; at the first step of a part and while its first token is masked the block, else the part
    ids, order = prompts(1, 8), {"order": "random", "generator": torch.Generator().manual_seed(0)}
    events = list(
        cachedit.text.stream(model("llama"), ids, "fast-dllm-v2", part=4, attention="block", **OPTIONS, **order)
    )
    for index, event in enumerate(events):
        slots = event.committed[0].nonzero()[:, 0].tolist()
        assert [slot // 4 for slot in slots] == [2 + index // 4]
        block = 1 + index // 8
        first = event.sequences[0, 4 * (2 + index // 4)] == 96 or slots == [4 * (2 + index // 4)]
        part = {*range(4 * (2 + index // 4), 4 * (3 + index // 4))}
        whole = {*range(8 * block, 8 * block + 8)}
        found = set(event.computed[0].nonzero()[:, 0].tolist())
        before = {slot for slot in found if slot < 8 * block}
        assert before == ({*range(8 * block - 8, 8 * block)} if index % 8 == 0 else set())
        if first or index % 8 == 0:
            assert whole <= found
        else:
            assert part <= found
            assert len(found) <= 5  # and what the part before decided last


@every_model
def test_sparse_with_all_keys_is_dual_filled_one_step_later(name: str) -> None:
    from cachedit.strategies.fast_dllm import FastDLLM
    from cachedit.text import DecodeState, StepPlan

    class Delayed(FastDLLM, abstract=True):
        def plan(self, state: DecodeState) -> StepPlan:
            return StepPlan(state.in_block | (state.block_step < 2)[:, None])

    assert close(logits_of(name, "sparse-dllm", share=1.0), logits_of(name, Delayed("dual")))
    assert not close(logits_of(name, "sparse-dllm", share=0.2), logits_of(name, Delayed("dual")))


def test_sparse_keeps_the_best_keys_of_every_layer() -> None:
    from cachedit.strategies.sparse_dllm import SparseDLLM
    from cachedit.text.listening import LayerView

    kept: list[int] = []
    reads = SparseDLLM.reads

    def noted(self: SparseDLLM, view: LayerView) -> torch.Tensor | None:
        found = reads(self, view)
        kept.append(view.keys.shape[2] if found is None else int(found.sum()))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SparseDLLM, "reads", noted)
        counts = computed("sparse-dllm")
    full = P + G
    assert counts == ([full] * 2 + [B] * 6) * 3
    assert kept == ([full] * 6 + [B + (full - B) // 2] * 18) * 3  # half of the 26 keys outside, in 3 layers


@every_model
def test_mage_with_all_keys_is_dual(name: str) -> None:
    assert close(logits_of(name, "mage", keys=1000), logits_of(name, "fast-dllm", cache="dual"))
    assert not close(logits_of(name, "mage", keys=2), logits_of(name, "fast-dllm", cache="dual"))


def test_the_swept_rollout_is_the_product_of_the_matrices() -> None:
    generator = torch.Generator().manual_seed(0)
    slots = torch.tensor([[3, 0, 5], [1, 6, 1]])  # the second row is filled up with its first token
    real = [[3, 0, 5], [1, 6]]
    layers = [torch.rand(2, 3, 7, generator=generator, dtype=torch.float64).softmax(-1) for _ in range(4)]
    for layer in layers:
        layer[1, 2] = layer[1, 0]
    for row in range(2):
        product = torch.eye(7, dtype=torch.float64)
        for layer in layers:
            matrix = torch.eye(7, dtype=torch.float64)
            for query, slot in enumerate(real[row]):
                matrix[slot] = (matrix[slot] + layer[row, query]) / 2
            product = matrix @ product
        assert torch.allclose(rollout(slots, layers)[row], product.sum(0), atol=1e-14)


def test_d2_computes_likely_masks_and_some_decided_tokens() -> None:
    counts = computed("d2-cache", masks=6, share=0.0)
    assert counts[0] == P + G
    # six masks as long as there are so many, the one just decided, and one decided token of the highest rollout
    assert all(min(6, G - step) + 1 <= found <= min(6, G - step) + 2 for step, found in enumerate(counts) if step)


def test_entropy_below_the_limit_computes_masks_and_the_newest() -> None:
    counts = computed("entropy-cache", limit=100.0, recent=3)
    assert counts[0] == P + G
    assert counts[1:] == [B - step % B + min(3, step) for step in range(1, G)]


def test_dllm_computes_shares_by_layer() -> None:
    # three layers, the first always whole: a refresh of the answer costs 34 + 24 + 24, between them 34 + 6 + 6
    assert computed("dllm-cache", prompt_interval=50, answer_interval=4, share=0.25) == [
        34 if step == 0 else round((34 + 24 + 24) / 3) if step % 4 == 0 else round((34 + 6 + 6) / 3)
        for step in range(G)
    ]


@every_model
def test_elastic_without_refresh_and_a_window_over_all_is_decode_in_its_order(name: str) -> None:
    assert computed("elastic-cache", name, window=G, limit=-2.0, watched=1)[0] == P + G
    counts = computed("elastic-cache", name, window=4, limit=-2.0)[1:]
    # the window, the one just decided, and at most one watched token per layer
    assert all(min(4, G - step) + 1 <= found <= min(4, G - step) + 1 + 3 for step, found in enumerate(counts, 1))


def test_elastic_above_one_computes_all_layers_but_the_first() -> None:
    never, always = (computed("elastic-cache", window=4, limit=limit) for limit in (-2.0, 2.0))
    for step, found in enumerate(always):
        few = never[step] if step else P + G
        assert found >= few
        if step:
            assert found >= round((P + G) * 2 / 3)


@pytest.mark.parametrize("steps", [3, 5, 12])
def test_a_window_over_blocks_takes_the_steps_that_are_asked_for(steps: int) -> None:
    assert len(computed("elastic-cache", steps=steps)) == steps


@every_model
@pytest.mark.parametrize("strategy", ["elastic-cache", "dllm-cache"])
def test_strategies_inside_the_layers_leave_the_model_as_it_was(name: str, strategy: str) -> None:
    before = {path: set(vars(module)) for path, module in model(name).named_modules()}
    hooks = sum(len(module._forward_pre_hooks) for module in model(name).modules())
    cachedit.generate(model(name), prompts(2, P), strategy, **OPTIONS)
    assert {path: set(vars(module)) for path, module in model(name).named_modules()} == before
    assert sum(len(module._forward_pre_hooks) for module in model(name).modules()) == hooks
    assert getattr(model(name).config, "_attn_implementation", None) == "sdpa"


@pytest.mark.parametrize("strategy", ["elastic-cache", "dllm-cache"])
@pytest.mark.parametrize("name", ["llada", "dream"])
def test_strategies_inside_the_layers_refuse_layers_that_they_do_not_know(name: str, strategy: str) -> None:
    with pytest.raises(UnsupportedModelError, match="works inside the layers"):
        cachedit.generate(model(name), prompts(1, P), strategy, **OPTIONS)
