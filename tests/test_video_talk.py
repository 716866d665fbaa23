"""Streams that are talked to: prompts that change, streams kept and taken up again, and what a video begins with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_video_stream import ROLLING, SIDE, asked, record
from test_video_stream import pipe as pipe
from video_models import TEXT, draw

import cachedit
from cachedit.video import Stream
from cachedit.video.decoder import encoded

OTHER = draw(1, 7, TEXT, seed=9, dtype=torch.float32)


def wrapped(pipe: Any, **options: Any) -> Any:
    return cachedit.wrap(pipe, "rolling-kv", **{**ROLLING, **options})


def take(stream: Stream, count: int) -> torch.Tensor:
    return torch.cat([next(stream).latents for _ in range(count)], 2)


def branch(stream: Stream) -> Any:
    return stream._open().branches[0]


def keys(stream: Stream, frames: list[int]) -> torch.Tensor:
    return branch(stream).cache.frames(2, frames)[0]


def cached_text(stream: Stream) -> torch.Tensor:
    return branch(stream).text[0][0]


@pytest.mark.parametrize("preset", ["self-forcing", "causvid", "krea", "longlive", "rolling-forcing"])
@pytest.mark.parametrize("dtype", [None, "int8"])
def test_a_stream_taken_up_again_is_the_uninterrupted_one_bit_for_bit(
    pipe: Any, tmp_path: Any, preset: str, dtype: str | None
) -> None:
    video = cachedit.wrap(pipe, "rolling-kv", preset=preset, dtype=dtype, window=None if preset == "krea" else 18)
    guided = {"guidance_scale": 2.0, "negative_prompt_embeds": OTHER}
    whole = take(video.stream(**asked(**guided)), 8)
    first = video.stream(**asked(**guided))
    start = take(first, 5)
    torch.save(first.state_dict(), tmp_path / "stream.pt")
    first.close()
    again = video.stream(state=torch.load(tmp_path / "stream.pt", weights_only=True))
    chunk = next(again)
    assert chunk.index == 5
    assert torch.equal(torch.cat([start, chunk.latents, take(again, 2)], 2), whole)


def test_frames_of_a_stream_taken_up_again(pipe: Any) -> None:
    video = wrapped(pipe)
    whole = video(**asked(num_frames=42)).frames
    stream = video.stream(**asked(num_frames=42))
    frames = [next(stream).frames, next(stream).frames]
    rest = video.stream(state=stream.state_dict())
    assert torch.equal(torch.cat([*frames, *(chunk.frames for chunk in rest)], 1), whole)
    assert len(record(pipe).chunks) == 4


def test_forks_go_their_own_ways(pipe: Any) -> None:
    stream = wrapped(pipe).stream(**asked())
    take(stream, 4)
    fork = stream.fork()
    fork.change_prompt(prompt_embeds=OTHER)
    ours, theirs = [], []
    for _ in range(2):  # in turn
        theirs.append(take(fork, 1))
        ours.append(take(stream, 1))
    alone = wrapped(pipe).stream(**asked())
    take(alone, 4)
    assert torch.equal(torch.cat(ours, 2), take(alone, 2))
    assert not torch.equal(theirs[0], ours[0])


def test_an_interrupt_in_the_middle_of_a_chunk_loses_nothing(pipe: Any) -> None:
    video = wrapped(pipe)
    whole = video(**asked(num_frames=57)).frames
    for module, at in ((pipe.transformer, 18), (pipe.vae.decoder.conv_out, 8)):  # while denoising, while decoding
        calls = 0

        def stop(*_: Any, at: int = at) -> None:
            nonlocal calls
            calls += 1
            if calls == at:
                raise KeyboardInterrupt

        hook = module.register_forward_pre_hook(stop)
        stream, found = video.stream(**asked(num_frames=57)), []
        with pytest.raises(KeyboardInterrupt):
            found.extend(next(stream).frames for _ in range(9))
        resumed = video.stream(state=stream.state_dict())
        rest = [chunk.frames for chunk in resumed]
        hook.remove()
        done = 57 - sum(part.shape[1] for part in rest)
        assert 0 < done < 57
        assert torch.equal(torch.cat(rest, 1), whole[:, done:])


def test_keep_changes_the_text_alone(pipe: Any) -> None:
    stream = wrapped(pipe, window=12).stream(**asked())
    take(stream, 3)
    old, text = keys(stream, [3, 4, 5]).clone(), cached_text(stream).clone()
    stream.change_prompt(prompt_embeds=OTHER)
    take(stream, 1)
    assert torch.equal(keys(stream, [3, 4, 5]), old)
    assert not torch.equal(cached_text(stream), text)
    assert torch.equal(branch(stream).embeds, OTHER)


def test_recache_writes_the_window_as_if_the_new_prompt_had_been_there(pipe: Any) -> None:
    """With the same text nothing changes; with another the ring does and the sink does not."""
    stream = wrapped(pipe, window=18).stream(**asked())
    take(stream, 3)
    sink, ring = keys(stream, [0, 1, 2]).clone(), keys(stream, [3, 4, 5]).clone()
    stream.change_prompt(prompt_embeds=asked()["prompt_embeds"], how="recache")
    take(stream, 1)
    assert torch.allclose(keys(stream, [3, 4, 5]), ring, atol=1e-6)
    stream.change_prompt(prompt_embeds=OTHER, how="recache")
    take(stream, 1)
    assert torch.equal(keys(stream, [0, 1, 2]), sink)
    assert not torch.allclose(keys(stream, [3, 4, 5]), ring, atol=1e-2)


def test_recache_after_frames_have_left_the_window(pipe: Any) -> None:
    stream = wrapped(pipe).stream(**asked())
    take(stream, 6)
    stream.change_prompt(prompt_embeds=OTHER, how="recache")
    take(stream, 1)
    assert branch(stream).cache.live() == [0, 1, 2, 15, 16, 17]  # three slots are those of the open chunk
    assert (record(pipe).chunks[-1].attended, record(pipe).chunks[-1].evicted) == (9, 12)
    assert torch.isfinite(take(stream, 2)).all()


def test_flush_keeps_the_sink_and_the_last_frame(pipe: Any) -> None:
    stream = wrapped(pipe).stream(**asked())
    take(stream, 6)
    stream.change_prompt(prompt_embeds=OTHER, how="flush")
    attended = []
    for _ in range(3):
        take(stream, 1)
        attended.append(record(pipe).chunks[-1].attended)
    assert attended == [3 + 1 + 3, 3 + 4 + 2, 9]  # the sink, what is left and the chunk, up to the window


def test_interpolate_goes_over_in_equal_steps(pipe: Any) -> None:
    stream = wrapped(pipe).stream(**asked())
    old = asked()["prompt_embeds"]
    take(stream, 1)
    stream.change_prompt(prompt_embeds=OTHER, how="interpolate", chunks=2)
    take(stream, 1)
    assert torch.allclose(branch(stream).embeds, (old + OTHER) / 2)
    take(stream, 1)
    assert torch.equal(branch(stream).embeds, OTHER)


def test_wrong_changes_are_refused(pipe: Any) -> None:
    stream = wrapped(pipe).stream(**asked())
    take(stream, 1)
    with pytest.raises(ValueError, match="allowed: keep, recache, flush, interpolate"):
        stream.change_prompt(prompt_embeds=OTHER, how="restart")
    with pytest.raises(ValueError, match="same max_sequence_length"):
        stream.change_prompt(prompt_embeds=OTHER[:, :5])
    stream.close()
    with pytest.raises(RuntimeError, match="has ended"):
        stream.change_prompt(prompt_embeds=OTHER)


def test_two_samples_with_guidance_are_each_alone(pipe: Any) -> None:
    video = wrapped(pipe)
    both = draw(2, 7, TEXT, seed=4, dtype=torch.float32)
    guided = {"guidance_scale": 2.0, "num_frames": 21, "output_type": "latent"}

    def made(rows: slice) -> torch.Tensor:
        generators = [torch.Generator().manual_seed(seed) for seed in range(2)][rows]
        texts = {"prompt_embeds": both[rows], "negative_prompt_embeds": OTHER.expand(2, -1, -1)[rows]}
        return video(**asked(**guided, **{**texts, "generator": generators})).frames

    together = made(slice(None))
    assert together.shape[0] == 2
    for index in range(2):
        assert torch.allclose(together[index], made(slice(index, index + 1))[0], atol=1e-5)


def test_a_video_begins_with_an_image(pipe: Any) -> None:
    image = draw(1, 3, SIDE, SIDE, seed=5, dtype=torch.float32).sigmoid()
    stream = wrapped(pipe).stream(**asked(image=image, num_frames=25))
    chunks = list(stream)
    assert [(chunk.start, chunk.stop) for chunk in chunks] == [(0, 1), (1, 4), (4, 7)]
    assert torch.equal(chunks[0].latents, encoded(pipe.vae, 2 * image[:, :, None] - 1))
    assert [chunk.steps for chunk in record(pipe).chunks] == [0, 4, 4]
    assert sum(chunk.frames.shape[1] for chunk in chunks) == 25


def test_a_video_is_continued_as_if_it_had_been_made_here(pipe: Any) -> None:
    """The latents are committed in the blocks in which a rollout makes them."""
    frames = draw(1, 21, 3, SIDE, SIDE, seed=6, dtype=torch.float32).sigmoid()
    stream = wrapped(pipe).stream(**asked(video=frames, num_frames=33))
    chunks = list(stream)
    assert [(chunk.start, chunk.stop) for chunk in chunks] == [(0, 3), (3, 6), (6, 9)]
    latents = encoded(pipe.vae, 2 * frames.transpose(1, 2) - 1)
    assert torch.equal(torch.cat([chunk.latents for chunk in chunks[:2]], 2), latents)
    with pytest.raises(ValueError, match="such as 17"):
        next(wrapped(pipe).stream(**asked(video=frames[:, :20])))


def test_a_video_is_followed_from_the_noise_level_of_its_strength(pipe: Any) -> None:
    frames = draw(1, 9, 3, SIDE, SIDE, seed=6, dtype=torch.float32).sigmoid()
    chunk = next(wrapped(pipe).stream(**asked(video=frames, strength=0.9)))
    assert record(pipe).chunks[0].steps == 2  # of 1, 0.9375, 0.8333 and 0.625
    free = next(wrapped(pipe).stream(**asked(video=frames, strength=1.0)))
    near, far = ((x.latents - encoded(pipe.vae, 2 * frames.transpose(1, 2) - 1)).abs().mean() for x in (chunk, free))
    assert near != far


def test_given_noise_is_what_chunks_start_from(pipe: Any) -> None:
    video = wrapped(pipe, sigmas=(1.0,))  # one step: no other noise
    noise = draw(1, 4, 6, 2, 2, seed=8, dtype=torch.float32)
    runs = [video(**asked(seed, latents=noise, num_frames=21, output_type="latent")).frames for seed in range(2)]
    assert torch.equal(*runs)


def test_frames_that_leave_are_told_while_they_can_still_be_read(pipe: Any) -> None:
    told: list[tuple[list[int], torch.Size]] = []
    stream = wrapped(pipe).stream(
        **asked(on_evict=lambda cache, gone: told.append((gone, cache.frames(0, gone)[0].shape)))
    )
    take(stream, 5)
    assert told == [([3, 4, 5], torch.Size([1, 3, 2, 24])), ([6, 7, 8], torch.Size([1, 3, 2, 24]))]
