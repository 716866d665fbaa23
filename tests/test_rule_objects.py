"""Sentences 9 and 10 of the design: what is held, and what happens to the objects."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import FLAT, SIGMAS, STEPS, Scripted, attach, dissect, drive, equal_steps, record_of, tensors_of_shape
from diffusers import FluxImg2ImgPipeline
from torch import nn

import cachedit
from cachedit import FeatureStrategy, MagCache, Profile
from zoo.models import CASES, count_blocks
from zoo.pipelines import PIPELINES, Built, run

PLAIN, FLUX = CASES["plain"], CASES["flux"]
PLAIN_FEATURE = (1, 12, 24)  # batch, tokens, channels
FLUX_FEATURE = (1, 16, 32)


# -- 9: what is held ----------------------------------------------------------------------------------------------

LAST_COMPUTED, LAST_REUSED = Scripted(compute=(0, 5, 9)), Scripted(compute=(0, 5))
both_ends = pytest.mark.parametrize("strategy", [LAST_COMPUTED, LAST_REUSED], ids=["last computed", "last reused"])


def held(shape: tuple[int, ...]) -> int:
    return len(tensors_of_shape(*shape))


@both_ends
@pytest.mark.parametrize(
    "announced", [{"num_inference_steps": STEPS}, {"timesteps": SIGMAS}], ids=lambda a: next(iter(a))
)
def test_rule_09_nothing_is_held_after_a_run_by_hand(strategy: FeatureStrategy, announced: dict[str, Any]) -> None:
    model = attach(PLAIN.build(), PLAIN, strategy, **announced)
    drive(model, PLAIN, SIGMAS[:-1])
    assert held(PLAIN_FEATURE) > 0, "nothing is held during the run, so the test shows nothing"
    drive(model, PLAIN, SIGMAS[-1:])
    assert held(PLAIN_FEATURE) == 0
    assert record_of(model).status == "finished"


@both_ends
def test_rule_09_nothing_is_held_after_a_guided_run_by_hand(strategy: FeatureStrategy) -> None:
    """Neither residuals nor the prompts by which the branches were told apart."""
    model = attach(FLUX.build(), FLUX, strategy)
    prompts = [FLUX.inputs(seed, 1) for seed in (1, 2)]
    for sigma in SIGMAS:
        for inputs in prompts:
            FLUX.call(model, sigma, **inputs)
    watched = [weakref.ref(inputs["encoder_hidden_states"]) for inputs in prompts]
    del prompts, inputs
    assert held(FLUX_FEATURE) == 0
    assert [reference() for reference in watched] == [None, None]


@both_ends
@pytest.mark.parametrize("at", [None, 0, 6, 9], ids=lambda at: "finished" if at is None else f"aborted at {at}")
def test_rule_09_nothing_is_held_after_a_pipeline_run(strategy: FeatureStrategy, at: int | None) -> None:
    built = PIPELINES["flux_true_cfg"]()
    cachedit.wrap(built.pipe, strategy)

    def callback(pipe: Any, index: int, timestep: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        if index == 0:
            assert held(FLUX_FEATURE) == 2, "one residual per branch is held during the run"
        if index == at:
            raise ValueError("the user stopped")
        return {}

    with contextlib.suppress(ValueError):
        run(built, callback_on_step_end=callback)
    assert held(FLUX_FEATURE) == 0
    assert record_of(built.pipe).cache_bytes_peak == 2 * 16 * 32 * 4  # branches, tokens, channels, bytes


@pytest.mark.parametrize("end", ["unwrap", "rewrap", "del"])
def test_rule_09_nothing_is_held_after_an_aborted_run_by_hand(end: str) -> None:
    model = attach(PLAIN.build(), PLAIN, LAST_REUSED)
    drive(model, PLAIN, SIGMAS[:4])
    assert held(PLAIN_FEATURE) > 0
    if end == "unwrap":
        cachedit.unwrap(model)
    elif end == "rewrap":
        attach(model, PLAIN, LAST_COMPUTED)
    else:
        alive = weakref.ref(model)
        del model
        gc.collect()
        assert alive() is None
    assert held(PLAIN_FEATURE) == 0


def test_rule_09_a_wrapped_pipeline_can_be_deleted() -> None:
    built = PIPELINES["flux"]()
    cachedit.wrap(built.pipe, LAST_REUSED)
    run(built)
    alive = [weakref.ref(built.pipe), weakref.ref(built.pipe.transformer)]
    del built
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


def test_rule_09_the_number_of_branches_that_are_held_is_bounded() -> None:
    """Somebody who calls a model at one timestep for ever has no branches, but looks as if."""
    model = attach(PLAIN.build(), PLAIN, Scripted())
    counts = []
    for _ in range(3):
        drive(model, PLAIN, [0.5] * 40)
        counts.append(held(PLAIN_FEATURE))
    assert counts[0] == counts[1] == counts[2]


def test_rule_09_last_run_gives_the_bytes() -> None:
    """One branch, 12 tokens of 24 channels in fp32."""
    model = attach(PLAIN.build(), PLAIN, LAST_REUSED)
    assert cachedit.last_run(model) is None
    drive(model, PLAIN)
    assert record_of(model).cache_bytes_peak == 12 * 24 * 4
    assert f"{12 * 24 * 4:,} bytes" in str(record_of(model))


# -- 10: replace, restore, copy -----------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["magcache", Scripted(compute=(0, 3))], ids=["same", "other"])
def test_rule_10_wrapping_again_replaces(first: Any) -> None:
    model = PLAIN.build()
    inside = dissect(model)
    attach(model, PLAIN, first)
    drive(model, PLAIN, SIGMAS[:3])
    attach(model, PLAIN, "magcache", threshold=0.5, max_skip_steps=2)
    with count_blocks(model, PLAIN) as count:
        drive(model, PLAIN)
    assert record_of(model).strip() == "■■□□■□□■□□"
    assert set(count.per_block) == {4}
    assert "max_skip_steps=2" in record_of(model).strategy
    cachedit.unwrap(model)
    assert dissect(model) == inside
    assert cachedit.unwrap(model) is model
    assert dissect(model) == inside


def test_rule_10_a_pipeline_and_its_denoiser_never_hold_two_caches() -> None:
    built = PIPELINES["flux"]()
    run(built)
    inside = dissect(built.pipe)
    cachedit.wrap(built.pipe, "magcache", profile=FLAT)
    cachedit.wrap(built.pipe.transformer, Scripted(), num_inference_steps=STEPS)
    assert type(built.pipe) is inside["pipeline"][0]
    cachedit.wrap(built.pipe, "magcache", profile=FLAT)
    with count_blocks(built.pipe.transformer, FLUX) as count:
        run(built)
    assert record_of(built.pipe).strip() == "■■□□□■□□□■"
    assert set(count.per_block) == {4}
    cachedit.unwrap(built.pipe)
    assert dissect(built.pipe) == inside


def test_rule_10_two_pipelines_may_share_a_denoiser() -> None:
    """``from_pipe`` is how people make an image-to-image pipeline; the run of either is right."""
    first = PIPELINES["flux"]()
    img2img = PIPELINES["flux_img2img"]()
    second = Built(FluxImg2ImgPipeline.from_pipe(first.pipe), img2img.kwargs, calls=5)
    assert second.pipe.transformer is first.pipe.transformer
    fresh = PIPELINES["flux_img2img"]()
    cachedit.wrap(fresh.pipe, LAST_REUSED)
    expected = run(fresh)
    cachedit.wrap(first.pipe, LAST_REUSED)
    alone = run(first)
    assert torch.equal(run(second), expected)
    assert torch.equal(run(first), alone)
    cachedit.wrap(second.pipe, LAST_REUSED)
    assert torch.equal(run(second), expected)
    cachedit.unwrap(second.pipe)
    assert dissect(first.pipe)["transformer"] == dissect(second.pipe)["transformer"]
    assert cachedit.last_run(first.pipe) is not None


def test_rule_10_cached_unwraps_even_after_an_error() -> None:
    built = PIPELINES["flux"]()
    run(built)
    inside = dissect(built.pipe)

    def stopped() -> None:
        with cachedit.cached(built.pipe, "magcache", profile=FLAT) as pipe:
            assert pipe is built.pipe
            run(built)
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        stopped()
    assert dissect(built.pipe) == inside
    assert record_of(built.pipe).strip() == "■■□□□■□□□■"


FOREIGN = Profile(
    arrays=FLAT.arrays, name="foreign", model={"class": "OtherModel", "fingerprint": {"width": 7}, "names": []}
)
FAILING: dict[str, Callable[[Any], Any]] = {
    "unknown strategy": lambda target: cachedit.wrap(target, "magcash", profile=FLAT),
    "no strategy": lambda target: cachedit.wrap(target, 3, profile=FLAT),  # type: ignore[arg-type]
    "unknown option": lambda target: cachedit.wrap(target, "magcache", profile=FLAT, treshold=0.1),
    "impossible option": lambda target: cachedit.wrap(target, "magcache", profile=FLAT, threshold=-1.0),
    "foreign profile": lambda target: cachedit.wrap(target, "magcache", profile=FOREIGN),
    "missing profile": lambda target: cachedit.wrap(target, "magcache"),
    "unneeded profile": lambda target: cachedit.wrap(target, Scripted(), profile=FLAT),
    "unknown list": lambda target: cachedit.wrap(target, "magcache", profile=FLAT, blocks=["nope"]),
    "unknown time": lambda target: cachedit.wrap(target, "magcache", profile=FLAT, timestep_arg="nope"),
}


@pytest.mark.parametrize("fail", FAILING.values(), ids=FAILING)
@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "wrapped"])
@pytest.mark.parametrize("kind", ["pipeline", "module"])
def test_rule_10_a_failing_wrap_leaves_the_object_untouched(
    kind: str, wrapped: bool, fail: Callable[[Any], Any]
) -> None:
    built = PIPELINES["flux"]()
    target: Any = built.pipe if kind == "pipeline" else built.pipe.transformer
    if wrapped:
        cachedit.wrap(target, MagCache(max_skip_steps=1), profile=FLAT, num_inference_steps=STEPS)
    inside = dissect(target)
    with pytest.raises((ValueError, TypeError)):
        fail(target)
    assert dissect(target) == inside
    if wrapped:
        drive(built.pipe.transformer, FLUX) if kind == "module" else run(built)
        assert record_of(target).strip() == "■■□■□■□■□■"


def test_rule_10_a_copy_of_a_wrapped_module_is_independent() -> None:
    """The copy is made in the middle of a run, and both go on with other inputs."""
    expected = [drive(attach(PLAIN.build(), PLAIN, LAST_REUSED), PLAIN, seed=seed) for seed in (0, 1)]
    model = attach(PLAIN.build(), PLAIN, LAST_REUSED)
    begun = drive(model, PLAIN, SIGMAS[:3], seed=0)
    twin = copy.deepcopy(model)
    plain = PLAIN.build()
    other = drive(twin, PLAIN, seed=1)
    assert equal_steps(begun + drive(model, PLAIN, SIGMAS[3:], seed=0), expected[0]) == [*range(STEPS)]
    assert equal_steps(other, expected[1]) == [*range(STEPS)]
    cachedit.unwrap(twin)
    assert equal_steps(drive(twin, PLAIN), drive(plain, PLAIN)) == [*range(STEPS)]
    assert {path: kind for path, (kind, _) in dissect(twin).items()} == {
        path: kind for path, (kind, _) in dissect(plain).items()
    }
    assert equal_steps(drive(model, PLAIN, seed=1), expected[1]) == [*range(STEPS)]


def test_rule_10_a_copy_of_a_wrapped_pipeline_is_independent() -> None:
    built = PIPELINES["flux_true_cfg"]()
    baseline = run(built)
    cachedit.wrap(built.pipe, LAST_REUSED)
    expected = run(built)
    twin = Built(copy.deepcopy(built.pipe), built.kwargs, calls=built.calls)
    cachedit.unwrap(built.pipe)
    assert torch.equal(run(twin), expected)
    assert torch.equal(run(built), baseline)
    cachedit.wrap(built.pipe, Scripted(compute=(0, 2)))
    cachedit.unwrap(twin.pipe)
    assert torch.equal(run(twin), baseline)
    assert type(twin.pipe) is type(PIPELINES["flux"]().pipe)
    run(built)
    assert record_of(built.pipe).strip() == "■□■□□□□□□□"


def test_rule_10_a_copy_of_a_denoiser_out_of_a_wrapped_pipeline_is_independent() -> None:
    built = PIPELINES["flux"]()
    cachedit.wrap(built.pipe, LAST_REUSED)
    expected = run(built)
    twin: nn.Module = copy.deepcopy(built.pipe.transformer)
    assert torch.equal(run(built), expected)
    cachedit.unwrap(twin)
    assert equal_steps(drive(twin, FLUX), drive(FLUX.build(), FLUX)) == [*range(STEPS)]
    assert torch.equal(run(built), expected)
    assert record_of(built.pipe).strip() == "■□□□□■□□□□"
