"""Every family of the zoo and every pipeline, under a plain strategy and under one that forecasts."""

from __future__ import annotations

import filecmp
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FLAT, STEPS, Scripted, attach, blocks_option, dissect, drive, equal_steps, record_of
from torch import nn

import cachedit
from cachedit import Profile, UnsupportedModelError
from cachedit.feature.blocks import Tap
from cachedit.feature.place import Forecast
from cachedit.strategy import Stack
from zoo.models import CASES, Case, count_blocks
from zoo.pipelines import PIPELINES, run


def profile_for(strategy: Any) -> Profile | None:
    cls = cachedit.strategies()[strategy] if isinstance(strategy, str) else type(strategy)
    return FLAT if cls.profile_arrays else None


every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
every_strategy = pytest.mark.parametrize("strategy", ["mag_cache", "taylor_seer"])  # all of them: test_registry.py


def wrap(model: nn.Module, case: Case, strategy: Any, **options: Any) -> nn.Module:
    return attach(model, case, strategy, profile=profile_for(strategy), **options)


# -- runs ---------------------------------------------------------------------------------------------------------


@every_case
@every_strategy
def test_computed_steps_are_bit_equal_and_reused_steps_run_no_block(case: Case, strategy: str) -> None:
    model = case.build()
    plain = drive(model, case)
    wrap(model, case, strategy)
    outputs, executed = [], []
    with count_blocks(model, case) as count:
        for i in range(STEPS):
            count.clear()
            outputs += drive(model, case, [1 - i / STEPS])
            executed.append(set(count.per_block))
    record = record_of(model)
    assert sorted(record.computed_steps + record.reused_steps) == list(range(STEPS))
    assert set(record.computed_steps) <= set(equal_steps(outputs, plain))
    assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(outputs, plain, strict=True))
    if cachedit.strategies()[strategy]().sites == (Stack(),):
        assert [{0} if i in record.reused_steps else {1} for i in range(STEPS)] == executed


@every_case
def test_a_reused_step_differs_when_the_timestep_moved(case: Case) -> None:
    """Otherwise bit-equality of the computed steps would show nothing."""
    model = case.build()
    plain = drive(model, case)
    attach(model, case, Scripted(compute=(0, 5)))
    assert equal_steps(drive(model, case), plain) == [0, 5]


# -- one computed pass and one reused pass ------------------------------------------------------------------------


def passes(case: Case, seen: str, dtype: torch.dtype, **extra: Any) -> tuple[torch.Tensor, torch.Tensor, Tap]:
    """Output of a computed pass and of a reused one on the same inputs."""
    model = case.build().to(dtype)
    extra = {key: to(value, dtype) for key, value in {**case.inputs(0, 1), **extra}.items()}
    tap = Tap(model, blocks_option(case).get("blocks"))
    tap.attach()
    tap.begin(False, None)
    (place,) = tap.places
    full = case.call(model, **extra)
    if seen == "ends":
        # As the runner does: a second computed pass watches only the ends, unless something is added in between.
        tap.watch_all = tap.open
        full = case.call(model, **extra)
    residual = place.captured()
    assert residual is not None
    place.release()
    place.begin(True, Forecast([residual]))
    tap.begin(False, None)
    return full, case.call(model, **extra), tap


def to(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, (list, tuple)):
        return type(value)(to(item, dtype) for item in value)
    return {key: to(item, dtype) for key, item in value.items()} if isinstance(value, dict) else value


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


@every_case
@pytest.mark.parametrize("seen", ["watched", "ends"])
def test_reuse_on_unchanged_inputs_is_exact(case: Case, seen: str) -> None:
    full, reused, _ = passes(case, seen, torch.float32)
    assert relative(reused, full) < 1e-6


CONTROLLED = {name: case for name, case in CASES.items() if case.control}


@pytest.mark.parametrize("case", CONTROLLED.values(), ids=CONTROLLED)
def test_reuse_under_a_control_input_is_exact(case: Case) -> None:
    assert case.control is not None
    full, reused, _ = passes(case, "watched", torch.float32, **case.control(7, 1))
    without, _, _ = passes(case, "watched", torch.float32)
    assert relative(reused, full) < 1e-6
    assert relative(without, full) > 1e-3, "the control input did nothing, so the test shows nothing"


# -- types --------------------------------------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_outputs_keep_their_type_and_dtype(case: Case, dtype: torch.dtype) -> None:
    model = case.build().to(dtype)
    inputs = {key: to(value, dtype) for key, value in case.inputs(0, 1).items()}
    takes = "return_dict" in inspect.signature(model.forward).parameters
    forms: list[dict[str, Any]] = [{"return_dict": False}, {"return_dict": True}] if takes else [{}]

    def outputs() -> list[Any]:
        times = [to(case.time(1 - i / STEPS, 1), dtype) for i in range(STEPS)]
        with torch.no_grad():
            return [model(**inputs, **time, **forms[i % len(forms)]) for i, time in enumerate(times)]

    plain = outputs()
    attach(model, case, Scripted(compute=(0, 5)))
    for before, now in zip(plain, outputs(), strict=True):
        assert type(now) is type(before)
        assert described(now) == described(before)


def described(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output.shape, output.dtype, output.device
    return [described(item) for item in output.values()] if isinstance(output, dict) else [*map(described, output)]


# -- what stays as it was -----------------------------------------------------------------------------------------


@every_case
def test_wrapping_changes_nothing_visible_and_unwrapping_nothing_at_all(case: Case, tmp_path: Path) -> None:
    model = case.build()

    def visible() -> Any:
        return (
            type(model),
            list(model.state_dict()),
            [id(p) for p in model.parameters()],
            [(name, type(m).__name__) for name, m in model.named_modules() if not isinstance(m, nn.ModuleList)],
            inspect.signature(model.forward),
            inspect.signature(type(model).forward),
            [inspect.signature(block.forward) for block in case.blocks(model)],
            [getattr(model, name)[0] is next(iter(getattr(model, name))) for name in case.stack],
        )

    def save(folder: Path) -> Path:
        if hasattr(model, "save_pretrained"):
            model.save_pretrained(folder)
        else:
            folder.mkdir()
            torch.save(model.state_dict(), folder / "model.pt")
        return folder

    before, weights = visible(), {name: value.clone() for name, value in model.state_dict().items()}
    saved = save(tmp_path / "plain")
    drive(model, case, [0.5])  # some models create attributes at their first call
    inside = dissect(model)
    attach(model, case)
    drive(model, case)
    assert visible() == before
    compared = filecmp.dircmp(saved, save(tmp_path / "wrapped"))
    assert compared.same_files
    assert not compared.diff_files + compared.left_only + compared.right_only
    cachedit.unwrap(model)
    assert dissect(model) == inside
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


# -- pipelines ----------------------------------------------------------------------------------------------------

PIPES = {name: build for name, build in PIPELINES.items() if name != "sd"}


@pytest.mark.parametrize("build", PIPES.values(), ids=PIPES)
@every_strategy
def test_a_pipeline_runs_repeats_itself_and_comes_back(build: Any, strategy: str) -> None:
    built = build()
    baseline = run(built)
    inside = dissect(built.pipe)
    cachedit.wrap(built.pipe, strategy, profile=profile_for(strategy))
    first = run(built)
    record = record_of(built.pipe)
    assert (record.status, len(record.steps)) == ("finished", built.calls)
    assert {step.expert for step in record.steps} == set(built.denoisers)
    assert torch.equal(run(built), first)
    assert first.shape == baseline.shape
    assert torch.isfinite(first).all()
    cachedit.unwrap(built.pipe)
    assert dissect(built.pipe) == inside
    assert torch.equal(run(built), baseline)


@pytest.mark.parametrize("build", PIPES.values(), ids=PIPES)
def test_a_pipeline_whose_steps_are_all_computed_is_bit_equal(build: Any) -> None:
    built = build()
    baseline = run(built)
    cachedit.wrap(built.pipe, Scripted(compute=tuple(range(40))))
    with pytest.warns(UserWarning, match="reused no step"):
        assert torch.equal(run(built), baseline)


def test_a_unet_is_refused_with_a_reason_before_anything_is_touched() -> None:
    built = PIPELINES["sd"]()
    inside = dissect(built.pipe)
    with pytest.raises(UnsupportedModelError, match="UNet.*skip connections"):
        cachedit.wrap(built.pipe, Scripted())
    assert dissect(built.pipe) == inside


def test_a_saved_pipeline_is_the_plain_one(tmp_path: Path) -> None:
    built = PIPELINES["flux"]()
    built.pipe.save_pretrained(tmp_path / "plain")
    cachedit.wrap(built.pipe, "magcache", profile=FLAT)
    run(built)
    built.pipe.save_pretrained(tmp_path / "wrapped")
    files = [file.relative_to(tmp_path / "plain") for file in (tmp_path / "plain").rglob("*") if file.is_file()]
    written = [file.relative_to(tmp_path / "wrapped") for file in (tmp_path / "wrapped").rglob("*") if file.is_file()]
    assert sorted(files) == sorted(written)
    assert not filecmp.cmpfiles(tmp_path / "plain", tmp_path / "wrapped", files, shallow=False)[1]
