"""Bugs that users of similar tools reported, one test or more per case; the ids are those of the field study."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from conftest import FLAT, SIGMAS, STEPS, Scripted, attach, dissect, drive, equal_steps, record_of, tensors_of_shape
from torch import nn

import cachedit
from cachedit import MagCache, Profile
from zoo.draw import Draw, settle
from zoo.models import CASES, count_blocks
from zoo.pipelines import PIPELINES, Built, run
from zoo.plain import PlainDenoiser, Stage

PLAIN, WAN, FLUX = CASES["plain"], CASES["wan"], CASES["flux"]
# Steps 0-4 are volatile, 5-9 are flat.
EARLY = Profile.from_ratios([1.0] + [2.0] * 4 + [1.0] * 5)
EAGER = MagCache(threshold=0.1, max_skip_steps=3, retention_ratio=0.0)


def test_b01_runs_of_any_size_in_any_order_are_as_on_a_fresh_wrap() -> None:
    """16 tokens x 10 steps, 36 tokens x 4 steps, a batch of 2 x 16 tokens x 7 steps, and the first run again."""
    sizes: list[dict[str, Any]] = [
        {"height": 16, "width": 16, "steps": 10},
        {"height": 24, "width": 24, "steps": 4},
        {"height": 16, "width": 16, "steps": 7, "num_images_per_prompt": 2},
        {"height": 16, "width": 16, "steps": 10},
    ]

    def wrapped() -> Built:
        built = PIPELINES["flux_true_cfg"]()
        cachedit.wrap(built.pipe, "magcache", profile=FLAT)
        return built

    built = wrapped()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*reused no step.*")
        results = [run(built, **size) for size in sizes]
        assert [result.shape for result in results] == [(1, 16, 4), (1, 36, 4), (2, 16, 4), (1, 16, 4)]
        assert all(torch.equal(result, run(wrapped(), **size)) for result, size in zip(results, sizes, strict=True))
    assert torch.equal(results[0], results[3])


def test_b15_image_to_image_is_judged_by_the_late_part_of_the_profile() -> None:
    """Strength 0.5: the last five of ten steps, which are flat; one is computed, three are reused, one is computed."""
    built = PIPELINES["flux_img2img"]()
    cachedit.wrap(built.pipe, EAGER, profile=EARLY, resample="nearest")
    first = run(built)
    record = record_of(built.pipe)
    assert [step.index for step in record.steps] == [5, 6, 7, 8, 9]
    assert (record.strip(), record.status) == ("■□□□■", "finished")
    assert torch.equal(run(built), first)
    run(built, strength=1.0)
    assert record_of(built.pipe).strip() == "■■■■■□□□■□"


def test_b11_each_expert_skips_at_its_own_steps_of_the_one_schedule() -> None:
    """Expert one has steps 0-2, expert two 3-9; step 3 has no residual of its own, whatever the profile says."""
    built = PIPELINES["wan22"]()
    cachedit.wrap(built.pipe, EAGER, profile=EARLY, resample="nearest")
    first = run(built)
    record = record_of(built.pipe)
    assert [step.index for step in record.steps] == [i for i in range(STEPS) for _ in ("cond", "uncond")]
    assert [step.expert for step in record.steps] == ["transformer"] * 6 + ["transformer_2"] * 14
    assert record.strip() == "■■■■■□□□■□"
    assert torch.equal(run(built), first)
    cachedit.wrap(built.pipe, EAGER, profile=FLAT)
    run(built)
    assert record_of(built.pipe).strip() == "■□□■□□□■□□"


def test_b11_the_warm_up_starts_again_with_the_second_expert() -> None:
    """A third of the steps: one of 3 for expert one, two of 7 for expert two."""
    built = PIPELINES["wan22"]()
    cachedit.wrap(built.pipe, MagCache(retention_ratio=0.34, retention_rounding="floor"), profile=FLAT)
    run(built)
    assert record_of(built.pipe).strip() == "■□□■■□□□■□"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["cond first", "uncond first"])
def test_b21_unlabelled_branches_reuse_their_own_residual(order: Sequence[int]) -> None:
    """Two prompts per step and constant latents; time creeps so slowly that nothing changes within a run."""
    model = WAN.build()
    prompts = [WAN.inputs(0, 1) | {"encoder_hidden_states": Draw(seed, 1)(6, 16)} for seed in (10, 11)]
    full = [WAN.call(model, 0.5, **prompt) for prompt in prompts]
    assert not torch.allclose(full[0], full[1], atol=1e-3)
    attach(model, WAN, Scripted(compute=(0,)))
    for i in range(STEPS):
        for branch in order:
            output = WAN.call(model, 0.5 - 1e-7 * i, **prompts[branch])
            torch.testing.assert_close(output, full[branch], rtol=1e-5, atol=1e-5)
    assert record_of(model).strip() == "■" + "□" * 9


class Deep(PlainDenoiser):
    """The plain denoiser with any number of stages."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.stages = nn.ModuleList([Stage(index) for index in range(depth)])


@pytest.mark.parametrize("depth", [1, 2, 3, 57])
def test_b28_the_residual_is_added_once_whatever_the_depth(depth: int) -> None:
    model = settle(Deep(depth))
    full = PLAIN.call(model, 0.5)
    attach(model, PLAIN, Scripted(compute=(0, 1)))
    with count_blocks(model, PLAIN) as count:
        outputs = [PLAIN.call(model, 0.5 - 1e-7 * i) for i in range(4)]
    assert count.per_block == [2] * depth
    for output in outputs:
        torch.testing.assert_close(output, full, rtol=1e-6, atol=1e-6)


def test_b32_every_layer_gets_its_own_argument() -> None:
    """Every stage asserts that it got its own index; on a reused step none runs."""
    model = PLAIN.build()
    plain = drive(model, PLAIN)
    with pytest.raises(AssertionError, match="stage 1 received the arguments of stage 0"), torch.no_grad():
        model.stages[1](torch.zeros(1, 12, 24), torch.zeros(1, 24), bias_index=0)
    attach(model, PLAIN, Scripted(compute=(0, 4, 8)))
    assert equal_steps(drive(model, PLAIN), plain) == [0, 4, 8]


def test_b51_signatures_and_output_types_stay() -> None:
    model = FLUX.build()
    inputs, time = FLUX.inputs(0, 1), [FLUX.time(sigma, 1)["timestep"] for sigma in SIGMAS]
    before = [inspect.signature(call) for call in (model.forward, *[block.forward for block in FLUX.blocks(model)])]
    attach(model, FLUX, Scripted(compute=(0,)))
    after = [inspect.signature(call) for call in (model.forward, *[block.forward for block in FLUX.blocks(model)])]
    assert after == before
    assert "guidance" in inspect.signature(model.forward).parameters
    names = ["hidden_states", "encoder_hidden_states", "pooled_projections"]
    rest = {key: value for key, value in inputs.items() if key not in names}
    with torch.no_grad():
        as_tuple = [model(*[inputs[name] for name in names], t, **rest, return_dict=False) for t in time]
        as_class = [model(**inputs, timestep=t) for t in time]
    assert record_of(model).strip() == "■" + "□" * 9
    assert {type(output) for output in as_tuple} == {tuple}
    assert {type(output).__name__ for output in as_class} == {"Transformer2DModelOutput"}
    assert all(torch.equal(a[0], b.sample) for a, b in zip(as_tuple, as_class, strict=True))


GUIDANCE = {"split": "flux_true_cfg", "batched": "pixart"}


@pytest.mark.parametrize("name", GUIDANCE.values(), ids=GUIDANCE)
def test_b36_batches_equal_their_samples(name: str) -> None:
    """Two images per prompt, then two prompts; every sample as it is alone."""
    built = PIPELINES[name]()
    cachedit.wrap(built.pipe, "magcache", profile=FLAT)

    def latents(rows: int) -> torch.Tensor:
        shape = (16, 4) if name == "flux_true_cfg" else (4, 8, 8)
        return Draw(20, rows)(*shape)

    def prompts(rows: Sequence[int]) -> dict[str, torch.Tensor]:
        given = {key: value for key, value in built.kwargs.items() if isinstance(value, torch.Tensor)}
        return {
            key: torch.cat([Draw(100 * k + row, 1)(*value.shape[1:]) if "embeds" in key else value for row in rows])
            for k, (key, value) in enumerate(given.items())
        }

    def close(batch: torch.Tensor, solo: list[torch.Tensor]) -> None:
        torch.testing.assert_close(batch, torch.cat(solo), rtol=1e-4, atol=1e-4)

    solo = [run(built, latents=latents(2)[row : row + 1]) for row in range(2)]
    strip = record_of(built.pipe).strip()
    close(run(built, latents=latents(2), num_images_per_prompt=2), solo)
    assert record_of(built.pipe).strip() == strip == "■■□□□■□□□■"
    solo = [run(built, latents=latents(2)[row : row + 1], **prompts([row])) for row in range(2)]
    close(run(built, latents=latents(2), **prompts([0, 1])), solo)
    assert record_of(built.pipe).strip() == strip


@pytest.mark.parametrize("at", [("cond", "uncond"), ("uncond",)], ids=["the whole step", "one branch"])
def test_b42_a_nan_costs_one_computed_step_and_one_warning(at: tuple[str, ...]) -> None:
    """Step 5 is computed and gets a NaN; step 6 would be reused."""
    model = attach(WAN.build(), WAN, MagCache(max_skip_steps=3, retention_ratio=0.2), profile=FLAT)
    outputs: dict[tuple[int, str], torch.Tensor] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i, sigma in enumerate(SIGMAS):
            for branch in ("cond", "uncond"):
                x = WAN.inputs(0, 1)["hidden_states"]
                if i == 5 and branch in at:
                    x[0, 0, 0, 0, 0] = float("nan")
                with model.cache_context(branch):  # type: ignore[operator]
                    outputs[i, branch] = WAN.call(model, sigma, hidden_states=x)
    assert record_of(model).strip() == "■■□□□■■□□□"
    assert [key for key, output in outputs.items() if not output.isfinite().all()] == [(5, branch) for branch in at]
    assert len([w for w in caught if "finite" in str(w.message)]) == 1


@pytest.mark.parametrize("end", ["finished", "aborted", "unwrapped", "deleted"])
def test_b48_no_feature_outlives_its_run(end: str) -> None:
    built = PIPELINES["wan22"]()
    shape = (1, 12, 32)  # 12 tokens of 32 channels
    before = len(tensors_of_shape(*shape))
    cachedit.wrap(built.pipe, "magcache", profile=FLAT)
    during: list[int] = []

    def callback(pipe: Any, index: int, timestep: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        if index == 4:
            during.append(len(tensors_of_shape(*shape)) - before)
            if end == "aborted":
                raise KeyboardInterrupt
        return {}

    if end == "aborted":
        with pytest.raises(KeyboardInterrupt):
            run(built, callback_on_step_end=callback)
    else:
        run(built, callback_on_step_end=callback)
    if end == "unwrapped":
        cachedit.unwrap(built.pipe)
    if end == "deleted":
        del built
    assert during[0] > 0
    assert len(tensors_of_shape(*shape)) == before


REWRAPS: dict[str, Callable[[nn.Module], Any]] = {
    "same": lambda model: attach(model, PLAIN, "magcache"),
    "other options": lambda model: attach(model, PLAIN, "magcache", threshold=0.5),
    "other strategy": lambda model: attach(model, PLAIN, MagCache(), few_step_guard=False),
}


@pytest.mark.parametrize("again", REWRAPS.values(), ids=REWRAPS)
def test_b56_the_second_wrap_replaces_the_first(again: Callable[[nn.Module], Any]) -> None:
    single, model = PLAIN.build(), PLAIN.build()
    inside = dissect(model)
    again(single)
    attach(model, PLAIN, Scripted(compute=(0, 1, 2)))
    again(model)
    again(model)
    counts = []
    for wrapped in (single, model):
        with count_blocks(wrapped, PLAIN) as count:
            drive(wrapped, PLAIN)
        counts.append(count.per_block)
    assert counts == [[4] * 4] * 2
    cachedit.unwrap(model)
    assert dissect(model) == inside


def test_b69_a_cache_that_never_fires_says_so_and_costs_no_block() -> None:
    built = PIPELINES["flux"]()
    baseline = run(built, steps=20)
    cachedit.wrap(built.pipe, "magcache", profile=Profile.from_ratios([1.0] + [1.01] * 19), threshold=1e-6)
    with count_blocks(built.pipe.transformer, FLUX) as count, pytest.warns(UserWarning, match="cachedit") as caught:
        assert torch.equal(run(built, steps=20), baseline)
    assert set(count.per_block) == {20}
    said = [str(w.message) for w in caught if "cachedit" in str(w.message)]
    assert len(said) == 1
    assert "MagCache reused no step" in said[0]
    assert "error reached the threshold" in said[0]
    record = record_of(built.pipe)
    assert (record.nfe, record.reused_steps) == (20, [])
