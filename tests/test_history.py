"""Frames that left the window and come back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline
from video_models import CHANNELS, SIZE, TEXT, TOKENS, draw, far, seen, tiny, whole

import cachedit
from cachedit.kernels.row_attention import Projected
from cachedit.video import Branch, CausalNetwork, RollingKVCache
from cachedit.video.history import History

FRAMES = 12  # latent frames, four chunks
BIG, SMALL = {"window": 21}, {"window": 6}


def cache_of(**options: Any) -> RollingKVCache:
    return RollingKVCache(1, 1, 4, (1, 1), **{"window": 2, "pins": 2, **options})


def fill(cache: RollingKVCache, count: int) -> None:
    """Frame f has the key and the value f + 1."""
    for frame in range(cache.done, cache.done + count):
        opening = cache.open([1], 1)
        x = torch.full((1, 1, 1, 4), frame + 1.0)
        for _ in cache.read(0, opening, Projected(x, x, x)):
            pass
        cache.close(opening)


def seen_values(cache: RollingKVCache) -> list[float]:
    """Values that the next frame, of value 0, attends to, in ascending order."""
    x = torch.zeros(1, 1, 1, 4)
    readings = cache.read(0, cache.open([1]), Projected(x, x, x))
    return sorted(v for reading in readings for v in reading.gathered()[1][0, :, 0, 0].tolist())


@pytest.fixture
def pipe() -> Any:
    parts = {"tokenizer": None, "text_encoder": None, "scheduler": FlowMatchEulerDiscreteScheduler(), "vae": None}
    made: Any = WanPipeline(**parts, transformer=tiny(dtype=torch.float32, rope_max_seq_len=64))
    made.set_progress_bar_config(disable=True)
    return made


def asked(frames: int = FRAMES, **changes: Any) -> dict[str, Any]:
    return {
        "prompt_embeds": draw(1, 7, TEXT, seed=1, dtype=torch.float32),
        "height": 16,
        "width": 16,
        "num_frames": 4 * frames - 3,
        "generator": torch.Generator().manual_seed(0),
        "guidance_scale": 1.0,
        "output_type": "latent",
        **changes,
    }


def made(pipe: Any, strategy: str, options: dict[str, Any], **changes: Any) -> torch.Tensor:
    return cachedit.wrap(pipe, strategy, **options)(**asked(**changes)).frames


def test_the_frames_most_like_the_newest_are_found_and_equal_ones_are_all_found() -> None:
    """Directions of two channels: frames 0 and 3 look alike whatever their size, 1 is across, 2 is opposite."""
    history = History(cache_of(), recalled=2, remembered=9)
    looks = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [5.0, 0.0], [2.0, 0.1]])
    history.see(0, looks.T[None, :, :, None, None].expand(1, 2, 5, 3, 3))
    assert sorted(history.similar([0, 1, 2, 3])) == [0, 3]
    assert history.similar([2, 1]) == [1, 2]
    assert history.similar([]) == []


def test_what_comes_back_is_attended_to_beside_the_window() -> None:
    """A window of two sees the frame before and itself; frame 0, which looks like the newest, comes back as it left."""
    cache = cache_of()
    history = History(cache, recalled=1, remembered=9)
    for frame, look in enumerate([1.0, -1.0, -1.0, -1.0]):
        fill(cache, 1)
        history.see(frame, torch.full((1, 1, 1, 2, 2), look))
    assert seen_values(cache) == [0.0, 2.0, 4.0]  # frame 1 is the first of those that look like frame 3
    history.see(4, torch.ones(1, 1, 1, 2, 2))
    fill(cache, 1)
    assert seen_values(cache) == [0.0, 1.0, 5.0]
    assert cache.pinned == [0]


def test_the_oldest_of_what_is_remembered_goes_first() -> None:
    cache = cache_of(pins=9)
    history = History(cache, recalled=9, remembered=2)
    for frame in range(6):
        fill(cache, 1)
        history.see(frame, torch.ones(1, 1, 1, 2, 2))
    cache.open([1])
    assert sorted(history.kept) == [3, 4]
    assert cache.pinned == [3, 4]
    assert history.nbytes == 2 * 2 * 4 * 4  # two frames of a key and a value of four channels


@pytest.mark.parametrize("rope", ["absolute", "sink_shift", "relative"])
def test_with_room_for_all_the_window_is_the_whole_video(rope: str) -> None:
    """The oracle is the stock model under a block-causal mask without a window; positions agree as nothing is lost."""
    model, blocks = tiny(), [2, 2, 2, 2]
    x, text = draw(1, CHANNELS, 8, SIZE, SIZE), draw(1, 7, TEXT, seed=1)
    expected = whole(model, x, torch.full((1, 8 * TOKENS), 500.0).double(), text, seen(blocks))
    with CausalNetwork(model).attached() as network:
        cache = network.cache(x.shape, window=5, sink=1, rope=rope, pins=6)
        history, branch, found = History(cache, recalled=6, remembered=20), Branch(text, cache), []
        for start in range(0, 8, 2):
            found.append(network(branch, x[:, :, start : start + 2], 500.0, commit=1))
            history.see(start, x[:, :, start : start + 2])
    assert cache.pinned == [1, 2, 3]
    assert far(torch.cat(found, 2), expected) < 1e-6  # stock blocks round to float32 around their norms


def test_a_rollout_that_recalls_everything_is_one_with_a_larger_window(pipe: Any) -> None:
    large, small = made(pipe, "rolling-kv", BIG), made(pipe, "rolling-kv", {**SMALL, "sink": 1})
    recalling = made(pipe, "magic-world", {**SMALL, "sink": 1, "recalled": 9})
    torch.testing.assert_close(recalling, large, rtol=0, atol=2e-5)
    assert (small - large).abs().max() > 0.01
    run = cachedit.last_run(pipe)
    frame = 3 * 2 * 48 * 4  # bytes of a frame of one token: layers, keys and values of width 48
    assert run.cache_bytes_peak == (6 + 9) * frame + 6 * frame  # the ring and its pins, and frames 1 to 6
    none = made(pipe, "magic-world", {**SMALL, "sink": 1, "recalled": 0})
    assert torch.equal(none, small)


def test_both_branches_of_guidance_recall_the_same_frames(pipe: Any) -> None:
    told: list[list[int]] = []
    negative = {"negative_prompt_embeds": draw(1, 7, TEXT, seed=2, dtype=torch.float32), "guidance_scale": 3.0}
    large = made(pipe, "rolling-kv", BIG, **negative)
    options = {**SMALL, "sink": 1, "recalled": 9}
    ours = made(pipe, "magic-world", options, on_evict=lambda _, gone: told.append(gone), **negative)
    torch.testing.assert_close(ours, large, rtol=0, atol=5e-5)
    assert told == [[1, 2, 3], [4, 5, 6]]  # the caller's hook is called too


def test_a_resumed_stream_remembers(pipe: Any) -> None:
    video = cachedit.wrap(pipe, "magic-world", **SMALL, sink=1, recalled=2, remembered=4)
    straight = [chunk.latents for chunk in video.stream(**asked(18))]
    stream = video.stream(**asked(18))
    first = [next(stream).latents for _ in range(4)]
    state = stream.state_dict()
    stream.close()
    rest = [chunk.latents for chunk in video.stream(state=state)]
    assert torch.equal(torch.cat(first + rest, 2), torch.cat(straight, 2))


@pytest.mark.parametrize("how", ["keep", "recache", "flush", "interpolate"])
def test_the_prompt_may_change_while_frames_come_back(pipe: Any, how: str) -> None:
    """The chunks before are those without a change, and a fork of the stream goes on as the stream does."""
    video = cachedit.wrap(pipe, "magic-world", **SMALL, sink=1, recalled=2, remembered=4)
    plain = [chunk.latents for chunk in video.stream(**asked(21))]
    stream = video.stream(**asked(21))
    found = [next(stream).latents for _ in range(4)]
    stream.change_prompt(prompt_embeds=draw(1, 7, TEXT, seed=5, dtype=torch.float32), how=how)
    fork = stream.fork()
    found += [chunk.latents for chunk in stream]
    assert [torch.equal(ours, theirs) for ours, theirs in zip(found, plain, strict=True)] == [True] * 4 + [False] * 3
    assert torch.equal(torch.cat([chunk.latents for chunk in fork], 2), torch.cat(found[4:], 2))


def test_what_cannot_be_recalled_is_refused(pipe: Any) -> None:
    for options, message in (
        ({"recalled": -1}, "recalled=-1; allowed: an integer, 0 or more"),
        ({"remembered": 0}, "remembered=0; allowed: an integer, 1 or more"),
        ({"preset": "krea"}, "recalled=3 with preset 'krea'.*allowed: presets such as 'self-forcing'"),
    ):
        with pytest.raises(ValueError, match=message):
            cachedit.wrap(pipe, "magic-world", **options)
    cachedit.wrap(pipe, "magic-world", **SMALL, sink=1)
    with pytest.raises(ValueError, match="got 2 samples with recalled=3.*one video at a time"):
        pipe(**asked(prompt_embeds=draw(2, 7, TEXT, dtype=torch.float32)))
    with pytest.raises(ValueError, match="recall got 3 frames; allowed: 2"):
        cache_of().recall({0: [], 1: [], 2: []})
