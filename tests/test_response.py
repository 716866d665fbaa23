"""What a sampler makes of the denoiser's outputs, and what an error at a step is therefore taken to do."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    CogVideoXDPMScheduler,
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    UniPCMultistepScheduler,
)

from cachedit import Profile, Schedule
from cachedit.feature.response import response
from cachedit.sensitivity import sensitivity_of

FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
STEPS = 6


def timed(scheduler: Any, **options: Any) -> Any:
    scheduler.set_timesteps(**(options or {"num_inference_steps": STEPS}))
    return scheduler


def lengths(scheduler: Any) -> list[float]:
    return [b - a for a, b in itertools.pairwise(scheduler.sigmas.tolist())]


@pytest.mark.parametrize(
    "scheduler",
    [
        FlowMatchEulerDiscreteScheduler(shift=3.0),
        EulerDiscreteScheduler(),
        DPMSolverMultistepScheduler(solver_order=1, **FLOW),
        UniPCMultistepScheduler(solver_order=1, disable_corrector=[*range(STEPS)], **FLOW),
    ],
    ids=lambda scheduler: type(scheduler).__name__,
)
def test_a_sampler_of_first_order_answers_with_the_lengths_of_its_steps(scheduler: Any) -> None:
    assert response(timed(scheduler)) == pytest.approx(lengths(scheduler), rel=1e-4)


def final(scheduler: Any, outputs: Sequence[float], noise: float) -> float:
    own, sample = copy.deepcopy(scheduler), torch.full((1, 1, 1, 1), noise, dtype=torch.float64)
    for timestep, output in zip(own.timesteps, outputs, strict=True):
        sample = own.step(torch.full_like(sample, output), timestep, own.scale_model_input(sample, timestep))[0]
    return float(sample)


@pytest.mark.parametrize(
    "scheduler",
    [
        UniPCMultistepScheduler(**FLOW),
        UniPCMultistepScheduler(solver_order=3, **FLOW),
        DPMSolverMultistepScheduler(**FLOW),
        DPMSolverMultistepScheduler(),
        DDIMScheduler(clip_sample=False),
    ],
    ids=lambda scheduler: f"{type(scheduler).__name__}-{scheduler.config.get('solver_order')}",
)
def test_it_is_what_a_changed_output_changes_in_the_sample(scheduler: Any) -> None:
    timed(scheduler)
    outputs = np.linspace(-1, 2, STEPS)
    found = response(scheduler)
    assert found is not None
    for step, share in enumerate(found):
        changed = outputs + np.eye(STEPS)[step]
        assert final(scheduler, changed, 0.7) - final(scheduler, outputs, 0.7) == pytest.approx(share, rel=1e-4)


def test_of_two_calls_per_step_each_has_its_own() -> None:
    """Heun's method by hand: half a step's length for each of its two outputs, the last step whole."""
    scheduler = timed(FlowMatchHeunDiscreteScheduler())
    levels = [*dict.fromkeys(scheduler.sigmas.tolist())]
    halves = [share for a, b in itertools.pairwise(levels[:-1]) for share in [(b - a) / 2] * 2]
    assert response(scheduler) == pytest.approx([*halves, levels[-1] - levels[-2]], rel=1e-4)


def test_noise_that_is_added_does_not_count() -> None:
    """By hand: from the clean sample that it expects, the sampler goes to a new noise of the next level."""
    scheduler = timed(FlowMatchEulerDiscreteScheduler(stochastic_sampling=True), sigmas=[0.8, 0.4])
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    assert response(scheduler) == pytest.approx([-0.8 * (1 - 0.4), -0.4], rel=1e-4)
    assert torch.random.get_rng_state().equal(before)


def test_the_scheduler_is_left_as_it_is() -> None:
    scheduler = timed(UniPCMultistepScheduler(**FLOW))
    assert response(scheduler) is not None
    assert scheduler.step_index is None
    assert scheduler.model_outputs == [None, None]


def test_steps_that_are_not_made_get_nothing() -> None:
    """A multistep solver that begins in the middle begins in first order there."""
    whole, late = (timed(UniPCMultistepScheduler(**FLOW)) for _ in range(2))
    late.set_begin_index(3)
    found = response(late)
    assert found is not None
    assert found[:3] == (0.0, 0.0, 0.0)
    assert 0 not in found[3:]
    assert found != response(whole)


def test_a_step_that_asks_for_more_is_unknown() -> None:
    assert response(timed(CogVideoXDPMScheduler())) is None


# -- what an error does -----------------------------------------------------------------------------------------------


def profile(sensitivity: Sequence[float], levels: Sequence[float], calibrated: Sequence[float] | None) -> Profile:
    arrays = {"sensitivity": {"all": [*sensitivity]}}
    if calibrated is not None:
        arrays["response"] = {"all": [*calibrated]}
    return Profile(arrays, [*levels])


def test_sensitivity_follows_the_response_of_the_run() -> None:
    """Gains of 2, 4 and 8 at levels 1, 0.6 and 0.2; at 0.8 and 0.4 they are 3 and 6."""
    known = profile([0.8, 1.6, 1.6], (1.0, 0.6, 0.2), [-0.4, -0.4, -0.2])
    run = Schedule(4, sigmas=(1.0, 0.8, 0.4, 0.2), response=(-0.1, 0.5, -1.0, -0.25))
    assert sensitivity_of(known, run) == pytest.approx([0.2, 1.5, 6.0, 2.0])
    same = Schedule(3, sigmas=(1.0, 0.6, 0.2), response=(-0.4, -0.4, -0.2))
    assert sensitivity_of(known, same) == pytest.approx([0.8, 1.6, 1.6])


@pytest.mark.parametrize("calibrated", [None, [-0.25] * 4])
@pytest.mark.parametrize("own", [None, (-0.5, -0.5)])
def test_of_euler_it_is_the_share_of_the_noise_levels(
    calibrated: list[float] | None, own: tuple[float, ...] | None
) -> None:
    """Half as many steps are twice as long, and so it is assumed where a sampler is unknown."""
    known = profile([0.1] * 4, (1.0, 0.75, 0.5, 0.25), calibrated)
    assert sensitivity_of(known, Schedule(2, sigmas=(1.0, 0.5), response=own)) == pytest.approx([0.2, 0.2])


def test_what_the_calibrated_sampler_left_out_is_not_divided_by() -> None:
    known = profile([0.1, 0.0, 0.1], (1.0, 0.6, 0.2), [-0.4, 0.0, -0.2])
    found = sensitivity_of(known, Schedule(3, sigmas=(1.0, 0.6, 0.2), response=(-0.4, -0.4, -0.2)))
    assert found == pytest.approx([0.1, 0.0, 0.1])
