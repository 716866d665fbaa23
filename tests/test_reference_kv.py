"""Reference images of FLUX.1 Kontext and QwenImage edit that are computed every few steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    FluxKontextPipeline,
    FluxTransformer2DModel,
    QwenImageTransformer2DModel,
)
from torch import nn

import cachedit
from cachedit import UnsupportedModelError
from zoo.built import text_embeds
from zoo.draw import Draw, settle
from zoo.image_pipelines import flux_kwargs, flux_parts, sd3

PIXELS, TOKENS = 256, 16  # 16 x 16 pixels are 4 x 4 tokens, and as many of the reference


@pytest.fixture
def pipe() -> Any:
    pipe = FluxKontextPipeline(**flux_parts())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def made(pipe: Any, steps: int = 10, **more: Any) -> torch.Tensor:
    """Latents of an edit; the reference comes as latents, which Kontext does not encode again."""
    arguments = {
        **flux_kwargs(),
        "image": Draw(7, 1)(1, 8, 8),
        "max_area": PIXELS,
        "num_inference_steps": steps,
        "generator": torch.Generator().manual_seed(0),
        **more,
    }
    return pipe(**arguments)[0]


def negative() -> dict[str, Any]:
    return {
        **text_embeds("negative_", seed=1),
        "negative_pooled_prompt_embeds": Draw(1001, 1)(16),
        "true_cfg_scale": 3.0,
    }


def far(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("guided", [False, True])
def test_with_an_interval_of_one_the_pipeline_is_bit_equal(pipe: Any, guided: bool) -> None:
    more = negative() if guided else {}
    stock = made(pipe, **more)
    cachedit.wrap(pipe, "reference-kv", interval=1)
    assert torch.equal(made(pipe, **more), stock)
    run = cachedit.last_run(pipe)
    assert (run.status, run.reused_steps, run.drift > 0) == ("finished", (), True)
    assert [call.tokens for call in run.calls] == [2 * TOKENS] * 10 * (1 + guided)


@pytest.mark.parametrize("guided", [False, True])
def test_references_are_left_out_between_the_steps_that_compute_them(pipe: Any, guided: bool) -> None:
    more = negative() if guided else {}
    stock = made(pipe, **more)
    cachedit.wrap(pipe, "reference-kv", interval=3)
    ours = made(pipe, **more)
    run = cachedit.last_run(pipe)
    # 2 first steps, then 2, 5, 8, and the last
    assert run.reused_steps == (3, 4, 6, 7)
    assert [call.branch for call in run.calls] == [0, 1] * 10 if guided else [0] * 10
    assert all(call.tokens + call.reused == 2 * TOKENS for call in run.calls)
    assert run.cache_bytes_peak == (1 + guided) * 5 * 2 * TOKENS * 32 * 4  # banks, layers, K and V, tokens, width
    assert ours.shape == stock.shape
    assert 0 < far(ours, stock) < 0.1
    assert "read from banks" in str(run)
    assert '"reused_steps": [3, 4, 6, 7]' in run.to_json()


def test_a_step_like_the_one_before_is_exact(pipe: Any) -> None:
    """A schedule that stands still, with a model that sees the same: what is read is what would be computed."""
    model = pipe.transformer
    inputs = {
        "hidden_states": Draw(3, 1)(2 * TOKENS, 4), "encoder_hidden_states": Draw(4, 1)(6, 16),
        "pooled_projections": Draw(5, 1)(16), "timestep": torch.tensor([0.5]), "guidance": torch.tensor([3.5]),
        "txt_ids": torch.zeros(6, 3), "img_ids": torch.cat([torch.zeros(TOKENS, 3), torch.ones(TOKENS, 3)]),
        "return_dict": False,
    }  # fmt: skip
    with torch.no_grad():
        stock = model(**inputs)[0]
        session = cachedit.wrap(pipe, "reference-kv", interval=3, first=0, last=0).__dict__["_cachedit_conditions"]
        pipe.scheduler.set_timesteps(10)

        def twice() -> tuple[torch.Tensor, torch.Tensor]:
            found = []
            for step in range(2):
                pipe.scheduler._step_index = step
                found.append(model(**inputs)[0])
            return found[0], found[1]

        fresh, reused = session.call(pipe, twice)
    assert torch.equal(fresh, stock)
    assert session.run.reused_steps == (1,)
    assert far(reused[:, :TOKENS], stock[:, :TOKENS]) < 1e-6
    assert torch.equal(reused[:, TOKENS:], torch.zeros_like(reused[:, TOKENS:]))


@pytest.mark.parametrize("zero_cond_t", [False, True])
def test_qwenimage_with_a_reference_larger_than_the_image_is_exact_too(zero_cond_t: bool) -> None:
    """QwenImage places the text beside the largest image of the sequence, also where that image is left out."""
    torch.manual_seed(0)
    model: Any = settle(
        QwenImageTransformer2DModel(
            patch_size=2, in_channels=16, out_channels=4, num_layers=3, num_attention_heads=2, attention_head_dim=16,
            joint_attention_dim=16, axes_dims_rope=(4, 6, 6), zero_cond_t=zero_cond_t,
        )
    )  # fmt: skip
    pipe = Parts(model)
    inputs = {
        "hidden_states": Draw(3, 1)(4 + 16, 16), "encoder_hidden_states": Draw(4, 1)(6, 16),
        "timestep": torch.tensor([0.5]), "img_shapes": [[(1, 2, 2), (1, 4, 4)]], "return_dict": False,
    }  # fmt: skip
    with torch.no_grad():
        stock = model(**inputs)[0]
        cachedit.wrap(pipe, "reference-kv", interval=3, first=0, last=0)
        found = pipe(inputs)
    assert torch.equal(found[0], stock)
    assert far(found[1][:, :4], stock[:, :4]) < 1e-6
    assert cachedit.last_run(pipe).reused_steps == (1,)


class Parts:
    """As much of a pipeline as calls its model twice with the same inputs."""

    def __init__(self, transformer: nn.Module) -> None:
        self.transformer, self.scheduler = transformer, FlowMatchEulerDiscreteScheduler()
        self.scheduler.set_timesteps(10)

    def __call__(self, inputs: dict[str, Any]) -> list[torch.Tensor]:
        found = []
        for step in range(2):
            self.scheduler._step_index = step
            found.append(self.transformer(**inputs)[0])
        return found


def test_drift_beyond_the_limit_ends_reuse(pipe: Any) -> None:
    made(cachedit.wrap(pipe, "reference-kv", max_drift=0.0))
    run = cachedit.last_run(pipe)
    assert run.reused_steps == ()
    assert run.drift > 0
    made(cachedit.wrap(pipe, "reference-kv", max_drift=100.0))
    assert cachedit.last_run(pipe).reused_steps == (3, 4, 6, 7)


@pytest.mark.parametrize(("steps", "reused"), [(4, ()), (8, (3, 5))])
def test_short_runs_reuse_little(pipe: Any, steps: int, reused: tuple[int, ...]) -> None:
    made(cachedit.wrap(pipe, "reference-kv", interval=4), steps)
    assert cachedit.last_run(pipe).reused_steps == reused


def test_a_run_that_fails_leaves_nothing_and_the_next_begins_anew(pipe: Any) -> None:
    cachedit.wrap(pipe, "reference-kv")
    first = made(pipe)

    def stop(pipe: Any, step: int, *_: Any) -> dict[str, Any]:
        if step == 3:
            raise KeyboardInterrupt
        return {}

    with pytest.raises(KeyboardInterrupt):
        made(pipe, callback_on_step_end=stop)
    assert cachedit.last_run(pipe).aborted
    assert pipe.__dict__["_cachedit_conditions"].banks == {}
    assert torch.equal(made(pipe), first)
    assert not cachedit.last_run(pipe).aborted


def test_unwrap_gives_back_what_it_was_and_a_copy_is_independent(pipe: Any) -> None:
    stock, model = made(pipe), pipe.transformer
    before = [block.attn.processor for block in (*model.transformer_blocks, *model.single_transformer_blocks)]
    twin = copy.deepcopy(cachedit.wrap(pipe, "reference-kv"))
    cachedit.wrap(pipe, "reference-kv", interval=2)  # replaces
    made(twin)
    assert cachedit.last_run(pipe) is None
    cachedit.unwrap(pipe)
    assert (type(pipe), type(model)) == (FluxKontextPipeline, FluxTransformer2DModel)
    assert "_cachedit_conditions" not in pipe.__dict__ | model.__dict__
    after = [block.attn.processor for block in (*model.transformer_blocks, *model.single_transformer_blocks)]
    assert all(ours is theirs for ours, theirs in zip(after, before, strict=True))
    assert torch.equal(made(pipe), stock)
    made(twin)
    assert cachedit.last_run(twin).reused_steps == (3, 4, 6, 7)


def test_without_a_reference_nothing_changes(pipe: Any) -> None:
    stock = made(pipe, image=None)
    assert torch.equal(made(cachedit.wrap(pipe, "reference-kv"), image=None), stock)


def test_what_cannot_be_wrapped_is_refused_untouched(pipe: Any) -> None:
    other = sd3().pipe
    with pytest.raises(UnsupportedModelError, match="SD3Transformer2DModel cannot attend to a bank"):
        cachedit.wrap(other, "reference-kv")
    assert "_cachedit_conditions" not in other.__dict__
    with pytest.raises(ValueError, match="interval=0; allowed: an integer, 1 or more"):
        cachedit.wrap(pipe, "reference-kv", interval=0)
    with pytest.raises(TypeError, match="reads no profile"):
        cachedit.wrap(pipe, "reference-kv", profile="flux-dev")
    with pytest.raises(UnsupportedModelError, match="drives a transformer by hand"):
        cachedit.wrap(pipe.transformer, "reference-kv")
