"""Trust over many runs: turns on one pipeline, crowds of threads, ranks, damaged profiles, and the cost of nothing.

These are short forms. The full one: ``python benchmarks/soak.py --json benchmarks/results/soak-cpu.json``.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FLAT, SIGMAS, Scripted, attach, drive
from test_threads_ranks import ranks
from trials import rank_runs
from trials.call_counts import STATIC, STEPS, costs
from trials.pipeline_runs import Turns
from trials.profile_files import WHOLE, fuzz
from trials.thread_runs import crowd

import cachedit
from cachedit import Profile, ProfileError, Schedule
from zoo.built import Built
from zoo.models import CASES
from zoo.pipelines import PIPELINES, run

PLAIN = CASES["plain"]


def test_40_mixed_runs_of_one_pipeline_are_those_of_fresh_wraps() -> None:
    turns = Turns(seed=1)
    for _ in range(40):
        turns.turn()
    turns.finish()
    assert turns.tally["runs"] == turns.tally["equal to a fresh wrap"] == 40
    did = (
        "wrapped",
        "wrapped again",
        "unwrapped without a trace",
        "ended by exception",
        "ended by ctrl-c",
        "ended by block",
    )
    assert all(turns.tally[what] > 0 for what in did), turns.tally
    assert sum(turns.reused.values()) > 40
    assert set(turns.strangers) == {0}


# -- threads ------------------------------------------------------------------------------------------------------


def test_8_threads_on_one_pipeline_are_right_or_refused() -> None:
    built = PIPELINES["flux_true_cfg"]()
    cachedit.wrap(built.pipe, "mag_cache", profile=FLAT)
    expected = {(seed, steps): run(built, seed, steps) for seed in (0, 1) for steps in (6, 10)}
    tally = crowd(lambda key: run(built, *key), expected, torch.equal, runs=4)
    assert tally["right"] > 0
    assert tally["refused"] > 0
    assert tally.total() == 8 * 4
    assert torch.equal(run(built, 1, 10), expected[1, 10])


def test_8_threads_on_one_module_are_right_or_refused() -> None:
    """No pipeline refuses them at its door; a run that another one displaces is told so at its next step."""
    model = attach(PLAIN.build(), PLAIN, Scripted(compute=(0, 1, 5)))
    expected = {seed: drive(model, PLAIN, seed=seed) for seed in range(3)}

    def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
        return all(map(torch.equal, ours, theirs))

    tally = crowd(lambda seed: drive(model, PLAIN, seed=seed), expected, same, runs=12)
    assert tally["refused"] > 0
    assert tally.total() == 8 * 12
    assert same(drive(model, PLAIN, SIGMAS, seed=2), expected[2])


def test_8_threads_with_a_copy_each_are_isolated() -> None:
    built = PIPELINES["flux"]()
    cachedit.wrap(built.pipe, "mag_cache", profile=FLAT)
    expected = {seed: run(built, seed) for seed in range(8)}
    copies = {seed: Built(copy.deepcopy(built.pipe), built.kwargs) for seed in expected}
    keys = iter(expected)

    def mine(_: Any) -> tuple[int, torch.Tensor]:
        seed = next(keys)  # every thread takes another one
        return seed, run(copies[seed], seed)

    tally = crowd(mine, {None: None}, lambda ours, _: torch.equal(ours[1], expected[ours[0]]), runs=1)
    assert tally == {"right": 8}


# -- ranks --------------------------------------------------------------------------------------------------------


def test_2_ranks_decide_alike_over_random_schedules() -> None:
    first, second = ranks(Path(rank_runs.__file__), "12")
    assert first == second
    listening = [row["strip"] for row in first if row["strategy"] != "mag_cache"]
    assert {"■", "□"} == set("".join(listening))


# -- profiles -----------------------------------------------------------------------------------------------------


def test_400_damaged_profiles_are_refused_or_valid(tmp_path: Path) -> None:
    found = fuzz(range(400), tmp_path)
    assert min(found["refused when it was read"], found["valid"]) > 50
    assert found["slowest_cpu_s"] < 2
    assert found["forbidden_events"] == {}
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def deep(depth: int) -> Any:
    value: Any = 1.0
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"provenance": {"source": deep(400)}}, "field 'provenance' is nested more than 32 deep"),
        ({"model": {**WHOLE["model"], "fingerprint": {"width": deep(400)}}}, "field 'model' is nested more than 32"),
        ({"arrays": {"a": {"all": deep(300)}}, "axes": {"a": ["step"] * 300}}, r"field 'axes\.a' names 300 axes"),
        (
            {
                "arrays": {"magnitude_ratio": {"all": [[1.0], [1.0], [1.0]]}},
                "axes": {"magnitude_ratio": ["step", "gap"]},
            },
            r"field 'axes\.magnitude_ratio' names 2 axes; allowed: at most 1",
        ),
    ],
    ids=["deep provenance", "deep fingerprint", "many axes", "two axes of ratios"],
)
def test_what_fuzzing_found_is_refused(changes: dict[str, Any], message: str) -> None:
    fields = {key: value for key, value in {**WHOLE, **changes}.items() if key not in ("schema", "branches")}
    with pytest.raises(ProfileError, match=message):
        Profile(**fields)


def test_provenance_as_deep_as_is_allowed_can_be_saved() -> None:
    fields = {"arrays": {"a": {"all": [1.0]}}, "provenance": {"source": deep(30)}}
    profile = Profile(**fields)
    assert Profile.from_json(profile.to_json()) == profile


def test_a_table_of_errors_without_gaps_is_refused() -> None:
    profile = Profile({"residual_error": {"cond": [0.0, 0.1, 0.2]}})
    with pytest.raises(ProfileError, match=r"'arrays\.residual_error' lies over step; allowed: step, gap"):
        profile.errors("residual_error", Schedule(3))


# -- the cost of nothing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["flux", "wan"])
def test_a_wrap_that_never_reuses_is_bit_equal_and_adds_less_than_1_percent_of_python_calls(model: str) -> None:
    for cost in costs(model, STATIC):
        assert cost.equal
        assert cost.strip == "■" * STEPS
        assert 0 < cost.share < 0.01
