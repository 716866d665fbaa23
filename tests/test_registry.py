"""Every strategy of the registry on every family where its sites exist."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from arrays import made
from conftest import blocks_option, dissect, drive, equal_steps, record_of
from torch import nn

import cachedit
from cachedit import FeatureStrategy, UnsupportedModelError
from zoo.models import CASES, Case
from zoo.pipelines import PIPELINES, run
from zoo.unet_models import UNETS

STEPS = 16
SIGMAS = [1 - i / STEPS for i in range(STEPS)]
ALIKE = [0.5 - i * 1e-5 for i in range(STEPS)]
STRATEGIES = {name: cls for name, cls in cachedit.strategies().items() if issubclass(cls, FeatureStrategy)}  # type: ignore[operator]
EVERY = CASES | UNETS

ALIKE_ON = ("flux", "wan", "sd3", "latte", "ltx", "plain", "unet-sd")
"""Families whose timestep is continuous, so that steps can be told apart that are almost alike."""

every_strategy = pytest.mark.parametrize("name", STRATEGIES)
every_case = pytest.mark.parametrize("case", EVERY.values(), ids=EVERY)


@functools.cache
def plain_run(name: str, seed: int = 0, batch: int = 1) -> list[torch.Tensor]:
    case = EVERY[name]
    return drive(case.build(), case, SIGMAS, seed=seed, batch=batch)


def wrapped(name: str, case: Case, **options: Any) -> nn.Module:
    """A model under a strategy with its defaults; skips the test where the model has none of its sites."""
    cls, model, blocks = STRATEGIES[name], case.build(), blocks_option(case)
    if cls().needed_arrays:
        try:
            options["profile"] = made(cls, model, case, STEPS, blocks)
        except UnsupportedModelError as error:
            pytest.skip(str(error))
    try:
        return cachedit.wrap(model, name, num_inference_steps=STEPS, **blocks, **options)
    except UnsupportedModelError as error:
        pytest.skip(str(error))


@every_case
@every_strategy
def test_a_run_is_right_where_computed_repeats_itself_and_leaves_no_trace(name: str, case: Case) -> None:
    model = wrapped(name, case)
    plain = plain_run(case.name)
    outputs = drive(model, case, SIGMAS)
    record = record_of(model)
    untouched = set(record.computed_steps) - set(record.reused_steps)
    assert untouched | set(record.reused_steps) == set(range(STEPS))
    assert untouched <= set(equal_steps(outputs, plain))
    assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(outputs, plain, strict=True))
    assert all(map(torch.isfinite, (x.sum() for x in outputs)))
    assert equal_steps(drive(model, case, SIGMAS), outputs) == [*range(STEPS)]
    cachedit.unwrap(model)
    fresh = case.build()
    drive(fresh, case, [0.5])
    assert [path for path, _ in dissect(fresh).items()] == [path for path, _ in dissect(model).items()]
    assert drive(model, case, [0.5])[0].equal(drive(fresh, case, [0.5])[0])


@pytest.mark.parametrize("case", [EVERY[name] for name in ALIKE_ON], ids=ALIKE_ON)
@every_strategy
def test_what_does_not_change_is_forecast_as_it_is(name: str, case: Case) -> None:
    """Weights that do not sum to one, or a residual that is added twice, would be far off."""
    model = wrapped(name, case)
    plain = drive(case.build(), case, ALIKE)
    moved = max(float((x - plain[0]).abs().max()) for x in plain)
    outputs = drive(model, case, ALIKE)
    for ours, theirs in zip(outputs, plain, strict=True):
        assert float((ours - theirs).abs().max()) <= 50 * moved + 1e-5 * float(theirs.abs().max())


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


@pytest.mark.parametrize(
    "case", [CASES["flux"], CASES["pixart"], CASES["latte"], UNETS["unet-sd"]], ids=lambda c: c.name
)
@every_strategy
def test_the_rows_of_a_batch_are_the_runs_of_its_samples(name: str, case: Case) -> None:
    if STRATEGIES[name].signal:
        pytest.skip("a batch computes where one of its samples would")
    rows = drive(wrapped(name, case), case, SIGMAS, seed=3, batch=2)
    for k in range(2):
        alone = drive(wrapped(name, case), case, SIGMAS, seed=3 + k)
        for ours, theirs in zip(rows, alone, strict=True):
            assert torch.allclose(ours[k], theirs[0], rtol=1e-4, atol=1e-5)


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
