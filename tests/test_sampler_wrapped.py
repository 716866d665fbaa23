"""A strategy that adjusts the sampler, on whole pipelines."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FLAT, Scripted, dissect, drive, record_of
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

import cachedit
from cachedit import Profile, ProfileError, Schedule, UnsupportedModelError
from cachedit.strategies.ertacache import ERTACache
from zoo.models import CASES
from zoo.pipelines import PIPELINES, run

STEPS = 10


@dataclass(frozen=True)
class Halved(Scripted, abstract=True):
    """Goes half of its share at every step that it reuses."""

    @property
    def adjusts_sampler(self) -> bool:
        return True

    def step_scales(self, schedule: Schedule, profile: Profile | None) -> Sequence[float]:
        return [1.0 if step in self.compute else 0.5 for step in range(schedule.num_steps or 0)]


HALVED = Halved((0, 1, 2, 4, 6, 8, 9))


def test_the_model_is_told_the_adjusted_timesteps_and_the_policy_the_planned_levels() -> None:
    built = PIPELINES["sd3"]()
    plain = run(built)
    planned = built.pipe.scheduler.timesteps.tolist()
    cachedit.wrap(built.pipe, HALVED)
    adjusted = run(built)
    assert torch.isfinite(adjusted).all()
    assert not torch.equal(adjusted, plain)
    steps = record_of(built.pipe).steps
    told = [step.timestep for step in steps]
    assert [step.index for step in steps] == list(range(STEPS))
    assert told == built.pipe.scheduler.timesteps.tolist()
    assert told[:4] == planned[:4]  # step 3 is the first that is reused, so step 4 the first that begins elsewhere
    assert all(new > old for new, old in zip(told[4:], planned[4:], strict=True))
    assert [step.sigma for step in steps] == pytest.approx([t / 1000 for t in planned])
    assert record_of(built.pipe).computed_steps == list(HALVED.compute)
    assert torch.equal(run(built), adjusted)
    cachedit.unwrap(built.pipe)
    assert type(built.pipe.scheduler) is FlowMatchEulerDiscreteScheduler
    assert built.pipe.scheduler.timesteps.tolist() == planned
    assert torch.equal(run(built), plain)


def test_another_sampler_is_refused_when_it_is_wrapped() -> None:
    built = PIPELINES["sd3"]()
    built.pipe.scheduler = UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction")
    before = dissect(built.pipe), vars(built.pipe.scheduler).copy()
    with pytest.raises(UnsupportedModelError, match="Halved cannot adjust the timesteps of UniPCMultistepScheduler"):
        cachedit.wrap(built.pipe, HALVED)
    assert (dissect(built.pipe), vars(built.pipe.scheduler)) == before


def test_a_scheduler_that_was_replaced_after_wrapping() -> None:
    built = PIPELINES["sd3"]()
    cachedit.wrap(built.pipe, HALVED)
    adjusted, old = run(built), built.pipe.scheduler
    built.pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    assert torch.equal(run(built), adjusted)
    assert type(old) is FlowMatchEulerDiscreteScheduler
    built.pipe.scheduler = UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction")
    with pytest.raises(UnsupportedModelError, match="UniPCMultistepScheduler"):
        run(built)


def test_a_deep_copy_of_the_pipeline_is_independent() -> None:
    built = PIPELINES["sd3"]()
    plain = run(built)
    cachedit.wrap(built.pipe, HALVED)
    adjusted = run(built)
    copied = copy.deepcopy(built)
    cachedit.unwrap(built.pipe)
    assert torch.equal(run(copied), adjusted)
    cachedit.unwrap(copied.pipe)
    assert type(copied.pipe.scheduler) is FlowMatchEulerDiscreteScheduler
    assert torch.equal(run(copied), plain)
    assert torch.equal(run(built), plain)


def test_what_is_saved_is_the_plain_pipeline(tmp_path: Path) -> None:
    built = PIPELINES["sd3"]()
    built.pipe.save_pretrained(tmp_path / "plain")
    cachedit.wrap(built.pipe, HALVED)
    run(built)
    built.pipe.save_pretrained(tmp_path / "wrapped")
    for file in ("model_index.json", "scheduler/scheduler_config.json"):
        assert (tmp_path / "wrapped" / file).read_text() == (tmp_path / "plain" / file).read_text()


def test_wrapping_again_replaces() -> None:
    built = PIPELINES["sd3"]()
    cachedit.wrap(built.pipe, HALVED)
    run(built)
    cachedit.wrap(built.pipe, "magcache", profile=FLAT)
    assert type(built.pipe.scheduler) is FlowMatchEulerDiscreteScheduler


def ertacache_profile(**arrays: Any) -> Profile:
    one = {"0": [[1.0]] * STEPS}, {"0": [[0.0]] * STEPS}
    mask = {"0": [int(step % 3 == 0) for step in range(STEPS)]}
    found: dict[str, Any] = {
        "output_error": {"0": [[0.0, 0.1, 0.2, 0.3]] * STEPS},
        "step_scale": {"0": [1.0 if step % 3 == 0 else 0.9 for step in range(STEPS)]},
        "correction_mask": mask,
        "correction_scale": one[0],
        "correction_shift": one[1],
    }
    axes = {"output_error": ["step", "gap"], "correction_scale": ["step", "channel"]}
    return Profile(found | arrays, axes={**axes, "correction_shift": ["step", "channel"]}, defaults={"threshold": 0.3})


def test_ertacache_adjusts_if_it_is_told_to() -> None:
    built, profile = PIPELINES["sd3"](), ertacache_profile()
    cachedit.wrap(built.pipe, "ertacache", profile=profile)
    left = run(built)
    planned = built.pipe.scheduler.timesteps.tolist()
    cachedit.wrap(built.pipe, "ertacache", profile=profile, adjust_timesteps=True)
    assert not torch.equal(run(built), left)
    told = built.pipe.scheduler.timesteps.tolist()
    assert told[:2] == planned[:2]
    assert told[2] == pytest.approx(planned[1] - 0.9 * (planned[1] - planned[2]))
    assert record_of(built.pipe).computed_steps == [0, 3, 6, 9]
    with pytest.raises(ProfileError, match="the profile has 10 steps"):
        run(built, steps=12)


def test_a_module_driven_by_hand_has_no_sampler_to_adjust() -> None:
    outputs = []
    for adjust in (False, True):
        model = CASES["sd3"].build()
        strategy = ERTACache(adjust_timesteps=adjust)
        cachedit.wrap(model, strategy, profile=ertacache_profile(), num_inference_steps=STEPS)
        outputs.append(torch.stack(drive(model, CASES["sd3"])))
        assert record_of(model).computed_steps == [0, 3, 6, 9]
    assert torch.equal(*outputs)
