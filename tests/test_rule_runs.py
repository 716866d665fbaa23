"""Sentences 1 to 4 of the design: positions in the schedule, runs, branches, batches."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from conftest import SIGMAS, STEPS, Line, Scripted, attach, drive, equal_steps, record_of
from torch import nn

import cachedit
from cachedit import FeatureStrategy, MagCache, Profile, Schedule
from zoo.models import CASES, Case
from zoo.pipelines import PIPELINES, run

PLAIN, WAN = CASES["plain"], CASES["wan"]
EARLY = Profile.from_ratios([1.0] + [2.0] * 4 + [1.0] * 5)  # steps 1-4 are volatile, 5-9 are flat
EAGER = MagCache(threshold=0.1, max_skip_steps=3, retention_ratio=0.0)

# -- 1: the position in the noise schedule ------------------------------------------------------------------------


@pytest.mark.parametrize("branches", [1, 2, 3])
@pytest.mark.parametrize(
    ("start", "strip"),
    [(0, "■■■■■□□□■□"), (3, "■■□□□■□"), (5, "■□□□■")],
    ids=["whole", "from step 3", "second half"],
)
def test_rule_01_the_profile_is_read_at_the_timestep_however_many_calls_came_before(
    start: int, strip: str, branches: int
) -> None:
    model = attach(PLAIN.build(), PLAIN, EAGER, profile=EARLY, timesteps=SIGMAS)
    for sigma in SIGMAS[start:]:
        for branch in range(branches):
            PLAIN.call(model, sigma, seed=branch)
    record = record_of(model)
    assert record.strip() == strip
    assert [step.index for step in record.steps[::branches]] == list(range(start, STEPS))
    assert [step.sigma for step in record.steps[::branches]] == pytest.approx(SIGMAS[start:])


def test_rule_01_steps_that_the_loop_leaves_out_are_still_steps_of_the_schedule() -> None:
    model = attach(PLAIN.build(), PLAIN, EAGER, profile=EARLY, timesteps=SIGMAS)
    drive(model, PLAIN, [SIGMAS[i] for i in (0, 2, 6, 7)])
    record = record_of(model)
    assert [(step.index, step.computed) for step in record.steps] == [(0, True), (2, True), (6, True), (7, False)]


def test_rule_01_one_table_serves_any_number_of_steps() -> None:
    """Five calibrated steps halve the magnitude each; with every second one left out it falls to a quarter."""
    profile = Profile.from_ratios([1.0] + [0.5] * 4, sigmas=[1.0, 0.8, 0.6, 0.4, 0.2])
    assert profile.magnitude_ratios(Schedule(3, sigmas=(1.0, 0.6, 0.2)))["cond"] == pytest.approx((1.0, 0.25, 0.25))
    half_steps = profile.magnitude_ratios(Schedule(9, sigmas=tuple(1 - i / 10 for i in range(9))))["cond"]
    assert half_steps == pytest.approx((1.0,) + (math.sqrt(0.5),) * 8)


# -- 2: the start of a run ----------------------------------------------------------------------------------------

ENDS: dict[str, type[BaseException] | None] = {"exception": ValueError, "ctrl-c": KeyboardInterrupt, "interrupt": None}


@pytest.mark.parametrize("name", ["flux", "flux_true_cfg", "wan22", "flux_controlnet"])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("at", [0, 4, 9])
def test_rule_02_a_pipeline_run_after_an_aborted_one_is_as_on_a_fresh_wrap(name: str, end: str, at: int) -> None:
    fresh = PIPELINES[name]()
    cachedit.wrap(fresh.pipe, Scripted(compute=(0, 6)))
    expected = run(fresh, seed=1)
    built = PIPELINES[name]()
    cachedit.wrap(built.pipe, Scripted(compute=(0, 6)))

    def callback(pipe: Any, index: int, timestep: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        if index == at:
            error = ENDS[end]
            if error is not None:
                raise error("the user stopped")
            pipe._interrupt = True
        return {}

    with contextlib.suppress(ValueError, KeyboardInterrupt):
        run(built, seed=0, callback_on_step_end=callback)
    assert record_of(built.pipe).status == ("finished" if at == 9 else "aborted")
    assert len({step.index for step in record_of(built.pipe).steps}) == at + 1
    assert torch.equal(run(built, seed=1), expected)
    assert record_of(built.pipe).status == "finished"


@pytest.mark.parametrize(
    "strategy", [Scripted(compute=()), Scripted(compute=(0, 6)), Line(compute=(0, 1, 6))], ids=["none", "plain", "line"]
)
@pytest.mark.parametrize("calls", [2, 5, 9, 10])
def test_rule_02_a_module_driven_by_hand_starts_anew_when_the_timestep_goes_back_up(
    strategy: FeatureStrategy, calls: int
) -> None:
    expected = drive(attach(PLAIN.build(), PLAIN, strategy), PLAIN, seed=1)
    model = attach(PLAIN.build(), PLAIN, strategy)
    drive(model, PLAIN, SIGMAS[:calls], seed=0)
    assert record_of(model).status == ("finished" if calls == STEPS else "aborted")
    assert equal_steps(drive(model, PLAIN, seed=1), expected) == [*range(STEPS)]
    assert [step.index for step in record_of(model).steps] == [*range(STEPS)]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt], ids=["exception", "ctrl-c"])
@pytest.mark.parametrize("at", [0, 1, 5])
def test_rule_02_an_error_inside_a_block_leaves_nothing_to_the_next_run(error: type[BaseException], at: int) -> None:
    """At step 5, at which the model is computed; its second block fails."""
    strategy = Scripted(compute=(0, 1, 5))
    expected = drive(attach(PLAIN.build(), PLAIN, strategy), PLAIN, seed=1)
    model = attach(PLAIN.build(), PLAIN, strategy)

    def fail(*_: Any) -> None:
        raise error("the device is out of memory")

    drive(model, PLAIN, SIGMAS[:at], seed=0)
    handle = PLAIN.blocks(model)[1].register_forward_hook(fail)
    with pytest.raises(error, match="out of memory"):
        drive(model, PLAIN, [SIGMAS[at]], seed=0)
    handle.remove()
    assert equal_steps(drive(model, PLAIN, seed=1), expected) == [*range(STEPS)]


def test_rule_02_a_step_that_failed_can_be_called_again() -> None:
    """What a loop does that catches an out-of-memory error and tries once more."""
    strategy = Scripted(compute=(0, 1, 5))
    expected = drive(attach(PLAIN.build(), PLAIN, strategy), PLAIN)
    model = attach(PLAIN.build(), PLAIN, strategy)
    outputs = drive(model, PLAIN, SIGMAS[:5])

    def fail(*_: Any) -> None:
        raise ValueError("the device is out of memory")

    handle = PLAIN.blocks(model)[1].register_forward_hook(fail)
    with pytest.raises(ValueError, match="out of memory"):
        drive(model, PLAIN, [SIGMAS[5]])
    handle.remove()
    assert equal_steps(outputs + drive(model, PLAIN, SIGMAS[5:]), expected) == [*range(STEPS)]


@pytest.mark.parametrize("strategy", [Scripted(compute=(0, 6)), Line(compute=(0, 6))], ids=["plain", "line"])
def test_rule_02_another_shape_starts_a_new_run_in_the_middle_of_the_schedule(strategy: FeatureStrategy) -> None:
    expected = drive(attach(PLAIN.build(), PLAIN, strategy, timesteps=SIGMAS), PLAIN, SIGMAS[4:], batch=2)
    model = attach(PLAIN.build(), PLAIN, strategy, timesteps=SIGMAS)
    drive(model, PLAIN, SIGMAS[:4])
    assert equal_steps(drive(model, PLAIN, SIGMAS[4:], batch=2), expected) == [*range(6)]
    assert [step.index for step in record_of(model).steps] == [4, 5, 6, 7, 8, 9]


# -- 3: branches --------------------------------------------------------------------------------------------------

Outputs = dict[tuple[int, str], torch.Tensor]
NAMES = ("cond", "uncond", "image", "audio", "reference")


def guided(model: nn.Module, case: Case, told_by: str, order: Callable[[int], Sequence[str]]) -> Outputs:
    """A run in which step ``i`` calls the branches ``order(i)``; each branch has inputs of its own."""
    inputs = {name: case.inputs(50 + k, 1) for k, name in enumerate(NAMES)}
    outputs: Outputs = {}
    for i, sigma in enumerate(SIGMAS):
        for name in order(i):
            context = model.cache_context(name) if told_by == "label" else contextlib.nullcontext()  # type: ignore[operator]
            given = inputs[name]
            if told_by == "order":  # fresh tensors: nothing but the order is left
                given = {key: value.clone() for key, value in given.items()}
            with context:
                outputs[i, name] = case.call(model, sigma, **given)
    return outputs


def check_guided(told_by: str, order: Callable[[int], Sequence[str]], strategy: FeatureStrategy) -> nn.Module:
    """Every branch gives what it gives when it is the only one of its run."""
    thousands = [1000 * sigma for sigma in SIGMAS]
    model = attach(WAN.build(), WAN, strategy, timesteps=thousands)
    together = guided(model, WAN, told_by, order)
    for name in {name for _, name in together}:
        alone = attach(WAN.build(), WAN, strategy, timesteps=thousands)
        solo = guided(alone, WAN, told_by, lambda i, name=name: [name] if name in order(i) else [])
        assert all(torch.equal(together[key], output) for key, output in solo.items()), name
    return model


@pytest.mark.parametrize("told_by", ["label", "identity", "order"])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_rule_03_any_number_of_branches_is_told_apart(told_by: str, count: int) -> None:
    model = check_guided(told_by, lambda i: NAMES[:count], Scripted(compute=(0, 5)))
    assert len({step.branch for step in record_of(model).steps}) == count


@pytest.mark.parametrize("told_by", ["label", "identity"])
def test_rule_03_the_order_of_the_branches_may_change_from_step_to_step(told_by: str) -> None:
    check_guided(told_by, lambda i: NAMES[:2] if i % 2 else NAMES[1::-1], Scripted(compute=(0, 5)))


@pytest.mark.parametrize("told_by", ["label", "identity"])
@pytest.mark.parametrize(
    "order",
    [
        lambda i: NAMES[:2] if i < 4 else NAMES[:1],
        lambda i: NAMES[:2] if 3 <= i < 8 else NAMES[:1],
        lambda i: NAMES[1:3] if i > 6 else NAMES[:2],
    ],
    ids=["guidance ends", "guidance interval", "one replaces another"],
)
def test_rule_03_the_number_of_branches_may_change_in_a_run(told_by: str, order: Callable[[int], list[str]]) -> None:
    check_guided(told_by, order, Scripted(compute=(0, 5)))


def test_rule_03_unlabelled_guidance_may_end_in_a_run() -> None:
    check_guided("order", lambda i: NAMES[:2] if i < 4 else NAMES[:1], Scripted(compute=(0, 5)))


def test_rule_03_a_branch_that_returns_is_computed_if_the_others_were_meanwhile() -> None:
    """Its own residual is of step 1, and a policy that sees a computation at step 5 believes that it is fresh."""
    model = attach(WAN.build(), WAN, Scripted(compute=(0, 1, 5)))
    guided(model, WAN, "label", lambda i: NAMES[:1] if 2 <= i < 7 else NAMES[:2])
    uncond = {step.index: step.computed for step in record_of(model).steps if step.branch == "uncond"}
    assert uncond == {0: True, 1: True, 7: True, 8: False, 9: False}


@pytest.mark.parametrize("name", ["flux_true_cfg", "qwenimage", "cogview4", "lumina2", "wan", "wan22", "wan_v2v"])
def test_rule_03_the_branches_of_a_step_are_decided_together(name: str) -> None:
    built = PIPELINES[name]()
    ratios = {"cond": [1.0, 1.02] * 5, "uncond": [1.0, 1.0, 1.0, 1.1, 1.0] * 2}
    cachedit.wrap(built.pipe, MagCache(max_skip_steps=2), profile=Profile.from_ratios(ratios))
    run(built)
    record = record_of(built.pipe)
    assert record.reused_steps
    assert not set(record.computed_steps) & set(record.reused_steps)


@pytest.mark.parametrize("first", ["cond", "uncond"])
def test_rule_03_when_the_first_branch_of_a_step_must_be_computed_so_is_the_second(first: str) -> None:
    """At step 3 a control input appears in the first branch; the second could have been reused."""
    case = CASES["flux"]
    assert case.control is not None
    model = attach(case.build(), case, Scripted(compute=(0,)))
    order = [first, "uncond" if first == "cond" else "cond"]
    for i, sigma in enumerate(SIGMAS):
        for k, name in enumerate(order):
            with model.cache_context(name):  # type: ignore[operator]
                case.call(model, sigma, seed=k, **(case.control(7, 1) if i >= 3 and k == 0 else {}))
    computed = [(step.index, step.branch) for step in record_of(model).steps if step.computed]
    assert computed == [(i, name) for i in (0, 3) for name in order]


# -- 4: batches ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [CASES[name] for name in ("plain", "flux", "wan", "z_image")], ids=lambda c: c.name)
def test_rule_04_a_batch_computes_what_its_samples_compute_alone(case: Case) -> None:
    strategies = [
        name
        for name, cls in cachedit.strategies().items()
        if [*getattr(cls, "profile_arrays", ())] == ["magnitude_ratio"]
    ]
    for strategy in strategies:
        profile = Profile.from_ratios([1.0, 1.03] * 5)
        both = attach(case.build(), case, strategy, profile=profile)
        batch = drive(both, case, batch=2)
        for row in range(2):
            alone = attach(case.build(), case, strategy, profile=profile)
            solo = drive(alone, case, seed=row)
            assert set(record_of(alone).computed_steps) <= set(record_of(both).computed_steps)
            if record_of(alone).strip() == record_of(both).strip():
                for together, single in zip(batch, solo, strict=True):
                    torch.testing.assert_close(together[row : row + 1], single, rtol=1e-5, atol=1e-5)
