"""What fills a ring, by preset: filled anew before every chunk, or when it is full; a wave of chunks; pinned frames."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_video_ring import X, oracle, ring
from test_video_rollout import CHUNK, FRAME, PROMPT, branch, noise, rolled
from test_video_stream import asked
from test_video_stream import pipe as pipe
from video_models import CHANNELS, SIZE, TOKENS, draw, far, float64_throughout, seen, tiny, whole

import cachedit
from cachedit.video import PRESETS, Branch, CausalNetwork, RollingKVCache, Skipping
from cachedit.video.decoder import encoded
from cachedit.video.rollout import Rollout

EXACT = 1e-11


@pytest.fixture(scope="module")
def model() -> Any:
    with float64_throughout():
        return tiny()


@pytest.fixture
def network(model: Any) -> Iterator[CausalNetwork]:
    with float64_throughout(), CausalNetwork(model).attached() as attached:
        yield attached


def test_recompute_fills_the_ring_from_the_last_clean_frames_before_every_chunk(
    network: CausalNetwork, model: Any
) -> None:
    """Krea: at positions from 0 on, whatever the chunk's number, and without a commit behind."""
    preset, source = PRESETS["krea"], noise()
    ours = rolled(network, preset, 4)
    made = torch.zeros(1, CHANNELS, 0, SIZE, SIZE, dtype=torch.float64)
    for index in range(4):
        x = source.draw((1, CHANNELS, CHUNK, SIZE, SIZE))
        before = made[:, :, -CHUNK:]
        for step, (sigma, timestep) in enumerate(zip(preset.sigmas, preset.timesteps, strict=True)):
            frames = torch.cat([before, x], 2)
            time = torch.zeros(1, frames.shape[2] * TOKENS, dtype=torch.float64)
            time[:, -CHUNK * TOKENS :] = timestep
            x = x - sigma * whole(model, frames, time, PROMPT, seen([CHUNK] * (1 + bool(index))))[:, :, -CHUNK:]
            if step + 1 < len(preset.sigmas):
                level = preset.sigmas[step + 1]
                x = (1 - level) * x + level * source.draw(x.shape)
        made = torch.cat([made, x], 2)
    assert far(ours, made) < EXACT


def test_restart_begins_again_from_the_overlap_once_the_ring_is_full(network: CausalNetwork) -> None:
    preset = PRESETS["causvid"].changed(window=9)
    first = rolled(network, preset, 4)
    assert far(rolled(network, preset.changed(window=12), 4)[:, :, :9], first[:, :, :9]) < EXACT
    again = Rollout(network, [branch(network, preset)], preset, FRAME, noise())
    again.commit(first[:, :, 6:9])
    source = noise()
    for _ in range(3 * len(preset.sigmas)):  # what the three chunks before drew
        source.draw((1, CHANNELS, CHUNK, SIZE, SIZE))
    again.noise = source
    assert far(again.make(), first[:, :, 9:]) < EXACT


def test_writing_a_restarted_ring_anew_under_the_same_text_changes_nothing(network: CausalNetwork) -> None:
    """Its frames are counted from the restart, those of the video from the beginning."""
    preset = PRESETS["causvid"].changed(window=9)
    one = branch(network, preset)
    rollout = Rollout(network, [one], preset, FRAME, noise())
    for _ in range(4):
        rollout.commit(rollout.make())
    assert (one.cache.done, rollout.committed) == (6, 12)
    before = one.cache.frames(2, range(6))[0].clone()
    rollout.recommit()
    assert far(one.cache.frames(2, range(6))[0], before) < EXACT


def test_the_first_frame_is_encoded_anew_as_the_first_of_a_video(pipe: Any) -> None:
    """The latent of four frames cannot begin a video, whose first latent is of one."""
    stream = cachedit.wrap(pipe, "rolling-kv", preset="krea").stream(**asked())
    chunks = [next(stream), next(stream)]
    shown = torch.cat([chunk.frames for chunk in chunks], 1)
    rollout = stream._open()
    assert rollout.first_frame is not None
    frame = 2 * shown[:, -9].unsqueeze(2) - 1  # the last three latents are twelve frames; behind the first come eight
    assert torch.allclose(rollout.first_frame(3), encoded(pipe.vae, frame), atol=1e-6)


def test_a_wave_takes_all_its_chunks_a_step_further_at_once(network: CausalNetwork, model: Any) -> None:
    """Rolling Forcing, with chunks of one frame: clean ones at 0 and causal, the open ones see each other."""
    preset = replace(PRESETS["rolling-forcing"], chunk=1, window=20, sink=0, rope="absolute").changed(
        sigmas=(1.0, 0.8, 0.5)
    )
    shape, source = (1, CHANNELS, 1, SIZE, SIZE), noise()
    ours = rolled(network, preset, 4)
    clean, chunks, steps = torch.zeros(1, CHANNELS, 0, SIZE, SIZE, dtype=torch.float64), [], []
    while clean.shape[2] < 4:
        if len(chunks) < 3:
            chunks, steps = [*chunks, source.draw(shape)], [*steps, 0]
        done, count = clean.shape[2], len(chunks)
        times = torch.tensor([0.0] * done + [1000 * preset.sigmas[k] for k in steps], dtype=torch.float64)
        mask = seen([1] * done + [count])
        frames = torch.cat([clean, *chunks], 2)
        v = whole(model, frames, times.repeat_interleave(TOKENS)[None], PROMPT, mask)[:, :, done:]
        chunks = [x - preset.sigmas[k] * v[:, :, i : i + 1] for i, (x, k) in enumerate(zip(chunks, steps, strict=True))]
        steps = [k + 1 for k in steps]
        if steps[0] == 3:
            clean, steps = torch.cat([clean, chunks.pop(0)], 2), steps[1:]
        levels = [preset.sigmas[k] for k in steps]
        chunks = [(1 - s) * x + s * source.draw(shape) for x, s in zip(chunks, levels, strict=True)]
    assert far(ours, clean) < EXACT


def test_a_wave_of_a_video_with_an_end_shrinks(network: CausalNetwork) -> None:
    preset = PRESETS["rolling-forcing"]
    rollout = Rollout(network, [branch(network, preset)], preset, FRAME, noise(), limit=9)
    widths = []
    while not rollout.ended:
        rollout.commit(rollout.make())
        widths.append((rollout.passes, rollout.attended))
    assert widths == [(5, 9), (1, 9), (1, 9)]  # three chunks at most, then the committed ones and what is left


def test_context_noise_is_added_to_what_is_committed(network: CausalNetwork) -> None:
    """Models trained on noised context are told of its level and get it."""
    given: list[tuple[float, torch.Tensor]] = []

    def look(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        given.append((float(kwargs["timestep"][0]), kwargs["hidden_states"]))

    preset, source = PRESETS["self-forcing"].changed(context_sigma=0.25), noise()
    rollout = Rollout(network, [branch(network, preset)], preset, FRAME, noise())
    hook = network.model.register_forward_pre_hook(look, with_kwargs=True)
    latents = rollout.make()
    rollout.commit(latents)
    hook.remove()
    drawn = [source.draw(latents.shape) for _ in range(5)]  # for the start, three steps, and the commit
    assert given[-1][0] == 250.0
    assert torch.equal(given[-1][1], 0.75 * latents + 0.25 * drawn[-1])


@pytest.mark.parametrize("rope", ["absolute", "relative"])
def test_frames_that_a_step_leaves_out_are_seen_by_nobody(network: CausalNetwork, model: Any, rope: str) -> None:
    """The oracle hides them: the other frames keep their positions."""
    one = Branch(PROMPT, network.cache(FRAME[:2] + (1, *FRAME[2:]), window=12, rope=rope))
    x = draw(1, CHANNELS, 7, SIZE, SIZE, seed=3)
    network(one, x[:, :, :3], 400.0, commit=1)
    kept = network(one, x[:, :, [3, 5, 6]], 400.0, left_out=[1])
    mask = seen([3, 4])
    mask[:, 4 * TOKENS : 5 * TOKENS] = False
    mask[4 * TOKENS : 5 * TOKENS] = True  # whatever it sees itself
    wanted = whole(model, x, torch.full((1,), 400.0, dtype=torch.float64), PROMPT, mask)
    assert far(kept, wanted[:, :, [3, 5, 6]]) < EXACT
    with pytest.raises(ValueError, match="some, not all"):
        network(one, x[:, :, :0], 400.0, left_out=[0, 1, 2])


def test_frames_left_out_are_filled_in(network: CausalNetwork) -> None:
    """All steps leave the middle one out; then it is the mean of its neighbours, and the last step gives it so."""
    preset = PRESETS["self-forcing"]
    rollout = Rollout(network, [branch(network, preset)], preset, FRAME, noise())

    def fill(clean: torch.Tensor, absent: Any) -> torch.Tensor:
        clean[:, :, list(absent)] = clean[:, :, [0, 2]].mean(2, keepdim=True)
        return clean

    asked_for: list[int] = []
    rollout.skipping = Skipping(lambda step: asked_for.append(step) or [1], fill)  # type: ignore[func-returns-value]
    latents = rollout.make()
    assert asked_for == [0, 1, 2, 3]
    assert torch.equal(latents[:, :, 1], latents[:, :, [0, 2]].mean(2))
    rollout.commit(latents)
    rollout.skipping = None
    assert torch.isfinite(rollout.make()).all()


class TestPins:
    """Frames 3 to 5 are pinned, and stay when they leave a window of 6 frames with a sink of 1."""

    BLOCKS = [1, 2, 3, 3, 3, 3]

    def rolled(self, model: Any, cache: RollingKVCache) -> torch.Tensor:
        found, start = [], 0
        text = draw(2, 7, 16, seed=1)
        one = Branch(text, cache)
        with float64_throughout(), CausalNetwork(model).attached() as network:
            for size in self.BLOCKS:
                found.append(network(one, X[:, :, start : start + size], 400.0, commit=1))
                start += size
                if start == 6:
                    cache.pin([3, 4, 5])
        return torch.cat(found, 2)

    def test_they_are_attended_to_forever(self, model: Any) -> None:
        cache = ring(model, 6, sink=1, pins=3)
        mask = seen(self.BLOCKS, 6, 1)
        mask[6 * TOKENS :, 3 * TOKENS : 6 * TOKENS] = True
        with float64_throughout():
            wanted = whole(model, X, torch.full((2,), 400.0, dtype=torch.float64), draw(2, 7, 16, seed=1), mask)
            plain = oracle(model, self.BLOCKS, 6, 1)
        assert far(self.rolled(model, cache), wanted) < EXACT
        assert cache.pinned == [3, 4, 5]
        assert far(wanted, plain) > 1e-3

    def test_they_are_shifted_with_the_sink(self, model: Any) -> None:
        shifted = self.rolled(model, ring(model, 6, sink=1, pins=3, rope="sink_shift"))
        assert far(shifted, self.rolled(model, ring(model, 6, sink=1, pins=3, rope="relative"))) < EXACT
        assert far(shifted, self.rolled(model, ring(model, 6, sink=1, pins=3))) > 1e-3

    def test_the_oldest_give_way(self, model: Any) -> None:
        cache = ring(model, 6, sink=1, pins=2)
        self.rolled(model, cache)
        assert cache.pinned == [4, 5]

    def test_they_are_kept_in_a_state(self, model: Any) -> None:
        cache, other = (ring(model, 6, sink=1, pins=3, rope="sink_shift") for _ in range(2))
        self.rolled(model, cache)
        other.load_state_dict(cache.state_dict())
        assert (other.pinned, other.done) == ([3, 4, 5], 15)
        with pytest.raises(ValueError, match="allowed: one of"):
            ring(model, 6, sink=1).load_state_dict(cache.state_dict())
