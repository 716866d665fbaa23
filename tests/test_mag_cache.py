"""MagCache's rule: the published tables give the published schedules, and every option does what it says."""

from __future__ import annotations

import random
from typing import Any

import pytest

import cachedit
from cachedit import Context, MagCache, Profile, Schedule, Strategy
from cachedit.shipped import shipped


def computed_steps(strategy: MagCache, profile: Profile, steps: int, **position: Any) -> list[int]:
    """Steps that are computed in a run of ``steps``: the first, which has nothing to reuse, and as the rule says."""
    sigmas = tuple(profile.sigmas) if profile.sigmas is not None and len(profile.sigmas) == steps else None
    schedule, strategy = Schedule(steps, sigmas=sigmas), strategy.configured(profile)
    computed = [0]
    for step in range(1, steps):
        context = Context(
            step=step, schedule=schedule, computed_steps=computed, profile=profile, expert_steps=steps, **position
        )
        if strategy.should_compute(context):
            computed.append(step)
    return computed


def listed(text: str) -> list[int]:
    """ "0-2 5" -> [0, 1, 2, 5]."""
    bounds = [[int(bound) for bound in part.split("-")] for part in text.split()]
    return [step for part in bounds for step in range(part[0], part[-1] + 1)]


@pytest.mark.parametrize(
    ("profile", "options", "steps", "wanted"),
    [
        ("flux-dev", (0.24, 5, 0.1), 28, "0-2 5 9 15 21 26"),
        ("flux-dev", (0.06, 3, 0.2), 28, "0-5 7 9 13 17 21 24 26 27"),
        ("wan2.1-t2v-1.3b", (0.12, 4, 0.2), 50, "0-9 14 19 24 29 34 38 41 44 46 48 49"),
        ("wan2.1-t2v-1.3b", (0.12, 2, 0.2), 50, "0-9 12 15 18 21 24 27 30 33 36 39 42 44 46 48 49"),
        ("wan2.1-t2v-1.3b", (0.24, 6, 0.2), 50, "0-9 16 23 30 36 41 45 47 49"),
        ("wan2.1-t2v-14b", (0.24, 6, 0.2), 50, "0-9 16 23 30 36 41 44 47 49"),
        ("wan2.1-i2v-720p-14b", (0.24, 6, 0.2), 40, "0-7 14 21 27 32 35 38"),
        ("hunyuanvideo-720p", (0.24, 6, 0.2), 50, "0-9 14 18 23 29 34 41 46 48 49"),
        ("hunyuanvideo-720p", (0.12, 4, 0.2), 50, "0-9 12 15 18 22 25 29 33 38 43 46 48 49"),
        ("qwen-image", (0.06, 2, 0.2), 50, "0-15 17-19 21 23 25 27 29 31 34 37 39 41-49"),
    ],
)
def test_published_tables_give_the_published_schedules(
    profile: str, options: tuple[float, int, float], steps: int, wanted: str
) -> None:
    threshold, skip, retention = options
    strategy = MagCache(threshold=threshold, max_skip_steps=skip, retention_ratio=retention)
    assert computed_steps(strategy, shipped()[profile], steps) == listed(wanted)


def test_flux_script_never_reuses_step_11() -> None:
    wanted = listed("0-2 5 9 11 17 23 26")
    assert computed_steps(MagCache(always_compute=(11,)), shipped()["flux-dev"], 28) == wanted


def test_flux_table_stretched_by_the_index_rule() -> None:
    wanted = listed("0-4 6 9 13 17 23 29 35 41 45 48")
    assert computed_steps(MagCache(resample="nearest"), shipped()["flux-dev"], 50) == wanted


def reference(ratios: list[float], strategy: MagCache) -> list[int]:
    """The rule as its authors write it: three accumulators that a computed step resets."""
    warmup = int(len(ratios) * strategy.retention_ratio + 0.5 * (strategy.retention_rounding == "nearest"))  # type: ignore[operator]
    computed, ratio, error, run = [], 1.0, 0.0, 0
    for step, value in enumerate(ratios):
        skip = False
        if step >= max(warmup, 1):
            ratio, run = ratio * value, run + 1
            error += abs(1 - ratio)
            small = error <= strategy.threshold if strategy.inclusive else error < strategy.threshold  # type: ignore[operator]
            skip = small and run <= strategy.max_skip_steps and step not in strategy.always_compute  # type: ignore[operator]
        if not skip:
            computed.append(step)
            ratio, error, run = 1.0, 0.0, 0
    return computed


def test_equals_the_rule_with_accumulators_on_random_tables() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        spread = draw.choice([0.01, 0.05, 0.2])
        ratios = [1.0, *(abs(draw.gauss(1.0, spread)) + 1e-3 for _ in range(draw.randrange(4, 60)))]
        strategy = MagCache(
            threshold=draw.choice([0.0, 0.03, 0.12, 0.5]),
            max_skip_steps=draw.randrange(7),
            retention_ratio=draw.choice([0.0, 0.1, 0.25, 1.0]),
            inclusive=draw.random() < 0.5,
            retention_rounding=draw.choice(["nearest", "floor"]),
            always_compute=tuple(draw.sample(range(len(ratios)), 2)),
        )
        ours = computed_steps(strategy, Profile.from_ratios(ratios), len(ratios))
        assert ours == reference(ratios, strategy), f"seed {seed}"


@pytest.mark.parametrize(("inclusive", "wanted"), [(True, [0, 3]), (False, [0, 2])])
def test_an_error_equal_to_the_threshold(inclusive: bool, wanted: list[int]) -> None:
    # Errors after step 0 are 0, 0.25, 0.5: exact in binary.
    strategy = MagCache(threshold=0.25, max_skip_steps=5, retention_ratio=0.0, inclusive=inclusive)
    assert computed_steps(strategy, Profile.from_ratios([1.0, 1.0, 0.75, 1.0]), 4) == wanted


@pytest.mark.parametrize(("rounding", "wanted"), [("floor", [0, 1]), ("nearest", [0, 1, 2])])
def test_rounding_of_the_warmup(rounding: Any, wanted: list[int]) -> None:
    strategy = MagCache(retention_ratio=0.25, retention_rounding=rounding, max_skip_steps=9)  # 10 * 0.25 is 2.5
    assert computed_steps(strategy, Profile.from_ratios([1.0] * 10), 10) == wanted


def test_the_branch_with_the_largest_error_decides() -> None:
    ratios = {"cond": [1.0, 1.0, 1.0, 1.0, 0.5, 1.0], "uncond": [1.0, 1.0, 0.5, 1.0, 1.0, 1.0]}
    strategy = MagCache(threshold=0.1, max_skip_steps=9, retention_ratio=0.0)
    assert computed_steps(strategy, Profile.from_ratios(ratios), 6) == [0, 2, 4]


def test_a_later_expert_warms_up_at_its_own_first_step() -> None:
    flat = Profile.from_ratios([1.0] * 10)
    strategy = MagCache(retention_ratio=0.2, max_skip_steps=9).configured(flat)
    contexts = [
        Context(step=step, schedule=Schedule(10), computed_steps=[5], profile=flat, expert_start=5, expert_steps=5)
        for step in (6, 7)
    ]
    assert [bool(strategy.should_compute(context)) for context in contexts] == [False, False]  # 5 * 0.2 is one step
    strategy = MagCache(retention_ratio=0.4, max_skip_steps=9).configured(flat)
    assert [bool(strategy.should_compute(context)) for context in contexts] == [True, False]


def test_open_options_come_from_the_profile_and_given_ones_win() -> None:
    strategy = MagCache(max_skip_steps=1).configured(shipped()["wan2.1-t2v-14b"])
    assert strategy == MagCache(0.24, 1, 0.2, inclusive=False, retention_rounding="floor")


@pytest.mark.parametrize("profile", [None, Profile.from_ratios([1.0, 1.0])])
def test_open_options_without_a_recommendation(profile: Profile | None) -> None:
    assert MagCache().configured(profile) == MagCache(0.06, 3, 0.2, inclusive=True, retention_rounding="nearest")


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("threshold", -0.1, "0.0 or more"),
        ("threshold", float("nan"), "0.0 or more"),
        ("threshold", "high", ""),
        ("max_skip_steps", -1, "0 or more"),
        ("retention_ratio", 1.5, "from 0 to 1"),
        ("retention_ratio", -0.5, ""),
        ("resample", "linear", "'sigma', 'nearest'"),
        ("retention_rounding", "up", "'nearest', 'floor'"),
        ("always_compute", 11, ""),
        ("always_compute", ("11",), ""),
    ],
)
def test_an_impossible_option_is_refused_with_what_is_allowed(option: str, value: Any, allowed: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"(?s){option}.*{value}.*{allowed}"):
        MagCache(**{option: value})


@pytest.mark.parametrize("spelling", ["magcache", "mag-cache", "mag_cache", "MagCache", "MAGCACHE", "Mag Cache"])
def test_any_spelling_finds_it(spelling: str) -> None:
    assert Strategy.find(spelling, {"threshold": 0.1}) == MagCache(threshold=0.1)


def test_an_instance_takes_further_options() -> None:
    assert Strategy.find(MagCache(threshold=0.1), {"max_skip_steps": 2}) == MagCache(threshold=0.1, max_skip_steps=2)


def test_what_is_not_a_strategy_or_an_option_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'magicache'.*mag_cache"):
        Strategy.find("magicache", {})
    with pytest.raises(TypeError, match=r"no option 'treshold'.*threshold"):
        Strategy.find("magcache", {"treshold": 0.1})
    with pytest.raises(TypeError, match=r"a float.*mag_cache"):
        Strategy.find(0.1, {})  # type: ignore[arg-type]


def test_it_is_in_the_registry() -> None:
    assert cachedit.strategies()["mag_cache"] is MagCache  # type: ignore[operator]
    assert MagCache.paper == "arXiv 2506.09045"
