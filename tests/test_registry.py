"""Every strategy of the registry on every family where its sites exist."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from arrays import made
from conftest import blocks_option, dissect, drive, equal_steps, record_of
from still import Still
from torch import nn

import cachedit
from cachedit import FeatureStrategy, UnsupportedModelError
from zoo.models import CASES, Case
from zoo.pipelines import PIPELINES, run
from zoo.unet_models import UNETS

STEPS = 16
SIGMAS = [1 - i / STEPS for i in range(STEPS)]
STRATEGIES = {name: cls for name, cls in cachedit.strategies().items() if issubclass(cls, FeatureStrategy)}  # type: ignore[operator]
EVERY = CASES | UNETS

SILENT = {("faster_cache", "plain")}
"""Without attention and a second branch there is nothing to reuse. Nor has EasyCache a rate while latents rest."""

every_strategy = pytest.mark.parametrize("name", STRATEGIES)
every_case = pytest.mark.parametrize("case", EVERY.values(), ids=EVERY)


def far(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference over the largest value."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


@functools.cache
def plain_run(name: str, seed: int = 0, batch: int = 1) -> list[torch.Tensor]:
    case = EVERY[name]
    return drive(case.build(), case, SIGMAS, seed=seed, batch=batch)


def wrapped(name: str, case: Case, model: nn.Module | None = None, still: bool = False, **options: Any) -> nn.Module:
    """A model under a strategy with its defaults; skips the test where the model has none of its sites."""
    model = case.build() if model is None else model
    cls, blocks = STRATEGIES[name], blocks_option(case)
    try:
        if cls().needed_arrays:
            options["profile"] = made(cls(), model, case, STEPS, blocks)
        if still:
            return cachedit.wrap(Still(model, STEPS), name, **blocks, **options)
        return cachedit.wrap(model, name, num_inference_steps=STEPS, **blocks, **options)
    except UnsupportedModelError as error:
        pytest.skip(str(error))


@every_case
@every_strategy
def test_a_run_is_right_where_computed_repeats_itself_and_leaves_no_trace(name: str, case: Case) -> None:
    model, plain = case.build(), plain_run(case.name)
    drive(model, case, [0.5])  # some models create attributes at their first call
    inside = dissect(model)
    wrapped(name, case, model)
    outputs = drive(model, case, SIGMAS)
    record = record_of(model)
    untouched = set(record.computed_steps) - set(record.reused_steps)
    assert untouched | set(record.reused_steps) == set(range(STEPS))
    assert untouched <= set(equal_steps(outputs, plain))
    assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(outputs, plain, strict=True))
    assert all(map(torch.isfinite, (x.sum() for x in outputs)))
    assert equal_steps(drive(model, case, SIGMAS), outputs) == [*range(STEPS)]
    cachedit.unwrap(model)
    assert dissect(model) == inside
    assert drive(model, case, SIGMAS[:1])[0].equal(plain[0])


@every_case
@every_strategy
def test_reuse_on_unchanged_inputs_is_exact(name: str, case: Case) -> None:
    """Weights that do not sum to one, or a residual that is added twice, would be far off."""
    model = case.build()
    pipe = wrapped(name, case, model, still=True)
    (plain,) = drive(case.build(), case, [0.5])
    for step in range(STEPS):
        pipe.scheduler._step_index = step
        (output,) = drive(model, case, [0.5])
        assert far(output, plain) <= 1e-5
    assert len(record_of(pipe).steps) == STEPS
    assert record_of(pipe).reused_steps or (name, case.name) in SILENT or name == "easy_cache"


@every_strategy
def test_every_strategy_fires_within_twenty_steps(name: str) -> None:
    """On latents that move a little at every step, as those of a run do."""
    options = {"threshold": 1.0} if name == "easy_cache" else {}  # random weights answer more than trained ones
    for case in (CASES["flux"], CASES["wan"], UNETS["unet-sd"]):
        try:
            model = wrapped(name, case, **options)
        except pytest.skip.Exception:
            continue
        latents = next(iter(case.inputs(0, 1).items()))
        for i, sigma in enumerate(SIGMAS):
            case.call(model, sigma, **{latents[0]: latents[1] * (1 + 0.01 * i)})
        if record_of(model).reused_steps:
            return
    pytest.fail("reused nothing on any of them")


@every_case
@every_strategy
def test_the_rows_of_a_batch_are_the_runs_of_its_samples(name: str, case: Case) -> None:
    if STRATEGIES[name].signal:
        pytest.skip("a batch computes where one of its samples would")
    rows = drive(wrapped(name, case), case, SIGMAS, seed=3, batch=2)
    for k in range(2):
        alone = drive(wrapped(name, case), case, SIGMAS, seed=3 + k)
        for ours, theirs in zip(rows, alone, strict=True):
            assert far(ours[k], theirs[0]) <= 2e-5  # rounding, which a forecast's weights magnify


PIPES = ("flux", "wan", "pixart", "cogview4", "qwenimage")


@pytest.mark.parametrize(
    "build", [PIPELINES[name] for name in PIPES if name in PIPELINES], ids=[*filter(PIPELINES.get, PIPES)]
)
@every_strategy
def test_a_pipeline_repeats_itself_and_comes_back(name: str, build: Any) -> None:
    if STRATEGIES[name]().needed_arrays:
        pytest.skip("profiles are made for bare models; calibrated runs of a pipeline are tested with the sample")
    built = build()
    baseline = run(built)
    inside = dissect(built.pipe)
    try:
        cachedit.wrap(built.pipe, name)
    except UnsupportedModelError as error:
        pytest.skip(str(error))
    first = run(built)
    assert record_of(built.pipe).status == "finished"
    assert torch.equal(run(built), first)
    cachedit.unwrap(built.pipe)
    assert dissect(built.pipe) == inside
    assert torch.equal(run(built), baseline)
