"""The clock alone: which run, step and branch a call belongs to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    HeunDiscreteScheduler,
    UniPCMultistepScheduler,
)

from cachedit.feature.clock import Clock

STEPS = 5


def pipeline_clock() -> Clock:
    return Clock(None, None, False)


def by_hand(*, ascending: bool = False, **announced: Any) -> Clock:
    return Clock(announced.get("timesteps"), announced.get("num_steps"), ascending)


def walk(clock: Clock, scheduler: Any, begin: int = 0, calls: int = 1, scale: float = 1.0) -> list[tuple[int, bool]]:
    """(step, starts a run) of every call of a pipeline's loop on that scheduler."""
    sample, seen = torch.zeros(1, 2), []
    for t in scheduler.timesteps[begin:]:
        for _ in range(calls):
            starts = clock.locate(t.expand(1) / scale, None, None, scheduler)
            seen.append((clock.step, starts))
        sample = scheduler.step(torch.ones(1, 2), t, sample)[0]
    return seen


def prepared(scheduler: Any, steps: int = STEPS, begin: int | None = None) -> Any:
    scheduler.set_timesteps(steps)
    if begin is not None:
        scheduler.set_begin_index(begin)
    return scheduler


STEPPED = {
    "ddim, no step_index": DDIMScheduler(),
    "euler": EulerDiscreteScheduler(),
    "dpm": DPMSolverMultistepScheduler(),
    "flow euler": FlowMatchEulerDiscreteScheduler(shift=3.0),
    "flow unipc": UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction"),
}

# -- a pipeline's scheduler ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduler", STEPPED.values(), ids=STEPPED)
@pytest.mark.parametrize("calls", [1, 2, 3])
@pytest.mark.parametrize("scale", [1.0, 1000.0], ids=["thousands", "unit"])
def test_the_step_is_the_place_in_the_scheduler_and_a_new_loop_is_a_new_run(
    scheduler: Any, calls: int, scale: float
) -> None:
    clock = pipeline_clock()
    expected = [(i, (i, call) == (0, 0)) for i in range(STEPS) for call in range(calls)]
    for _ in range(2):
        assert walk(clock, prepared(scheduler), calls=calls, scale=scale) == expected
    assert clock.schedule.num_steps == STEPS
    assert clock.timestep == float(scheduler.timesteps[-1])
    assert clock.at_last_step


@pytest.mark.parametrize("scheduler", STEPPED.values(), ids=STEPPED)
@pytest.mark.parametrize("set_begin", [True, False], ids=["begin index", "no begin index"])
def test_image_to_image_begins_in_the_middle(scheduler: Any, set_begin: bool) -> None:
    has = hasattr(scheduler, "set_begin_index")
    if set_begin and not has:
        pytest.skip("this scheduler has no begin index")
    clock = pipeline_clock()
    scheduler = prepared(scheduler, begin=2 if set_begin else None)
    if not set_begin and has:
        scheduler._begin_index = None
    assert walk(clock, scheduler, begin=2) == [(2, True), (3, False), (4, False)]
    scheduler = prepared(scheduler, begin=0 if has else None)
    assert walk(clock, scheduler) == [(i, i == 0) for i in range(STEPS)]


@pytest.mark.parametrize("scheduler", [FlowMatchHeunDiscreteScheduler(), HeunDiscreteScheduler()], ids=["flow", "vp"])
@pytest.mark.parametrize("calls", [1, 2])
def test_heun_repeats_its_timesteps_and_every_evaluation_is_a_step(scheduler: Any, calls: int) -> None:
    scheduler = prepared(scheduler)
    assert len(scheduler.timesteps) == 2 * STEPS - 1
    expected = [(i, (i, call) == (0, 0)) for i in range(2 * STEPS - 1) for call in range(calls)]
    clock = pipeline_clock()
    for _ in range(2):
        assert walk(clock, scheduler, calls=calls) == expected
        scheduler = prepared(scheduler)


def test_a_timestep_that_the_model_is_given_upside_down_is_found() -> None:
    """Lumina2 is called with 1 - t / 1000 and Z-Image with (1000 - t) / 1000, on a scheduler that runs downwards."""
    clock, scheduler = Clock(None, None, True), prepared(DDIMScheduler())
    for i, t in enumerate(scheduler.timesteps):
        clock.locate(1 - t.expand(1) / 1000, None, None, scheduler)
        assert clock.step == i


def test_a_timestep_in_thousandths_that_is_also_one_in_units_belongs_to_the_begin() -> None:
    """PRX is called with t / 1000 of a schedule from 1000 to 1: at its first step with a 1."""
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(STEPS)
    assert (scheduler.timesteps[0], scheduler.timesteps[-1]) == (1000, 1)
    clock = pipeline_clock()
    found = [(clock.locate(t.expand(1) / 1000, None, None, scheduler), clock.step) for t in scheduler.timesteps]
    assert found == [(i == 0, i) for i in range(STEPS)]


def test_mochi_runs_upwards_in_its_own_scheduler() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(invert_sigmas=True)
    scheduler.set_timesteps(sigmas=np.linspace(1, 0.2, STEPS))
    clock = pipeline_clock()
    assert walk(clock, scheduler) == [(i, i == 0) for i in range(STEPS)]
    assert scheduler.timesteps[0] < scheduler.timesteps[-1]
    assert clock.schedule.sigmas == pytest.approx((1.0, 0.8, 0.6, 0.4, 0.2))


@pytest.mark.parametrize("scheduler", STEPPED.values(), ids=STEPPED)
def test_a_schedule_that_is_replaced_in_the_middle_starts_a_run(scheduler: Any) -> None:
    """A pipeline that calls set_timesteps again, with another number of steps or the same."""
    clock = pipeline_clock()
    for steps in (STEPS, 7, 7):
        scheduler = prepared(scheduler, steps)
        for i, t in enumerate(scheduler.timesteps[:3]):
            starts = clock.locate(t.expand(1), None, None, scheduler)
            assert (clock.step, starts) == (i, i == 0)
            scheduler.step(torch.ones(1, 2), t, torch.zeros(1, 2))
        assert clock.schedule.num_steps == steps


def test_a_pipeline_that_steps_copies_of_its_scheduler_is_followed_by_its_timesteps() -> None:
    """Diffusion forcing keeps one scheduler per frame; the pipeline's own stays at its first index."""
    clock, scheduler = pipeline_clock(), prepared(UniPCMultistepScheduler(), begin=0)
    scheduler._step_index = 0
    steps = []
    for t in scheduler.timesteps:
        clock.locate(t.expand(1), None, None, scheduler)
        steps.append(clock.step)
    assert steps == [0, 1, 2, 3, 4]


# -- driven by hand -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ascending", [False, True])
@pytest.mark.parametrize("announced", ["timesteps", "num_steps", "nothing"])
def test_by_hand_a_timestep_that_goes_back_starts_a_run(ascending: bool, announced: str) -> None:
    levels = [1.0, 0.8, 0.6, 0.4, 0.2]
    times = [1 - level for level in levels] if ascending else levels
    known: dict[str, Any] = {"timesteps": {"timesteps": times}, "num_steps": {"num_steps": STEPS}}.get(announced, {})
    clock = by_hand(ascending=ascending, **known)
    seen = []
    for t in [*times, *times[:2], *times]:
        seen.append((clock.locate(torch.tensor([t]), None, None, None), clock.step)[::-1])
    assert seen == [(i, i == 0) for i in [*range(5), 0, 1, *range(5)]]
    assert clock.schedule.num_steps == (None if announced == "nothing" else STEPS)
    if announced == "timesteps":
        assert clock.schedule.sigmas == pytest.approx(levels)


def test_by_hand_announced_timesteps_need_not_start_at_the_first() -> None:
    clock = by_hand(timesteps=[1000.0, 800.0, 600.0, 400.0])
    assert clock.locate(600, None, None, None)
    assert (clock.step, clock.timestep, clock.sigma) == (2, 600.0, 0.6)
    assert not clock.locate(torch.tensor([400.0, 400.0]), None, None, None)
    assert clock.at_last_step
    with pytest.raises(ValueError, match=r"500.*4 steps, 1000 to 400.*timesteps="):
        clock.locate(500.0, None, None, None)


def test_by_hand_a_rounded_timestep_is_still_the_same() -> None:
    """bf16 has 8 bits: 951.2 becomes 952."""
    times = [1000.0, 951.2, 300.7]
    clock = by_hand(timesteps=times)
    for i, t in enumerate(times):
        clock.locate(torch.tensor([t], dtype=torch.bfloat16), None, None, None)
        assert clock.step == i


@pytest.mark.parametrize("time", [0.5, torch.tensor(0.5), torch.tensor([0.5, 0.5]), torch.full((2, 12), 0.5)])
def test_by_hand_a_timestep_may_have_any_shape(time: Any) -> None:
    clock = by_hand(timesteps=[1.0, 0.5])
    assert clock.locate(time, None, None, None)
    assert clock.step == 1


def test_by_hand_frames_of_a_video_move_in_turn() -> None:
    """Diffusion forcing: the first frames are clean before the last one has begun."""
    rows = [[1000, 1000], [800, 1000], [600, 1000], [600, 800], [600, 600], [0, 300]]
    clock = by_hand()
    steps = []
    for row in rows:
        clock.locate(torch.tensor([row]), None, None, None)
        steps.append(clock.step)
    assert steps == [0, 1, 2, 3, 4, 5]


def test_by_hand_clean_frames_do_not_hide_the_step() -> None:
    """Wan 2.2 TI2V: the tokens of the given first frame are at 0."""
    clock = by_hand(timesteps=[1000.0, 600.0])
    for i, t in enumerate([1000.0, 600.0]):
        clock.locate(torch.tensor([[0.0, 0.0, t, t]]), None, None, None)
        assert clock.step == i


# -- branches -----------------------------------------------------------------------------------------------------


def branches(clock: Clock, steps: Sequence[Sequence[tuple[str | None, Any]]]) -> list[list[str]]:
    """Names that the clock gives to the calls of every step, each a (label, condition)."""
    found = []
    for i, calls in enumerate(steps):
        names = []
        for label, condition in calls:
            clock.locate(1 - i / 10, label, condition, None)
            names.append(clock.branch)
        found.append(names)
    return found


def test_labels_name_the_branches_in_any_order() -> None:
    steps = [[("cond", None), ("uncond", None)], [("uncond", None), ("cond", None)], [("cond", None)]]
    assert branches(by_hand(), steps) == [["cond", "uncond"], ["uncond", "cond"], ["cond"]]


def test_a_label_that_comes_twice_in_a_step_is_two_branches() -> None:
    """A pipeline that splits a batch under one label."""
    assert branches(by_hand(), [[("cond", None)] * 2] * 2) == [["cond", "cond/2"]] * 2


def test_unlabelled_branches_are_known_by_their_condition() -> None:
    a, b = torch.zeros(1), torch.zeros(1)
    steps = [[(None, a), (None, b)], [(None, b), (None, a)], [(None, b)], [(None, a), (None, b)]]
    assert branches(by_hand(), steps) == [["0", "1"], ["1", "0"], ["1"], ["0", "1"]]


def test_unlabelled_branches_without_a_condition_are_known_by_their_order() -> None:
    assert branches(by_hand(), [[(None, None)] * 3, [(None, None)] * 3, [(None, None)]]) == [
        ["0", "1", "2"],
        ["0", "1", "2"],
        ["0"],
    ]


def test_conditions_that_are_made_anew_every_step_are_known_by_their_order() -> None:
    steps = [[(None, torch.zeros(1)), (None, torch.ones(1))] for _ in range(3)]
    assert branches(by_hand(), steps) == [["0", "1"]] * 3


def test_a_new_condition_beside_a_known_one_is_a_new_branch() -> None:
    """At step 1 only ``b`` is left of step 0; the other call must not inherit its name."""
    a, b, c = torch.zeros(1), torch.zeros(1), torch.zeros(1)
    found = branches(by_hand(), [[(None, a), (None, b)], [(None, c), (None, b)]])
    assert len(set(found[1])) == 2
    assert found[1][1] == "1"


def test_known_are_the_branches_of_the_step_before() -> None:
    clock = by_hand()
    branches(clock, [[("cond", None), ("uncond", None)], [("cond", None)]])
    assert clock.known == ["cond", "uncond"]
    branches(clock, [[("cond", None)]])
    assert (clock.step, clock.known) == (0, [])


# -- noise levels -------------------------------------------------------------------------------------------------


def levels(scheduler: Any, steps: int = 10) -> tuple[float, ...]:
    clock = pipeline_clock()
    scheduler.set_timesteps(steps)
    clock.locate(scheduler.timesteps[0], None, None, scheduler)
    assert clock.schedule.sigmas is not None
    return clock.schedule.sigmas


def test_noise_levels_of_one_vp_model_agree_between_schedulers() -> None:
    """sqrt(1 - alpha_bar): DDIM reads it off alpha_bar, Euler off its ratio of noise to signal."""
    beta: dict[str, Any] = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    spacing: dict[str, Any] = {**beta, "timestep_spacing": "leading", "steps_offset": 1}
    alphas = DDIMScheduler(**beta).alphas_cumprod
    ddim, euler = DDIMScheduler(**spacing, clip_sample=False), EulerDiscreteScheduler(**spacing)
    assert levels(euler) == pytest.approx(levels(ddim), abs=1e-5)
    for scheduler in (ddim, euler, DPMSolverMultistepScheduler(**spacing)):
        found = levels(scheduler)
        assert found == pytest.approx([math.sqrt(1 - float(alphas[int(t)])) for t in scheduler.timesteps], abs=1e-5)


def test_noise_levels_of_one_flow_model_agree_between_schedulers() -> None:
    """A flow model's timestep is 1000 sigma; UniPC rounds it down to an integer."""
    euler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    unipc = UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=3.0)
    for scheduler, tolerance in ((euler, 1e-6), (unipc, 1e-3)):
        found = levels(scheduler)
        assert found == pytest.approx([float(t) / 1000 for t in scheduler.timesteps], abs=tolerance)
    # UniPC spaces s evenly from 1 to 1 / 1000 and leaves out the last; shift 3 makes 3 s / (1 + 2 s) of it.
    assert levels(unipc) == pytest.approx([3 * s / (1 + 2 * s) for s in np.linspace(1, 1e-3, 11)[:-1]], abs=1e-5)


@pytest.mark.parametrize("scheduler", [*STEPPED.values(), FlowMatchHeunDiscreteScheduler()])
def test_noise_levels_fall_from_nearly_one(scheduler: Any) -> None:
    found = levels(scheduler)
    assert 0.9 < found[0] <= 1
    assert list(found) == sorted(found, reverse=True)
    assert found[-1] >= 0
