"""Rollouts against the stock model that computes everything before a chunk again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from video_models import CHANNELS, SIZE, TEXT, TOKENS, draw, far, float64_throughout, seen, tiny, whole

from cachedit.video import Branch, CausalNetwork
from cachedit.video.noise import Noise
from cachedit.video.presets import PRESETS, Preset
from cachedit.video.rollout import Rollout

CHUNK = 3
FRAME = (1, CHANNELS, SIZE, SIZE)
PROMPT, NEGATIVE = draw(1, 7, TEXT, seed=1), draw(1, 7, TEXT, seed=2)
ALL = PRESETS["self-forcing"]
ROLLING = ALL.changed(window=9, sink=3)
EXACT = 1e-11  # float64, over a few steps


@pytest.fixture(autouse=True, scope="module")
def _float64() -> Iterator[None]:
    with float64_throughout(), torch.no_grad():
        yield


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny()


@pytest.fixture
def network(model: Any) -> Iterator[CausalNetwork]:
    with CausalNetwork(model).attached() as attached:
        yield attached


def noise(seed: int = 7) -> Noise:
    return Noise(torch.Generator().manual_seed(seed), torch.device("cpu"), torch.float64)


def branch(network: CausalNetwork, preset: Preset, text: torch.Tensor = PROMPT) -> Branch:
    options = {"window": preset.window, "sink": preset.sink, "rope": preset.rope, "quant": preset.quant}
    return Branch(text, network.cache((text.shape[0], CHANNELS, 1, SIZE, SIZE), **options))


def rolled(
    network: CausalNetwork, preset: Preset, chunks: int, branches: list[Branch] | None = None, **options: Any
) -> Any:
    """Latents of so many chunks, each committed."""
    branches = branches or [branch(network, preset)]
    shape = (branches[0].embeds.shape[0], *FRAME[1:])
    rollout = Rollout(network, branches, preset, shape, noise(), **options)
    found = []
    for _ in range(chunks):
        found.append(rollout.make())
        rollout.commit(found[-1])
    return torch.cat(found, 2)


def recomputed(model: Any, preset: Preset, chunks: int) -> torch.Tensor:
    """The same from the stock model with one timestep per token: clean frames at 0, those of the chunk at theirs."""
    source, made = noise(), torch.zeros(1, CHANNELS, 0, SIZE, SIZE, dtype=torch.float64)
    for index in range(chunks):
        x = source.draw((1, CHANNELS, CHUNK, SIZE, SIZE))
        for step, sigma in enumerate(preset.sigmas):
            frames = torch.cat([made, x], 2)
            time = torch.zeros(1, frames.shape[2] * TOKENS, dtype=torch.float64)
            time[:, -CHUNK * TOKENS :] = 1000 * sigma
            mask = seen([CHUNK] * (index + 1), preset.window, preset.sink)
            x = x - sigma * whole(model, frames, time, PROMPT, mask)[:, :, -CHUNK:]
            if step + 1 < len(preset.sigmas):
                level = preset.sigmas[step + 1]
                x = (1 - level) * x + level * source.draw(x.shape)
        made = torch.cat([made, x], 2)
    return made


def test_t5_a_rollout_is_what_recomputing_everything_gives(network: CausalNetwork, model: Any) -> None:
    assert far(rolled(network, ALL, 4), recomputed(model, ALL, 4)) < EXACT


def test_t5_it_still_is_when_frames_leave_the_window(network: CausalNetwork, model: Any) -> None:
    assert far(rolled(network, ROLLING, 4), recomputed(model, ROLLING, 4)) < EXACT


def test_t5_the_commit_can_ride_on_the_first_step_of_the_next_chunk(network: CausalNetwork) -> None:
    one, other = branch(network, ROLLING), branch(network, ROLLING)
    for index in range(5):
        clean, start = (draw(1, CHANNELS, CHUNK, SIZE, SIZE, seed=10 * index + k) for k in range(2))
        network(one, clean, 0.0, commit=1)
        alone = network(one, start, 1000.0)
        both = network(other, torch.cat([clean, start], 2), [0.0] * CHUNK + [1000.0] * CHUNK, [CHUNK, CHUNK], 1)
        assert far(both[:, :, CHUNK:], alone) < EXACT


def test_t7_guidance_of_scale_one_is_no_guidance(network: CausalNetwork) -> None:
    both = [branch(network, ROLLING), branch(network, ROLLING, NEGATIVE)]
    assert far(rolled(network, ROLLING, 4, both, guidance=1.0), rolled(network, ROLLING, 4)) < EXACT


def test_guidance_moves_away_from_the_negative_prompt(network: CausalNetwork) -> None:
    both = [branch(network, ROLLING), branch(network, ROLLING, NEGATIVE)]
    guided = rolled(network, ROLLING, 1, both, guidance=3.0)
    x, steps = noise(), PRESETS["self-forcing"]
    latents = x.draw((1, CHANNELS, CHUNK, SIZE, SIZE))
    for step, sigma in enumerate(steps.sigmas):
        cond, uncond = (network(branch(network, ROLLING, text), latents, 1000 * sigma) for text in (PROMPT, NEGATIVE))
        latents = latents - sigma * (uncond + 3.0 * (cond - uncond))
        if step + 1 < len(steps.sigmas):
            level = steps.sigmas[step + 1]
            latents = (1 - level) * latents + level * x.draw(latents.shape)
    assert far(guided, latents) < EXACT


@pytest.mark.parametrize(("quant", "most"), [("int8", 2e-2), ("fp8", 8e-2)])
def test_t8_eight_bits_cost_little(network: CausalNetwork, quant: str, most: float) -> None:
    exact, coarse = rolled(network, ROLLING, 4), rolled(network, ROLLING.changed(quant=quant), 4)
    assert torch.equal(exact[:, :, :CHUNK], coarse[:, :, :CHUNK])  # nothing that is open is quantised
    assert 0 < far(coarse, exact) < most


def test_t8_int8_takes_less_than_a_third_of_float32() -> None:
    single = tiny(dtype=torch.float32, attention_head_dim=48)
    sizes = {quant: CausalNetwork(single).cache(FRAME, window=9, quant=quant).nbytes for quant in (None, "int8", "fp8")}
    assert sizes["int8"] / sizes[None] == (48 + 4) / (4 * 48)  # a byte per channel, and a scale
    assert sizes["fp8"] / sizes[None] == 1 / 4


def test_a_failing_pass_can_be_made_again(network: CausalNetwork) -> None:
    both = [branch(network, ROLLING), branch(network, ROLLING, NEGATIVE)]
    rollout = Rollout(network, both, ROLLING, FRAME, noise(), guidance=2.0)
    calls = 0

    def stop(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls in (10, 17, 30, 41):  # the first is the negative prompt's commit, the others are of steps
            raise KeyboardInterrupt

    hook = network.model.blocks[1].register_forward_pre_hook(stop)
    found: list[torch.Tensor] = []
    while len(found) < 5:
        try:
            latents = rollout.make()
        except KeyboardInterrupt:
            continue
        while rollout.committed < rollout.made:
            try:
                rollout.commit(latents)
            except KeyboardInterrupt:
                continue
        found.append(latents)
    hook.remove()
    assert calls > 54  # a chunk takes 8 calls and a commit 2, and some were made again
    undisturbed = [branch(network, ROLLING), branch(network, ROLLING, NEGATIVE)]
    assert torch.equal(torch.cat(found, 2), rolled(network, ROLLING, 5, undisturbed, guidance=2.0))


def test_t11_what_is_kept_for_1000_frames_is_what_is_kept_for_30() -> None:
    quick = ROLLING.changed(sigmas=(1.0,), chunk=5, window=9, sink=3)
    network = CausalNetwork(tiny(num_layers=1))
    rollout = Rollout(
        network,
        [Branch(PROMPT, network.cache((1, CHANNELS, 1, 2, 2), window=9, sink=3))],
        quick,
        (1, CHANNELS, 2, 2),
        noise(),
    )

    def held() -> int:
        state = rollout.state_dict()
        recent = state["_recent"].numel()
        kept = sum(x.numel() for cache in state["caches"] for x in cache["buffers"] if x is not None)
        return kept + recent + len(state["_starts"])

    sizes = {}
    with network.attached():
        while rollout.made < 1000:
            rollout.commit(rollout.make())
            sizes[rollout.made] = held()
    assert sizes[30] == sizes[500] == sizes[1000]
    assert rollout.branches[0].cache.live() == [0, 1, 2, *range(994, 1000)]
