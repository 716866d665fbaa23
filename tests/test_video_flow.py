"""Frames that a step leaves out, filled in along flow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline
from video_models import TEXT, draw, tiny

import cachedit
from cachedit.video import flow_interpolation

SIZE = 6


def still(_: int, __: int) -> torch.Tensor:
    return torch.zeros(1, 2, SIZE, SIZE).double()


def moving(start: int, stop: int) -> torch.Tensor:
    """Everything moves two pixels to the right per frame."""
    flow = torch.zeros(1, 2, SIZE, SIZE).double()
    flow[:, 0] = 2 * (stop - start)
    return flow


def clip(frames: int, batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, 3, frames, SIZE, SIZE, generator=torch.Generator().manual_seed(0)).double()


def test_frames_are_left_out_at_the_named_steps_only() -> None:
    skipping = flow_interpolation(still, [2, 1], steps={0, 3})
    assert [tuple(skipping.frames(step)) for step in range(5)] == [(1, 2), (), (), (1, 2), ()]


def test_without_motion_a_frame_between_equal_ones_is_that_frame_and_between_others_their_mean() -> None:
    x = clip(3, batch=2)
    filled = flow_interpolation(still, [1], {0}).fill(x, [1])
    torch.testing.assert_close(filled[:, :, 1], (x[:, :, 0] + x[:, :, 2]) / 2, rtol=0, atol=1e-12)
    assert torch.equal(filled[:, :, [0, 2]], x[:, :, [0, 2]])
    x[:, :, 2] = x[:, :, 0]
    filled = flow_interpolation(still, [1], {0}).fill(x, [1])
    torch.testing.assert_close(filled[:, :, 1], x[:, :, 0], rtol=0, atol=1e-12)


def test_what_moves_is_taken_from_where_it_was_and_will_be() -> None:
    """Columns 0 and 1 of the middle frame were outside before, 4 and 5 will be outside after; 2 and 3 are in both."""
    x = clip(3)
    middle = flow_interpolation(moving, [1], {0}).fill(x, [1])[0, :, 1]
    before, after = x[0, :, 0], x[0, :, 2]
    torch.testing.assert_close(middle[..., :2], after[..., 2:4], rtol=0, atol=1e-12)
    torch.testing.assert_close(middle[..., 2:4], (before[..., :2] + after[..., 4:]) / 2, rtol=0, atol=1e-12)
    torch.testing.assert_close(middle[..., 4:], before[..., 2:4], rtol=0, atol=1e-12)


def test_a_neighbour_that_does_not_lead_back_is_not_believed() -> None:
    """Column 3 of the middle frame is column 1 of the first, whose own flow at (2, 1) leads elsewhere."""

    def hidden(start: int, stop: int) -> torch.Tensor:
        flow = moving(start, stop)
        if (start, stop) == (0, 1):
            flow[:, 1, 2, 1] = 3.0
        return flow

    x = clip(3)
    middle = flow_interpolation(hidden, [1], {0}).fill(x, [1])[0, :, 1]
    torch.testing.assert_close(middle[:, 2, 3], x[0, :, 2, 2, 5], rtol=0, atol=1e-12)
    torch.testing.assert_close(middle[:, 2, 2], (x[0, :, 0, 2, 0] + x[0, :, 2, 2, 4]) / 2, rtol=0, atol=1e-12)


def test_the_last_frame_has_one_neighbour_and_where_that_is_not_seen_it_is_taken_all_the_same() -> None:
    x = clip(2)
    last = flow_interpolation(moving, [1], {0}).fill(x, [1])[0, :, 1]
    torch.testing.assert_close(last[..., 2:], x[0, :, 0, :, :4], rtol=0, atol=1e-12)
    torch.testing.assert_close(last[..., :2], x[0, :, 0, :, :1].expand(-1, -1, 2), rtol=0, atol=1e-12)


def test_flow_of_pixels_is_brought_to_the_size_of_latents() -> None:
    """Sixteen pixels to the right at eight times the size are two latent pixels."""

    def pixels(start: int, stop: int) -> torch.Tensor:
        return 8 * torch.nn.functional.interpolate(moving(start, stop), scale_factor=8)

    x = clip(3)
    ours = flow_interpolation(pixels, [1], {0}).fill(x, [1])
    torch.testing.assert_close(ours, flow_interpolation(moving, [1], {0}).fill(x, [1]), rtol=0, atol=1e-12)


def test_a_rollout_computes_fewer_tokens_at_the_steps_that_leave_frames_out() -> None:
    transformer = tiny(dtype=torch.float32, rope_max_seq_len=16)
    parts = {"tokenizer": None, "text_encoder": None, "scheduler": FlowMatchEulerDiscreteScheduler(), "vae": None}
    pipe: Any = WanPipeline(**parts, transformer=transformer)
    pipe.set_progress_bar_config(disable=True)
    cachedit.wrap(pipe, "rolling-kv", window=9, sink=3)
    sizes: list[int] = []
    transformer.register_forward_pre_hook(
        lambda _, __, given: sizes.append(given["hidden_states"].shape[2]), with_kwargs=True
    )
    asked = {"prompt_embeds": draw(1, 7, TEXT, seed=1, dtype=torch.float32), "height": 16, "width": 16}
    skipping = flow_interpolation(still, [1], steps={0, 1})
    found = pipe(
        **asked, num_frames=21, guidance_scale=1.0, output_type="latent", skip_frames=skipping,
        generator=torch.Generator().manual_seed(0),
    ).frames  # fmt: skip
    assert found.shape[2] == 6
    assert torch.isfinite(torch.as_tensor(found)).all()
    assert sizes[:5] == [2, 2, 3, 3, 3]  # two steps without the middle frame, two with it, and the commit


@pytest.mark.parametrize("frames", [[1, 1], [-1]])
def test_impossible_frames_are_refused(frames: list[int]) -> None:
    with pytest.raises(ValueError, match="numbers of frames within a chunk, each once"):
        flow_interpolation(still, frames, {0})
