"""The adjusted sampler: by-hand schedules, both ends kept, the scheduler restored, and every other sampler refused."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    UniPCMultistepScheduler,
)

from cachedit import FeatureStrategy, Profile, Schedule, UnsupportedModelError
from cachedit.feature.sampler import Sampler, adjusted_sigmas, planned_sigmas

QUARTERS = [1.0, 0.75, 0.5, 0.25]
SEEN: list[Schedule] = []


@dataclass(frozen=True)
class Scaled(FeatureStrategy, abstract=True):
    """Scales the steps of the sampler as it is told, and notes what it was asked about."""

    scales: tuple[float, ...] | None = (1.0, 0.5, 1.0, 1.0)

    def step_scales(self, schedule: Schedule, profile: Profile | None) -> Sequence[float] | None:
        SEEN.append(schedule)
        return self.scales


def holder(scheduler: Any = None) -> Any:
    """What the sampler needs of a pipeline."""
    return SimpleNamespace(scheduler=scheduler if scheduler is not None else FlowMatchEulerDiscreteScheduler())


def attached(pipe: Any, *scales: float) -> Sampler:
    sampler = Sampler(Scaled(scales or Scaled.scales), None)
    sampler.attach(pipe)
    return sampler


def state(scheduler: Any) -> tuple[type, dict[str, Any]]:
    return type(scheduler), dict(vars(scheduler))


# -- the schedule -------------------------------------------------------------------------------------------------


def test_factors_of_one_change_no_bit() -> None:
    sigmas = [1.0, 0.97, 0.7000001, 0.1, 0.03, 0.0]
    assert adjusted_sigmas(sigmas, [1.0] * 5) == sigmas


def test_a_halved_step_spreads_the_rest_over_the_steps_that_are_left() -> None:
    # 0.75 to go 0.25 of: half of that, and what is left, 0.625, falls to two equal steps.
    assert adjusted_sigmas([1.0, 0.75, 0.5, 0.25, 0.0], [1.0, 0.5, 1.0, 1.0]) == [1.0, 0.75, 0.625, 0.3125, 0.0]


def test_uneven_steps_keep_their_proportions() -> None:
    # 0.4 of 1 becomes 0.2; the steps left were planned as 0.4 and 0.2, two thirds and a third of 0.8.
    assert adjusted_sigmas([1.0, 0.6, 0.2, 0.0], [0.5, 1.0, 1.0]) == pytest.approx([1.0, 0.8, 0.8 / 3, 0.0])


def test_two_scaled_steps_in_a_row() -> None:
    # Of 1 a quarter, halved: 0.875. Of that a third, a quarter of it: 0.875 - 0.875 / 12. The rest in two halves.
    second = 0.875 - 0.875 / 12
    adjusted = adjusted_sigmas([1.0, 0.75, 0.5, 0.25, 0.0], [0.5, 0.25, 1.0, 1.0])
    assert adjusted == pytest.approx([1.0, 0.875, second, second / 2, 0.0])


def test_what_comes_before_the_first_scaled_step_keeps_every_bit() -> None:
    sigmas = [1.0, 0.93, 0.81, 0.6, 0.3, 0.0]
    adjusted = adjusted_sigmas(sigmas, [1.0, 1.0, 1.0, 0.9, 1.0])
    assert adjusted[:4] == sigmas[:4]
    assert adjusted[4] == pytest.approx(0.6 - 0.9 * 0.3)


@pytest.mark.parametrize("scales", [[0.0] * 4, [0.3, 0.0, 1.0, 0.2], [0.9, 0.8, 0.7, 0.0]])
def test_both_ends_stay_and_noise_never_rises(scales: list[float]) -> None:
    adjusted = adjusted_sigmas([0.9, 0.75, 0.5, 0.25, 0.1], scales)
    assert (adjusted[0], adjusted[-1]) == (0.9, 0.1)
    assert all(later <= earlier for earlier, later in zip(adjusted, adjusted[1:], strict=False))


def test_a_rising_schedule_is_the_mirror_image_of_a_falling_one() -> None:
    falling, scales = [1.0, 0.6, 0.2, 0.0], [0.5, 0.75, 1.0]
    rising = adjusted_sigmas([1 - sigma for sigma in falling], scales)
    assert rising == pytest.approx([1 - sigma for sigma in adjusted_sigmas(falling, scales)])


@pytest.mark.parametrize("scales", [[1.0, 1.0], [1.0] * 4, [1.0, 1.5, 1.0], [1.0, -0.1, 1.0], [1.0, float("nan"), 1.0]])
def test_impossible_factors_are_refused(scales: list[float]) -> None:
    with pytest.raises(ValueError, match="step_scales are .* allowed: 3 factors from 0 to 1"):
        adjusted_sigmas([1.0, 0.5, 0.25, 0.0], scales)


# -- the scheduler ------------------------------------------------------------------------------------------------


def test_the_scheduler_holds_the_adjusted_schedule_and_the_strategy_saw_the_planned_one() -> None:
    pipe = holder()
    attached(pipe)
    SEEN.clear()
    pipe.scheduler.set_timesteps(sigmas=QUARTERS)
    assert pipe.scheduler.sigmas.tolist() == [1.0, 0.75, 0.625, 0.3125, 0.0]
    assert pipe.scheduler.timesteps.tolist() == [1000.0, 750.0, 625.0, 312.5]
    assert planned_sigmas(pipe.scheduler).tolist() == [*QUARTERS, 0.0]
    assert SEEN.pop() == Schedule(4, (1000.0, 750.0, 500.0, 250.0), tuple(QUARTERS))
    assert not SEEN  # asked once


@pytest.mark.parametrize("scales", [(1.0,) * 4, None])
def test_nothing_to_adjust_leaves_every_bit(scales: tuple[float, ...] | None) -> None:
    plain, pipe = FlowMatchEulerDiscreteScheduler(shift=3.0), holder(FlowMatchEulerDiscreteScheduler(shift=3.0))
    Sampler(Scaled(scales), None).attach(pipe)
    for scheduler in (plain, pipe.scheduler):
        scheduler.set_timesteps(4)
    assert torch.equal(pipe.scheduler.sigmas, plain.sigmas)
    assert torch.equal(pipe.scheduler.timesteps, plain.timesteps)
    assert planned_sigmas(pipe.scheduler) is pipe.scheduler.sigmas


def test_set_again_it_is_the_same_again() -> None:
    pipe = holder()
    attached(pipe)
    pipe.scheduler.set_timesteps(sigmas=QUARTERS)
    first = pipe.scheduler.sigmas, pipe.scheduler.timesteps
    SEEN.clear()
    pipe.scheduler.set_timesteps(sigmas=QUARTERS)
    assert torch.equal(pipe.scheduler.sigmas, first[0])
    assert torch.equal(pipe.scheduler.timesteps, first[1])
    assert pipe.scheduler.timesteps is not first[1]  # by this a run is recognised
    assert SEEN[0].sigmas == tuple(QUARTERS)  # not the adjusted ones of the first time


def test_timesteps_that_are_not_a_thousand_sigmas() -> None:
    # CogView4 shifts the sigmas and not the timesteps: 0.625 lies halfway between two steps that are told 600 and 300.
    pipe = holder()
    attached(pipe)
    pipe.scheduler.set_timesteps(sigmas=QUARTERS, timesteps=[1000, 600, 300, 100])
    assert pipe.scheduler.sigmas.tolist() == [1.0, 0.75, 0.625, 0.3125, 0.0]
    assert pipe.scheduler.timesteps.tolist() == [1000.0, 600.0, 450.0, 150.0]


def test_a_scheduler_that_counts_the_signal() -> None:
    pipe = holder(FlowMatchEulerDiscreteScheduler(invert_sigmas=True))
    attached(pipe)
    SEEN.clear()
    pipe.scheduler.set_timesteps(sigmas=QUARTERS)
    assert pipe.scheduler.sigmas.tolist() == [0.0, 0.25, 0.375, 0.6875, 1.0]
    assert pipe.scheduler.timesteps.tolist() == [0.0, 250.0, 375.0, 687.5]
    assert SEEN[0].sigmas == tuple(QUARTERS)  # policies know noise levels


def test_the_steps_of_the_sampler_add_up_to_the_whole_way() -> None:
    pipe = holder()
    attached(pipe)
    pipe.scheduler.set_timesteps(sigmas=QUARTERS)
    x, ways = torch.zeros(1), []
    for t in pipe.scheduler.timesteps:
        before = x
        x = pipe.scheduler.step(torch.ones(1), t, x)[0]
        ways.append(float(before - x))
    assert ways == [0.25, 0.125, 0.3125, 0.3125]
    assert float(x) == -1.0


def test_pipelines_see_the_same_signature_and_config() -> None:
    plain, pipe = FlowMatchEulerDiscreteScheduler(), holder()
    attached(pipe)
    assert isinstance(pipe.scheduler, FlowMatchEulerDiscreteScheduler)
    assert type(pipe.scheduler).__name__ == "FlowMatchEulerDiscreteScheduler"
    assert inspect.signature(pipe.scheduler.set_timesteps) == inspect.signature(plain.set_timesteps)
    assert pipe.scheduler.config == plain.config
    assert [name for name in vars(type(pipe.scheduler)) if not name.startswith("__")] == ["set_timesteps"]


def test_what_is_saved_is_the_plain_scheduler(tmp_path: Path) -> None:
    plain, pipe = FlowMatchEulerDiscreteScheduler(shift=2.0), holder(FlowMatchEulerDiscreteScheduler(shift=2.0))
    attached(pipe)
    pipe.scheduler.set_timesteps(sigmas=QUARTERS)
    for name, scheduler in (("plain", plain), ("adjusted", pipe.scheduler)):
        scheduler.save_pretrained(tmp_path / name)
    saved = [(tmp_path / name / "scheduler_config.json").read_text() for name in ("plain", "adjusted")]
    assert saved[0] == saved[1]
    loaded = FlowMatchEulerDiscreteScheduler.from_pretrained(tmp_path / "adjusted")
    assert type(loaded) is FlowMatchEulerDiscreteScheduler


def test_one_made_from_its_configuration_is_not_adjusted() -> None:
    pipe = holder()
    attached(pipe)
    other = type(pipe.scheduler).from_config(pipe.scheduler.config)
    other.set_timesteps(sigmas=QUARTERS)
    assert other.sigmas.tolist() == [*QUARTERS, 0.0]


# -- off and on ---------------------------------------------------------------------------------------------------


def test_detached_before_a_run_it_is_what_it_was() -> None:
    pipe = holder()
    before = state(pipe.scheduler)
    attached(pipe).detach()
    assert state(pipe.scheduler) == before


def test_detached_after_a_run_it_holds_the_planned_schedule() -> None:
    pipe = holder()
    sampler = attached(pipe)
    pipe.scheduler.set_timesteps(sigmas=QUARTERS)
    names, planned = set(vars(FlowMatchEulerDiscreteScheduler())), planned_sigmas(pipe.scheduler)
    for t in pipe.scheduler.timesteps:
        pipe.scheduler.step(torch.ones(1), t, torch.zeros(1))
    sampler.detach()
    assert type(pipe.scheduler) is FlowMatchEulerDiscreteScheduler
    assert set(vars(pipe.scheduler)) - names == {"num_inference_steps"}
    assert pipe.scheduler.sigmas is planned
    assert pipe.scheduler.timesteps.tolist() == [1000.0, 750.0, 500.0, 250.0]


def test_detached_in_the_middle_of_a_run_the_run_goes_on_to_its_end() -> None:
    pipe = holder()
    sampler = attached(pipe)
    pipe.scheduler.set_timesteps(sigmas=QUARTERS)
    x = torch.zeros(1)
    for i, t in enumerate(pipe.scheduler.timesteps):
        x = pipe.scheduler.step(torch.ones(1), t, x)[0]
        if i == 1:
            sampler.detach()
    assert float(x) == -1.0
    assert type(pipe.scheduler) is FlowMatchEulerDiscreteScheduler
    pipe.scheduler.set_timesteps(sigmas=QUARTERS)
    assert pipe.scheduler.sigmas.tolist() == [*QUARTERS, 0.0]


def test_a_deep_copy_has_a_sampler_of_its_own() -> None:
    pipe = holder()
    pipe.sampler = attached(pipe)
    copied = copy.deepcopy(pipe)
    pipe.sampler.detach()
    copied.scheduler.set_timesteps(sigmas=QUARTERS)
    assert copied.scheduler.sigmas.tolist() == [1.0, 0.75, 0.625, 0.3125, 0.0]
    copied.sampler.detach()
    assert type(copied.scheduler) is FlowMatchEulerDiscreteScheduler
    assert copied.scheduler.sigmas.tolist() == [*QUARTERS, 0.0]


def test_a_deep_copy_of_the_scheduler_alone_is_adjusted_too() -> None:
    pipe = holder()
    attached(pipe)
    copied = copy.deepcopy(pipe.scheduler)  # as pipelines do that step sound and picture in turn
    copied.set_timesteps(sigmas=QUARTERS)
    assert copied.sigmas.tolist() == [1.0, 0.75, 0.625, 0.3125, 0.0]


def test_attaching_again_does_nothing() -> None:
    pipe = holder()
    sampler = attached(pipe)
    pipe.scheduler.set_timesteps(sigmas=QUARTERS)
    before = state(pipe.scheduler)
    sampler.attach(pipe)
    assert state(pipe.scheduler) == before


def test_a_scheduler_that_was_replaced_is_taken_over() -> None:
    pipe = holder()
    sampler, old = attached(pipe), pipe.scheduler
    pipe.scheduler = FlowMatchEulerDiscreteScheduler()
    sampler.attach(pipe)
    pipe.scheduler.set_timesteps(sigmas=QUARTERS)
    assert pipe.scheduler.sigmas.tolist() == [1.0, 0.75, 0.625, 0.3125, 0.0]
    assert type(old) is FlowMatchEulerDiscreteScheduler
    pipe.scheduler = UniPCMultistepScheduler()
    with pytest.raises(UnsupportedModelError, match="UniPCMultistepScheduler"):
        sampler.attach(pipe)


def test_pipelines_that_share_a_scheduler_take_it_in_turn() -> None:
    first, shared = holder(), FlowMatchEulerDiscreteScheduler()
    first.scheduler = shared
    second = holder(shared)
    one, two = attached(first, 1.0, 0.5, 1.0, 1.0), attached(second, 0.5, 1.0, 1.0, 1.0)
    shared.set_timesteps(sigmas=QUARTERS)
    assert shared.sigmas[1] == 0.875
    one.attach(first)
    shared.set_timesteps(sigmas=QUARTERS)
    assert shared.sigmas.tolist() == [1.0, 0.75, 0.625, 0.3125, 0.0]
    two.detach()  # has nothing to give back
    assert shared.sigmas[2] == 0.625
    one.detach()
    assert type(shared) is FlowMatchEulerDiscreteScheduler


# -- other samplers -----------------------------------------------------------------------------------------------


class Midpoint(FlowMatchEulerDiscreteScheduler):
    """Not Euler's step, although it inherits from his."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        return super().step(*args, **kwargs)


class Renamed(FlowMatchEulerDiscreteScheduler):
    """Euler's step under another name."""


@pytest.mark.parametrize(
    "scheduler",
    [
        UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction"),
        DPMSolverMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction"),
        FlowMatchHeunDiscreteScheduler(),
        EulerDiscreteScheduler(),
        DDIMScheduler(),
        FlowMatchEulerDiscreteScheduler(stochastic_sampling=True),
        Midpoint(),
    ],
    ids=lambda scheduler: type(scheduler).__name__,
)
def test_another_sampler_is_refused_and_left_alone(scheduler: Any) -> None:
    pipe, before = holder(scheduler), state(scheduler)
    with pytest.raises(UnsupportedModelError, match="Allowed: FlowMatchEulerDiscreteScheduler without") as error:
        attached(pipe)
    assert f"Scaled cannot adjust the timesteps of {type(scheduler).__name__}" in str(error.value)
    assert ("with stochastic_sampling." in str(error.value)) is bool(scheduler.config.get("stochastic_sampling"))
    assert state(scheduler) == before


def test_a_scheduler_that_inherits_the_step_is_allowed() -> None:
    pipe = holder(Renamed())
    sampler = attached(pipe)
    pipe.scheduler.set_timesteps(sigmas=QUARTERS)
    assert pipe.scheduler.sigmas[2] == 0.625
    sampler.detach()
    assert type(pipe.scheduler) is Renamed
