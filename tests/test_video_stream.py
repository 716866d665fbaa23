"""A wrapped WanPipeline: calls, streams, and what is left when it is unwrapped."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from conftest import dissect
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline
from video_models import TEXT, draw, tiny

import cachedit
from cachedit.video.record import VideoRun
from zoo.video_pipelines import video_vae

ROLLING = {"window": 9, "sink": 3}
SIDE = 16  # pixels: latents of 2 x 2, one token per frame


@pytest.fixture
def pipe() -> Any:
    transformer = tiny(dtype=torch.float32, rope_max_seq_len=16)
    parts = {"tokenizer": None, "text_encoder": None, "scheduler": FlowMatchEulerDiscreteScheduler()}
    made = WanPipeline(**parts, vae=video_vae(), transformer=transformer)
    made.set_progress_bar_config(disable=True)
    return made


def asked(seed: int = 0, samples: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "prompt_embeds": draw(samples, 7, TEXT, seed=1, dtype=torch.float32),
        "height": SIDE,
        "width": SIDE,
        "generator": torch.Generator().manual_seed(seed),
        "guidance_scale": 1.0,  # stock pipelines guide by default
        "output_type": "pt",
        **changes,
    }


def record(pipe: Any) -> VideoRun:
    run = cachedit.last_run(pipe)
    assert isinstance(run, VideoRun)
    return run


def test_wrap_and_unwrap_leave_nothing(pipe: Any) -> None:
    plain = pipe(**asked(num_frames=5), num_inference_steps=2).frames
    before = dissect(pipe), [block.attn1.processor for block in pipe.transformer.blocks]
    video = cachedit.wrap(pipe, "rolling-kv", **ROLLING)
    assert video is pipe
    assert isinstance(video, WanPipeline)
    video(**asked(num_frames=5))
    cachedit.unwrap(pipe)
    assert (dissect(pipe), [block.attn1.processor for block in pipe.transformer.blocks]) == before
    assert not hasattr(pipe, "stream")
    assert torch.equal(pipe(**asked(num_frames=5), num_inference_steps=2).frames, plain)
    assert record(pipe).status == "finished"


def test_wrapping_replaces_whatever_was_there(pipe: Any) -> None:
    cachedit.wrap(pipe, "fora")
    cachedit.wrap(pipe, "rolling-kv", **ROLLING)
    cachedit.wrap(pipe, "rolling-kv", window=6)
    assert type(pipe).__mro__[1] is WanPipeline
    pipe(**asked(num_frames=5))
    assert record(pipe).window == 6
    cachedit.wrap(pipe, "fora")
    assert not hasattr(pipe, "stream")


def test_the_transformer_of_a_wrapped_pipeline_can_be_called_by_hand(pipe: Any) -> None:
    x, text = draw(1, 4, 3, 2, 2, dtype=torch.float32), draw(1, 7, TEXT, dtype=torch.float32)
    plain = pipe.transformer(x, torch.tensor([500.0]), text, return_dict=False)[0]
    cachedit.wrap(pipe, "rolling-kv", **ROLLING)
    assert torch.equal(pipe.transformer(x, torch.tensor([500.0]), text, return_dict=False)[0], plain)


@pytest.mark.parametrize(("output", "kind"), [("np", np.ndarray), ("pt", torch.Tensor), ("pil", list)])
def test_frames_are_of_the_type_that_wan_pipeline_gives(pipe: Any, output: str, kind: type) -> None:
    stock = pipe(**asked(num_frames=5, output_type=output), num_inference_steps=2)
    ours = cachedit.wrap(pipe, "rolling-kv", **ROLLING)(**asked(num_frames=5, output_type=output))
    assert type(ours) is type(stock)
    assert isinstance(ours.frames, kind)
    assert np.asarray(ours.frames[0]).shape == np.asarray(stock.frames[0]).shape
    assert pipe(**asked(num_frames=5, output_type=output), return_dict=False)[0] is not None


@pytest.mark.parametrize("frames", [1, 9, 10, 14, 21])
def test_exactly_as_many_frames_as_are_asked_for(pipe: Any, frames: int) -> None:
    video = cachedit.wrap(pipe, "rolling-kv", **ROLLING)
    assert video(**asked(num_frames=frames)).frames.shape == (1, frames, 3, SIDE, SIDE)
    latents = video(**asked(num_frames=frames, output_type="latent")).frames
    assert latents.shape[2] == -(-(frames - 1) // 4) + 1


def test_a_stream_gives_the_frames_of_the_call(pipe: Any) -> None:
    video = cachedit.wrap(pipe, "rolling-kv", **ROLLING)
    whole = video(**asked(num_frames=42)).frames
    chunks = list(video.stream(**asked(num_frames=42)))
    assert [(chunk.start, chunk.stop, chunk.first_frame) for chunk in chunks] == [
        (0, 3, 0),
        (3, 6, 9),
        (6, 9, 21),
        (9, 12, 33),
    ]
    assert torch.equal(torch.cat([chunk.frames for chunk in chunks], 1), whole)


def test_decoding_as_they_come_is_decoding_the_whole(pipe: Any) -> None:
    video = cachedit.wrap(pipe, "rolling-kv", **ROLLING)
    chunks = list(video.stream(**asked(num_frames=45)))
    stock = pipe.vae.decode(torch.cat([chunk.latents for chunk in chunks], 2), return_dict=False)[0]
    frames = torch.cat([chunk.frames for chunk in chunks], 1)
    assert torch.equal(frames, pipe.video_processor.postprocess_video(stock, output_type="pt"))


def test_a_stream_without_end_goes_on(pipe: Any) -> None:
    stream = cachedit.wrap(pipe, "rolling-kv", **ROLLING).stream(**asked())
    for _ in range(6):
        chunk = next(stream)
    assert (chunk.index, chunk.start, chunk.stop) == (5, 15, 18)
    assert record(pipe).status == "running"
    stream.close()
    assert record(pipe).aborted
    assert list(stream) == []


def test_frames_come_before_the_pass_that_commits_them(pipe: Any) -> None:
    stream = cachedit.wrap(pipe, "rolling-kv", **ROLLING).stream(**asked())
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    pipe.transformer.register_forward_pre_hook(count)
    next(stream)
    assert (calls, record(pipe).chunks[0].commit_ms) == (4, None)
    next(stream)
    assert calls == 9
    assert record(pipe).chunks[0].commit_ms is not None


def test_the_record(pipe: Any) -> None:
    cachedit.wrap(pipe, "rolling-kv", **ROLLING)(**asked(num_frames=57))
    run = record(pipe)
    assert run.status == "finished"
    assert [(c.steps, c.attended, c.evicted) for c in run.chunks] == [
        (4, 3, 0),
        (4, 6, 0),
        (4, 9, 0),
        (4, 9, 3),
        (4, 9, 6),
    ]
    assert run.frames == 15
    assert run.cache_bytes_peak == 2 * 3 * 9 * 1 * 48 * 4  # keys and values, layers, frames, tokens, channels, bytes
    assert "15 latent frames in 5 chunks" in str(run)
    assert '"status": "finished"' in run.to_json()


def test_a_copy_is_independent(pipe: Any) -> None:
    video = cachedit.wrap(pipe, "rolling-kv", **ROLLING)
    other = copy.deepcopy(video)
    assert torch.equal(other(**asked(num_frames=9)).frames, video(**asked(num_frames=9)).frames)
    cachedit.unwrap(video)
    assert other(**asked(num_frames=9)).frames.shape[1] == 9


def test_the_wrapped_pipeline_saves_the_plain_model(pipe: Any, tmp_path: Any) -> None:
    cachedit.wrap(pipe, "rolling-kv", **ROLLING)
    pipe.save_pretrained(tmp_path)
    assert '"WanPipeline"' in (tmp_path / "model_index.json").read_text()
    assert type(WanPipeline.from_pretrained(tmp_path, tokenizer=None, text_encoder=None)) is WanPipeline
