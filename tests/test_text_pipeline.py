"""The cache in the place of a model's forward: diffusers' LLaDA2Pipeline, and loops that only call the model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from diffusers import BlockRefinementScheduler, LLaDA2Pipeline
from language_models import MASK, BlockCausal, dream, eurobert, llada, llama, model, prompts

import cachedit
from cachedit import UnsupportedModelError

CALL: dict[str, Any] = {
    "use_chat_template": False, "gen_length": 40, "block_length": 16, "num_inference_steps": 8, "temperature": 0.0,
    "sampling_method": "greedy", "threshold": 2.0, "editing_threshold": None, "eos_early_stop": False,
    "mask_token_id": MASK, "output_type": "seq",
}  # fmt: skip


def pipeline(block_length: int = 16, native: bool = True) -> Any:
    """A pipeline whose model is block-causal by itself, or has full attention."""
    lm: Any = llama()
    pipe = LLaDA2Pipeline(
        model=BlockCausal(lm, block_length).eval() if native else lm,
        scheduler=BlockRefinementScheduler(),
        tokenizer=None,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def padded(length: int = 21) -> dict[str, Any]:
    """Two prompts, the second one padded on the left."""
    ids = prompts(2, length)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    return {"input_ids": ids, "attention_mask": mask}


EDITING = {"editing_threshold": 0.02, "max_post_steps": 4}
PARALLEL = {"threshold": 0.2}
LONG = {"gen_length": 150}
ENDING = {"eos_early_stop": True, "eos_token_id": 33, "threshold": 0.05}


@pytest.mark.parametrize("block_length", [16, 32])
@pytest.mark.parametrize(
    "asked", [{}, EDITING, PARALLEL, LONG, ENDING], ids=["plain", "edit", "parallel", "long", "eos"]
)
def test_the_exact_cache_gives_identical_sequences(asked: dict[str, Any], block_length: int) -> None:  # E13
    pipe, call = pipeline(block_length), {**CALL, **padded(), **asked, "block_length": block_length}
    plain, before = pipe(**call).sequences, pipe.model.tokens
    cachedit.wrap(pipe, "block-exact")
    assert torch.equal(pipe(**call).sequences, plain)
    run = cachedit.last_run(pipe)
    assert run.status == "finished"
    assert run.strategy == "BlockExact()"
    assert run.tokens_total == before  # what the pipeline computes by itself
    assert run.tokens_computed < before
    assert cachedit.last_run(pipe.model) is run


def test_what_the_exact_cache_computes() -> None:
    pipe = cachedit.wrap(pipeline(), "block-exact", attention="block")
    pipe(**{**CALL, "input_ids": prompts(1, 21)})
    run = cachedit.last_run(pipe)
    # 21 + 40 on a grid of 16: windows of 32, 48 and 64; 11 masks take 6 steps of 2 tokens and one that finds none left,
    # which computes the finished block; after 8 steps the pipeline does not look again
    per_block = [7, 8, 8]
    assert [step.total for step in run.steps] == [32] * per_block[0] + [48] * per_block[1] + [64] * per_block[2]
    computed = [step.computed for step in run.steps]
    assert computed[:7] == [32] + [16] * 6
    assert computed[7:15] == [16] * 8
    assert computed[15:] == [32] + [16] * 7
    assert [step.committed for step in run.steps[:5]] == [2] * 5


def test_callbacks_may_change_tokens() -> None:
    def other(pipe: Any, step: int, timestep: int, kwargs: dict[str, Any]) -> dict[str, Any]:
        block = kwargs["block_x"].clone()
        if step == 4:
            block[:, 3] = 7  # of the prompt, two blocks back
        return {"block_x": block}

    pipe, call = pipeline(), {**CALL, **padded(), "callback_on_step_end": other}
    plain = pipe(**call).sequences
    assert torch.equal(cachedit.wrap(pipe, "block-exact")(**call).sequences, plain)


@pytest.mark.parametrize("strategy", ["no-cache", "dkv-cache", "fast-dllm"])
@pytest.mark.parametrize("native", [True, False], ids=["block", "full"])
def test_other_strategies_run_in_the_pipeline(strategy: str, native: bool) -> None:
    pipe, call = pipeline(native=native), {**CALL, **padded()}
    plain = pipe(**call).sequences
    out = cachedit.wrap(pipe, strategy)(**call).sequences
    assert out.shape == plain.shape
    run = cachedit.last_run(pipe)
    if strategy == "no-cache":
        assert torch.equal(out, plain)
        assert run.tokens_computed == run.tokens_total
    else:
        assert run.tokens_computed < run.tokens_total
    every = cachedit.wrap(pipe, "dkv-cache", interval=1)(**call).sequences
    assert torch.equal(every, plain)


def test_the_exact_cache_refuses_full_attention_before_the_first_step() -> None:
    pipe = cachedit.wrap(pipeline(native=False), "block-exact")
    with pytest.raises(UnsupportedModelError, match="full attention"):
        pipe(**CALL, **padded())
    assert cachedit.last_run(pipe) is None


def test_a_model_that_decodes_from_left_to_right_is_refused() -> None:
    pipe = pipeline(native=False)
    del pipe.model.config.is_causal
    for layer in pipe.model.model.layers:
        layer.self_attn.is_causal = True
    with pytest.raises(UnsupportedModelError, match="left to right"):
        cachedit.wrap(pipe, "dkv-cache")(**CALL, **padded())


def test_wrapping_again_replaces_and_unwrapping_leaves_nothing(tmp_path: Path) -> None:
    pipe, call = pipeline(), {**CALL, **padded()}
    cls, attributes, inner = type(pipe), set(vars(pipe)), set(vars(pipe.model))
    plain = pipe(**call).sequences
    attributes |= set(vars(pipe))
    for strategy in ("dkv-cache", "block-exact"):
        assert cachedit.wrap(pipe, strategy) is pipe
    assert torch.equal(pipe(**call).sequences, plain)
    assert torch.equal(pipe(**call).sequences, plain)  # a second run
    kept = cachedit.last_run(pipe)
    assert cachedit.unwrap(pipe) is pipe
    assert cachedit.last_run(pipe) is kept
    assert type(pipe) is cls
    assert set(vars(pipe)) == attributes
    assert set(vars(pipe.model)) == inner
    assert torch.equal(pipe(**call).sequences, plain)
    cachedit.unwrap(pipe)


def test_an_interrupted_run_leaves_the_next_one_alone() -> None:
    class Stop(Exception):
        pass

    def stop(pipe: Any, step: int, timestep: int, kwargs: dict[str, Any]) -> dict[str, Any]:
        if step == 9:
            raise Stop
        return {}

    pipe, call = pipeline(), {**CALL, **padded()}
    plain = pipe(**call).sequences
    cachedit.wrap(pipe, "block-exact")
    with pytest.raises(Stop):
        pipe(**call, callback_on_step_end=stop)
    assert cachedit.last_run(pipe).status == "aborted"
    assert torch.equal(pipe(**call).sequences, plain)
    assert cachedit.last_run(pipe).status == "finished"


def test_a_copy_is_independent() -> None:
    pipe, call = pipeline(), {**CALL, **padded()}
    plain = pipe(**call).sequences
    cachedit.wrap(pipe.model, "dkv-cache", interval=1, block_length=16)
    twin = copy.deepcopy(pipe.model)
    cachedit.unwrap(pipe.model)
    assert "forward" in vars(twin)
    twin_pipe = LLaDA2Pipeline(model=twin, scheduler=BlockRefinementScheduler(), tokenizer=None)
    twin_pipe.set_progress_bar_config(disable=True)
    assert torch.equal(twin_pipe(**call).sequences, plain)
    assert cachedit.last_run(pipe.model) is None
    assert cachedit.last_run(twin) is not None


# -- loops of other people's that only call the model -------------------------------------------------------------


@torch.no_grad()
def loop(lm: Any, ids: torch.Tensor, length: int, shift: int = 0) -> torch.Tensor:
    """The smallest loop of somebody else's: the whole sequence every time, the most confident mask is decided."""
    x = torch.cat([ids, torch.full((len(ids), length), MASK)], 1)
    for _ in range(length):
        logits = lm(x, attention_mask=None).logits
        if shift:
            logits = torch.cat([logits[:, :1], logits[:, :-1]], 1)
        confidence, tokens = logits[..., :MASK].softmax(-1).max(-1)
        place = confidence.masked_fill(x != MASK, -1).argmax(1, keepdim=True)
        x = x.scatter(1, place, tokens.gather(1, place))
    return x


@pytest.mark.parametrize("build", [llama, eurobert, llada, dream])
def test_a_model_that_is_wrapped_answers_a_loop_that_only_calls_it(build: Any) -> None:
    lm, ids, shift = build(), prompts(2, 9), int(build is dream)
    plain = loop(lm, ids, 14, shift)
    cachedit.wrap(lm, "dkv-cache", interval=1)
    for _ in range(2):  # the second run is recognised: what was decided is masked again
        assert torch.equal(loop(lm, ids, 14, shift), plain)
    cachedit.wrap(lm, "dkv-cache", interval=4)
    loop(lm, ids, 14, shift)
    run = cachedit.last_run(lm)
    assert run.nfe == 14
    assert run.tokens_computed < 14 * 2 * 23
    cachedit.unwrap(lm)
    assert torch.equal(loop(lm, ids, 14, shift), plain)


def test_a_wrapped_model_decodes_with_its_strategy_and_its_options() -> None:
    lm = cachedit.wrap(llama(), "fast-dllm", cache="dual", block_length=8)
    out = cachedit.generate(lm, prompts(1, 5), gen_length=16, block_length=8)
    assert cachedit.last_run(lm).strategy == "FastDLLM(cache='dual')"
    assert torch.equal(
        out, cachedit.generate(model("llama"), prompts(1, 5), "fast-dllm", cache="dual", gen_length=16, block_length=8)
    )
    cachedit.generate(lm, prompts(1, 5), "no-cache", gen_length=16)
    assert cachedit.last_run(lm).strategy == "NoCache()"


def test_training_goes_past_the_cache() -> None:
    lm: Any = cachedit.wrap(llama(), "dkv-cache")
    ids = prompts(1, 6)
    assert lm(input_ids=ids).logits.requires_grad
    assert cachedit.last_run(lm) is None
    lm.train()
    with torch.no_grad():
        assert lm(input_ids=ids).logits.abs().sum() > 0
    assert cachedit.last_run(lm) is None


@pytest.mark.parametrize("strategy", ["auto", "dkv-cache", "no-cache"])
def test_a_canvas_that_keeps_its_own_cache_is_refused_with_the_reason(strategy: str) -> None:
    if not hasattr(transformers, "DiffusionGemmaConfig") or not hasattr(diffusers, "DiffusionGemmaPipeline"):
        pytest.skip("older than DiffusionGemma")
    small = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    text = transformers.DiffusionGemmaTextConfig(
        **small, vocab_size=97, head_dim=8, global_head_dim=8, num_hidden_layers=1, num_experts=2, top_k_experts=1,
        moe_intermediate_size=8, layer_types=["full_attention"],
    )  # fmt: skip
    vision = transformers.Gemma4VisionConfig(**small, head_dim=8, num_hidden_layers=1)
    config = transformers.DiffusionGemmaConfig(
        text_config=text, vision_config=vision, canvas_length=16, image_token_id=90
    )
    lm = transformers.DiffusionGemmaForBlockDiffusion(config)
    pipe = diffusers.DiffusionGemmaPipeline(lm, BlockRefinementScheduler(), None)
    for target in (lm, pipe):
        before = dict(vars(target))
        with pytest.raises(UnsupportedModelError, match="keeps itself, exactly"):
            cachedit.wrap(target, strategy)
        assert vars(target) == before
    with pytest.raises(UnsupportedModelError, match="denoises a canvas"):
        cachedit.generate(lm, prompts(1, 5), strategy)
