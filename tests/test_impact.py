"""MixCache's impact: how the arbiter weighs its sites, and the calibration that finds what each does to the result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import record_of
from diffusers import DiffusionPipeline

import cachedit
from cachedit import Context, Profile
from cachedit.calibration import calibrate
from cachedit.samples import prompts, sample_path
from cachedit.strategies.mix_cache import MixCache
from cachedit.strategy import Guidance, Schedule, Stack

STACK, GUIDANCE, RANGE = MixCache().sites
STEPS = 8


def chosen(strategy: MixCache, step: int = 0, profile: Profile | None = None, **seen: Any) -> list[Any]:
    """The sites that are reused when all three changed alike."""
    changes = dict.fromkeys((STACK, GUIDANCE, RANGE), 1.0)
    ctx = Context(step=step, schedule=Schedule(2), profile=profile, changes=changes, **seen)
    return [site for site in strategy.sites if strategy.reuses(ctx, site)]


def test_the_site_that_costs_least_for_what_it_saves_is_reused() -> None:
    """Savings are 1, 1/2 and the half of the blocks."""
    assert (Stack(), Guidance(), Stack(0.25, 0.75)) == (STACK, GUIDANCE, RANGE)
    assert chosen(MixCache()) == [STACK]
    assert chosen(MixCache(impact=(1.0, 0.4, 1.0))) == [GUIDANCE]
    assert chosen(MixCache(impact=(1.0, 1.0, 0.4))) == [RANGE]
    assert chosen(MixCache(), reused=[STACK]) == [GUIDANCE]  # five times 1 against 2


def test_a_profile_has_the_impact_of_every_step() -> None:
    profile = Profile(arrays={"impact": {"0": [1.0, 1.0], "1": [1.0, 0.1], "2": [0.1, 1.0]}})
    assert [chosen(MixCache(), step, profile) for step in (0, 1)] == [[RANGE], [GUIDANCE]]


def test_a_site_that_the_profile_lacks_has_the_impact_of_the_option() -> None:
    profile = Profile(arrays={"impact": {"0": [1.0, 1.0]}})
    assert chosen(MixCache(impact=(9.0, 0.4, 1.0)), 0, profile) == [GUIDANCE]


def test_calibration_measures_every_site_and_the_result_runs() -> None:
    pipe = DiffusionPipeline.from_pretrained(sample_path("image"))
    pipe.set_progress_bar_config(disable=True)
    profile = calibrate(pipe, "mixcache", prompts=prompts("image")[:1], num_inference_steps=STEPS)
    rows = profile.arrays["impact"]
    assert {key: len(row) for key, row in rows.items()} == dict.fromkeys("012", STEPS)
    assert all(value > 0 for row in rows.values() for value in row)
    cachedit.wrap(pipe, "mixcache", profile=profile, few_step_guard=False)
    with torch.no_grad():
        pipe(prompts("image")[1], num_inference_steps=STEPS, output_type="latent")
    assert record_of(pipe).reused_steps


@pytest.mark.parametrize(("field", "value"), [("impact", (1.0, 0.0, 1.0)), ("span", (0.0, 1.0)), ("interval", 0)])
def test_impossible_options_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"MixCache {field}=.*allowed"):
        MixCache(**{field: value})
