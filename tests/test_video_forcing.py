"""SkyReels-V2 in its asynchronous mode: the stock pipeline is the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import dissect
from diffusers import (
    SkyReelsV2DiffusionForcingPipeline,
    SkyReelsV2Transformer3DModel,
    UniPCMultistepScheduler,
)
from video_models import TEXT, draw, far, float64_throughout, tiny

import cachedit
from cachedit import UnsupportedModelError
from cachedit.video.attachment import ATTRIBUTE
from cachedit.video.record import VideoRun

FRAMES, BLOCK, LAG, STEPS = 37, 2, 3, 8  # 10 latent frames in 5 blocks


def build(**sizes: Any) -> Any:
    with float64_throughout():  # its rotary table too
        model = tiny(SkyReelsV2Transformer3DModel, inject_sample_info=False, **sizes)
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=8.0)
    made = SkyReelsV2DiffusionForcingPipeline(
        tokenizer=None, text_encoder=None, vae=None, transformer=model, scheduler=scheduler
    )
    made.set_progress_bar_config(disable=True)
    return made


def run(pipe: Any, **changes: Any) -> torch.Tensor:
    arguments = {
        "prompt": None,
        "prompt_embeds": draw(1, 7, TEXT, seed=1),
        "negative_prompt_embeds": draw(1, 7, TEXT, seed=2),
        "height": 32,
        "width": 32,
        "num_frames": FRAMES,
        "num_inference_steps": STEPS,
        "ar_step": LAG,
        "causal_block_size": BLOCK,
        "guidance_scale": 3.0,
        "generator": torch.Generator().manual_seed(0),
        "output_type": "latent",
    }
    with float64_throughout():
        return pipe(**{**arguments, **changes}).frames


def record(pipe: Any) -> VideoRun:
    found = cachedit.last_run(pipe)
    assert isinstance(found, VideoRun)
    return found


def test_t10_what_is_finished_is_not_computed_again_and_nothing_changes() -> None:
    pipe = build()
    stock = run(pipe)
    before = dissect(pipe)
    cachedit.wrap(pipe, "rolling-kv")
    ours = run(pipe)
    assert ours.dtype == torch.float32  # the pipeline keeps its latents in it, whatever the model
    assert far(ours, stock) < 1e-6
    calls = record(pipe).chunks
    assert record(pipe).status == "finished"
    assert len(calls) == 2 * 20  # the first block takes 8 calls, each of the others 3 more; two guidance paths
    # 5 blocks take 8 steps and 4 are committed; for 8 calls the next block may have begun, and is computed for nothing
    assert sum(call.attended for call in calls) == 2 * BLOCK * (5 * STEPS + 4 + 8)
    assert sum(call.attended + call.evicted for call in calls) == 2 * 20 * 10
    cachedit.unwrap(pipe)
    assert dissect(pipe)["transformer"] == before["transformer"]
    assert type(pipe) is SkyReelsV2DiffusionForcingPipeline
    assert torch.equal(run(pipe), stock)


def test_a_second_video_forgets_the_first() -> None:
    pipe = build()
    stock = run(pipe, prompt_embeds=draw(1, 7, TEXT, seed=3))
    cachedit.wrap(pipe, "rolling-kv")
    run(pipe)
    assert far(run(pipe, prompt_embeds=draw(1, 7, TEXT, seed=3)), stock) < 1e-6


def test_a_long_video_in_windows() -> None:
    pipe = build()
    long = {"num_frames": 61, "base_num_frames": 37, "overlap_history": 13, "addnoise_condition": 0}
    stock = run(pipe, **long)
    cachedit.wrap(pipe, "rolling-kv")
    assert far(run(pipe, **long), stock) < 1e-6


def test_timesteps_that_do_not_tell_the_blocks_apart_cost_speed_alone() -> None:
    """Both blocks have begun, a step apart, and stand at 999."""
    pipe = build()
    model, call = pipe.transformer, {"enable_diffusion_forcing": True, "return_dict": False}
    x, text, times = draw(1, 4, 4, 4, 4), draw(1, 7, TEXT), torch.full((1, 4), 999.0, dtype=torch.float64)
    model.register_to_config(num_frame_per_block=2)
    with float64_throughout():
        stock = model(x, times, text, **call)[0]
        forcing = cachedit.wrap(pipe, "rolling-kv").__dict__[ATTRIBUTE]
        forcing._pipe, forcing._lag = pipe, 1
        for steps, blocks in (([999, 999, 500], 2), ([999, 800, 500], 1)):
            pipe.scheduler.timesteps = torch.tensor(steps)
            frames = slice(0, 2 * blocks)
            assert far(model(x, times, text, **call)[0][:, :, frames], stock[:, :, frames]) < 1e-12


@pytest.mark.parametrize("mode", [{"ar_step": 0}, {"causal_block_size": 1}])
def test_the_synchronous_mode_is_refused(mode: dict[str, int]) -> None:
    pipe = cachedit.wrap(build(), "rolling-kv")
    with pytest.raises(ValueError, match="ar_step of 1 or more"):
        run(pipe, **mode)


def test_frames_are_recalled_by_causal_models_only() -> None:
    with pytest.raises(UnsupportedModelError, match=r"a window that is its own.*or recalled=0"):
        cachedit.wrap(build(), "magic-world")


def test_the_transformer_can_be_called_by_hand() -> None:
    pipe = build()
    x, text = draw(1, 4, 3, 4, 4), draw(1, 7, TEXT)
    call = {"encoder_hidden_states": text, "enable_diffusion_forcing": True}
    times = torch.tensor([[0.0, 400.0, 900.0]], dtype=torch.float64)
    plain = pipe.transformer(x, times, **call)
    cachedit.wrap(pipe, "rolling-kv")
    assert torch.equal(pipe.transformer(x, times, **call).sample, plain.sample)
