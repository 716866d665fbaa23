"""Trust over many runs: turns on one pipeline, crowds of threads, ranks, damaged profiles, and the cost of nothing.

These are short forms. The full one: ``python benchmarks/soak.py --json benchmarks/results/soak-cpu.json``.
"""

from __future__ import annotations

import contextlib
import copy
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FLAT, SIGMAS, STEPS, Scripted, attach, drive, equal_steps
from test_threads_ranks import PATIENCE, REFUSAL, Thread, ranks
from trials import rank_runs
from trials.call_counts import STATIC, costs
from trials.pipeline_runs import Turns
from trials.profile_files import ARRAYS, MODEL, STRATEGIES, TINY, fuzz, whole
from trials.thread_runs import crowd

import cachedit
from cachedit import Profile, ProfileError
from cachedit.calibration.measure import Measure
from cachedit.feature.attachment import watch
from cachedit.run import Step
from zoo.built import Built
from zoo.models import CASES
from zoo.pipelines import PIPELINES, run

PLAIN, FLUX = CASES["plain"], CASES["flux"]


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


@pytest.mark.parametrize("polite", [False, True], ids=["inside of calls", "between calls"])
def test_8_threads_on_one_module_are_unmixed_or_refused(polite: bool) -> None:
    """No pipeline refuses them at its door, so they meet inside of a call; polite ones meet between two calls.

    A thread that goes on after another one has finished its run starts one of its own in the middle of the schedule. So
    what counts as right is, at every step, whatever follows from some step of the thread's own.
    """
    model = attach(PLAIN.build(), PLAIN, Scripted(compute=(0, 1, 5)))
    turn = threading.Lock()

    def make(seed: int) -> list[torch.Tensor]:
        outputs = []
        for sigma in SIGMAS:
            with turn if polite else contextlib.nullcontext():
                outputs += drive(model, PLAIN, [sigma], seed=seed)
        return outputs

    def own(seed: int) -> list[list[torch.Tensor]]:
        """What can come out at every step: row ``start`` reuses what was computed at that step."""
        starts = range(STEPS)
        rows = [drive(attach(PLAIN.build(), PLAIN, Scripted(())), PLAIN, SIGMAS[k:], seed=seed) for k in starts]
        return [[rows[start][step - start] for start in range(step + 1)] for step in range(STEPS)]

    def unmixed(outputs: list[torch.Tensor], allowed: list[list[torch.Tensor]]) -> bool:
        return all(any(torch.equal(x, y) for y in each) for x, each in zip(outputs, allowed, strict=True))

    allowed = {seed: own(seed) for seed in range(3)}
    assert not unmixed(make(0), allowed[1])
    tally = crowd(make, allowed, unmixed, runs=40)
    assert tally["refused"] > 0
    assert tally.total() == 8 * 40
    assert equal_steps(make(2), make(2)) == [*range(STEPS)]


def test_a_second_thread_is_refused_while_the_first_one_keeps_what_it_computed() -> None:
    """What the crowd found: the call was over for the guard before its residual had been taken."""
    model, reached, opened = FLUX.build(), threading.Event(), threading.Event()

    def wait(step: Step, *_: Any) -> None:
        if step.index == 1:
            reached.set()
            assert opened.wait(PATIENCE)

    watch(model, Scripted(compute=(0, 1, 5)), wait)
    first = Thread(lambda: drive(model, FLUX, SIGMAS[:2]))
    assert reached.wait(PATIENCE)
    with pytest.raises(RuntimeError, match=REFUSAL):
        Thread(lambda: drive(model, FLUX, SIGMAS[:1], seed=1)).result()
    opened.set()
    assert equal_steps(first.result(), drive(FLUX.build(), FLUX, SIGMAS[:2])) == [0, 1]


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
    assert found["refused when it was wrapped"] > 20
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
        ({"model": {**TINY["model"], "fingerprint": {"width": deep(400)}}}, "field 'model' is nested more than 32"),
        ({"arrays": {"a": {"all": deep(300)}}, "axes": {"a": ["step"] * 300}}, r"field 'axes\.a' names 300 axes"),
        (
            {
                "arrays": {"magnitude_ratio": {"all": [[1.0], [1.0], [1.0]]}},
                "axes": {"magnitude_ratio": ["step", "gap"]},
            },
            r"field 'axes\.magnitude_ratio' names 2 axes; allowed: at most 1",
        ),
        (
            {"arrays": {"block_drift": {"cond": [0.1, 0.2], "uncond": [0.1]}}, "axes": {"block_drift": ["block"]}},
            r"'arrays\.block_drift': rows have different lengths, 1 and 2; allowed: one for all branches",
        ),
        (
            {"arrays": {"a": {"all": [1.0] * 3}, "b": {"all": [1.0] * 2}}, "axes": {"b": ["pair"]}},
            r"rows over pairs have \[2\] entries; allowed: 3, one per pair of 3 steps",
        ),
        (
            {"defaults": {"threshold": None}},
            r"'defaults\.threshold' is null; allowed: a value of that option",
        ),
    ],
    ids=[
        "deep provenance",
        "deep fingerprint",
        "many axes",
        "two axes of ratios",
        "uneven branches",
        "lost pairs",
        "null",
    ],
)
def test_what_fuzzing_found_is_refused(changes: dict[str, Any], message: str) -> None:
    fields = {key: value for key, value in {**TINY, **changes}.items() if key not in ("schema", "branches")}
    with pytest.raises(ProfileError, match=message):
        Profile(**fields)


def test_provenance_as_deep_as_is_allowed_can_be_saved() -> None:
    fields = {"arrays": {"a": {"all": [1.0]}}, "provenance": {"source": deep(30)}}
    profile = Profile(**fields)
    assert Profile.from_json(profile.to_json()) == profile


def damaged(strategy: str, **changes: Any) -> Profile:
    """What that strategy was calibrated with, but for some fields."""
    return Profile.from_json(json.dumps(whole(strategy) | changes))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_array_over_the_wrong_axes_is_refused_at_the_wrap(strategy: str) -> None:
    """Every array that the strategy reads, with an axis that it does not expect."""
    good = whole(strategy)
    for array, axes in cachedit.strategies()[strategy].profile_arrays.items():  # type: ignore[attr-defined]
        wrong = [*axes[:-1], "wrong"]
        profile = damaged(strategy, axes=good["axes"] | {array: wrong}, sigmas=None)
        with pytest.raises(ProfileError, match=rf"{array}' lies over {', '.join(wrong)}; .* {', '.join(axes)}\."):
            cachedit.wrap(MODEL, strategy, profile=profile)


@pytest.mark.parametrize("strategy", ["hy_ca", "l2p", "le_mi_ca", "harmoni_ca"])
def test_numbers_where_rows_should_be_are_refused_at_the_wrap(strategy: str) -> None:
    """The files that fuzzing found: each array flat, or nested once more, and its axes likewise."""
    good = whole(strategy)
    for array, axes in cachedit.strategies()[strategy].profile_arrays.items():  # type: ignore[attr-defined]
        flat = len(axes) > 1
        rows = {key: [1.0 if flat else [1.0] for _ in row] for key, row in ARRAYS[array].items()}
        changed = {array: [axes[0]] if flat else [*axes, "gap"]}
        profile = damaged(strategy, arrays=good["arrays"] | {array: rows}, axes=good["axes"] | changed)
        with pytest.raises(ProfileError, match=rf"{array}' lies over {', '.join(changed[array])}; .*Calibrate again"):
            cachedit.wrap(MODEL, strategy, profile=profile)


FRONTIER = ARRAYS["frontier"]


@pytest.mark.parametrize(
    ("strategy", "changes", "message"),
    [
        (
            "mag_cache",
            {"defaults": {"max_skip_steps": "x"}},
            "says what cannot be: MagCache max_skip_steps='x'; allowed: an",
        ),
        ("auto", {"defaults": {"predictor": {}}}, r"says what cannot be: Auto predictor=\{\}; allowed: 'plain', "),
        ("auto", {"frontier": {"steps": [5]}}, r"'arrays\.frontier' lacks nfe, .*it holds steps\. Calibrate again"),
        (
            "auto",
            {"frontier": FRONTIER | {"predictor": [0, 9]}},
            r"predictor' holds 9; allowed: integers from 0 to 4",
        ),
        ("auto", {"frontier": FRONTIER | {"nfe": [2, 2.5]}}, r"nfe' holds 2\.5; allowed: integers from 1 to inf\."),
        (
            "auto",
            {"time": {"reused": [-0.1], "outside": [0]}},
            r"time\.reused' holds -0\.1; allowed: numbers from 0",
        ),
        ("auto", {"residual_square": {"uncond": [1.0] * 5}}, r"residual_square' holds uncond; allowed: cond, as"),
    ],
)
def test_what_cannot_have_been_calibrated_is_refused_at_the_wrap(
    strategy: str, changes: dict[str, Any], message: str
) -> None:
    arrays = whole(strategy)["arrays"] | {name: table for name, table in changes.items() if name in ARRAYS}
    profile = damaged(strategy, arrays=arrays, defaults=changes.get("defaults", {}))
    with pytest.raises(ProfileError, match=message):
        cachedit.wrap(MODEL, strategy, profile=profile)


def test_strategies_read_arrays_over_the_axes_that_calibration_makes_them_over() -> None:
    for name in STRATEGIES:
        for array, axes in cachedit.strategies()[name].profile_arrays.items():  # type: ignore[attr-defined]
            assert Measure.registry[array].makes[array] == axes


# -- the cost of nothing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["flux", "wan"])
def test_a_wrap_that_never_reuses_is_bit_equal_and_adds_less_than_1_percent_of_python_calls(model: str) -> None:
    for cost in costs(model, STATIC):
        assert cost.equal
        assert cost.strip == "■" * STEPS
        assert 0 < cost.share < 0.01
