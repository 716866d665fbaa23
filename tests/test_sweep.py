"""The frontier that is measured: what it stores, what it repeats and what not, and whom an auto profile serves."""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import record_of
from painter import contents
from test_calibrated_schedules import Sampler, growing
from test_demo import tiny_pipeline
from test_threads_ranks import ranks

import cachedit
from cachedit import Profile, ProfileError, Schedule
from cachedit.calibration import calibrate
from cachedit.calibration.measures import channels, distance
from cachedit.calibration.measures.channels import ChannelClusters
from cachedit.calibration.measures.distance import Distance
from cachedit.calibration.work import Work
from cachedit.evaluate import sweep
from cachedit.evaluate.compare import Configuration, compare, take
from cachedit.evaluate.metrics import MetricUnavailable
from cachedit.evaluate.panel import Metric
from cachedit.evaluate.sweep import Sweep, _budgets, _promising, _summary, measure_frontier
from cachedit.evaluate.time_shares import time_shares
from cachedit.feature.attachment import find
from cachedit.frontier import Frontier
from cachedit.paths import CRITERIA
from cachedit.run import Run, Step
from cachedit.solver import PREDICTORS, Solver
from cachedit.strategies.auto import Auto
from cachedit.strategy import Stack

STEPS = 10
SIZE = {"height": 32, "width": 32}
PROMPTS = ["red moon", "blue star", "red star", "green moon"]
OUTSIDE, REUSED, KEEPING = 3.0, 0.25, 0.05  # of the made-up times
FEW_RUNS = {"BUDGETS": 2, "SCREENED": 1, "PROMISING": 1.01}
SERVED = ("magcache", "lemica", "hyca", "teacache", "auto")


@functools.cache
def pipe() -> Any:
    return tiny_pipeline()


@functools.cache
def calibrated() -> Profile:
    return calibrate(pipe(), "auto", prompts=["blue moon"], num_inference_steps=STEPS, call_options=SIZE)


class Clockwork:
    """Runs for real, and tells made-up times, of which those of one prompt are far too long.

    Attributes:
        taken: (steps, what ran, prompt) of every run so far.
        stop_after: runs, then Ctrl-C.
    """

    def __init__(self, stop_after: int | None = None) -> None:
        self.taken: list[tuple[int, str, str]] = []
        self.stop_after = stop_after

    def take(self, target: Any, configuration: Configuration | None, shot: Any, steps: int, options: Any) -> None:
        if len(self.taken) == self.stop_after:
            raise KeyboardInterrupt
        take(target, configuration, shot, steps, options)
        self.taken.append((steps, str(configuration and configuration.strategy), shot.prompt))
        nfe, keeping = (steps, 0.0) if shot.run is None else (shot.run.nfe, KEEPING)
        seconds = 0.01 * (OUTSIDE + nfe * (1 + keeping) + REUSED * (steps - nfe))
        shot.latencies[-1] = shot.processor[-1] = seconds * (7 if shot.prompt == PROMPTS[1] else 1)


@pytest.fixture(autouse=True, scope="module")
def _few_runs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in FEW_RUNS.items():
            patch.setattr(sweep, name, value)
        yield


@pytest.fixture
def clockwork(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Clockwork]:
    """Puts a clockwork in place."""

    def wind(**options: Any) -> Clockwork:
        made = Clockwork(**options)
        monkeypatch.setattr(sweep, "take", made.take)
        return made

    return wind


def measured(prompts: Sequence[str] = PROMPTS, **options: Any) -> Profile:
    return measure_frontier(pipe(), calibrated(), prompts, [STEPS], seed=40, call_options=SIZE, **options)


@dataclass
class Whole:
    """A sweep from its beginning to its end."""

    profile: Profile
    runs: list[tuple[int, str, str]]
    told: list[tuple[int, int, str]]

    @property
    def table(self) -> dict[str, list[float]]:
        return self.profile.arrays["frontier"]

    @property
    def frontier(self) -> Frontier:
        found = Frontier.of(self.profile)
        assert found is not None
        return found


@pytest.fixture(scope="module")
def whole() -> Whole:
    with pytest.MonkeyPatch.context() as patch:
        run, told = Clockwork(), []
        patch.setattr(sweep, "take", run.take)
        profile = measured(progress=lambda *now: told.append(now))
        assert find(pipe()) is None
        return Whole(profile, run.taken, told)


# -- what is stored ---------------------------------------------------------------------------------------------------


def test_what_a_frontier_holds(whole: Whole) -> None:
    table, profile = whole.table, whole.profile
    names = ["steps", "nfe", "predictor", "criterion", "cost", "speedup", "psnr", "psnr_spread", "ssim", "ssim_spread"]
    assert [name for name in table if "lpips" not in name] == names
    assert (profile.axes["frontier"], profile.axes["time"]) == (["budget"], ["value"])
    assert {len(column) for column in table.values()} == {2}
    assert table["steps"] == [STEPS] * 2
    assert table["nfe"] == [2, 7]  # gaps of 8 at most; 7 of 10 are no more than 75 %
    assert table["cost"][0] > table["cost"][1] > 0
    assert all(0 < value <= 1 for value in table["ssim"])
    told = {"prompts": 3, "chosen_on": 1, "seed": 40, "device": "", "threads": 1}
    assert profile.provenance["frontier"] | {"device": ""} == told
    assert profile.branches == calibrated().branches
    assert Profile.from_json(profile.to_json()).arrays == profile.arrays
    assert "frontier" not in calibrated().arrays  # what was given is as it was


def test_progress_ends_at_its_total(whole: Whole) -> None:
    assert whole.told[-1][:2] == (sum(steps for steps, *_ in whole.runs),) * 2
    assert [now[0] for now in whole.told] == sorted(now[0] for now in whole.told)


def test_qualities_are_means_over_the_prompts_that_did_not_choose_and_costs_those_of_the_solver(whole: Whole) -> None:
    point = whole.frontier.near(STEPS)[0]
    predictor, criterion = [*PREDICTORS][point.predictor], [*CRITERIA][point.criterion]
    strategy = Auto(max_nfe=point.nfe, predictor=predictor, criterion=criterion)  # type: ignore[arg-type]
    configuration = Configuration(strategy, profile=whole.profile)
    row = compare(pipe(), [configuration], PROMPTS[1:], STEPS, seed=41, call_options=SIZE).rows[1]
    assert point.nfe == 7
    assert point.quality["psnr"] == pytest.approx(row.psnr, rel=1e-5)
    assert point.quality["ssim"] == pytest.approx(row.ssim, rel=1e-5)
    assert point.spread["psnr"] == pytest.approx(statistics.pstdev(shot.psnr or 0 for shot in row.shots), rel=1e-4)
    run = row.shots[0].run
    assert run is not None
    steps = {step.index: step for step in run.steps}.values()
    timesteps, sigmas = zip(*((step.timestep, step.sigma) for step in steps), strict=True)
    solver = Solver(whole.profile, Schedule(STEPS, timesteps, sigmas), STEPS)
    assert point.cost == pytest.approx(solver.cost(predictor, run.computed_steps), rel=1e-5)
    assert run.expected["psnr"] == pytest.approx(row.psnr, rel=1e-5)


def test_speeds_are_medians_and_the_model_of_times_is_found_again(whole: Whole) -> None:
    """Of the three prompts that count one takes seven times as long throughout."""
    assert whole.profile.arrays["time"] == {
        "outside": [pytest.approx(OUTSIDE, rel=1e-4)],
        "reused": [pytest.approx(REUSED, rel=1e-4)],
        "keeping": [pytest.approx(KEEPING, rel=1e-3)],
    }
    for nfe, speedup in zip(whole.table["nfe"], whole.table["speedup"], strict=True):
        taken = OUTSIDE + nfe * (1 + KEEPING) + REUSED * (STEPS - nfe)
        assert speedup == pytest.approx((OUTSIDE + STEPS) / taken, rel=1e-4)
        assert whole.frontier.speedup(STEPS, int(nfe)) == pytest.approx(speedup, rel=1e-3)


def test_every_prompt_takes_turns_with_the_baseline_first(whole: Whole) -> None:
    last = [(steps, what) for steps, what, prompt in whole.runs if prompt == PROMPTS[2]]
    assert last[:2] == [(STEPS, "None"), (2, "None")]
    assert [what.split("max_nfe=")[1].split(",")[0] for _, what in last[2:]] == ["2", "7"]


def made_up(outside: float, computed: float, reused: float, keeping: float = 0.0) -> dict[tuple[int, int], float]:
    pairs = [(50, 50), (12, 12), *((50, nfe) for nfe in (7, 12, 20, 30))]
    return {
        (steps, nfe): outside + (computed + (keeping if nfe < steps else 0)) * nfe + reused * (steps - nfe)
        for steps, nfe in pairs
    }


def test_the_time_model_by_hand() -> None:
    found = time_shares(made_up(6.0, 2.0, 0.5, 0.1))
    assert found == {"outside": [3.0], "reused": [0.25], "keeping": [0.05]}
    nothing = [pytest.approx(0, abs=1e-9)]
    assert time_shares(made_up(0.0, 2.0, 0.5)) == {"outside": nothing, "reused": [0.25], "keeping": nothing}


def test_of_three_calls_keeping_is_not_told_from_computing() -> None:
    """As of a run of five steps, which has one budget: what a computed step takes is then of all calls."""
    seconds = {(5, 5): 13.0, (2, 2): 7.0, (5, 3): 10.0}
    assert time_shares(seconds) == {"outside": [1.5], "reused": [0.25], "keeping": [0.0]}


def test_times_that_would_come_out_negative_are_zero() -> None:
    """Outside of the steps a call takes -1: the rest must explain it, and no prediction is below zero."""
    found = time_shares(made_up(-1.0, 2.0, 0.5))
    assert found["outside"] == [0.0]
    assert 0 < found["reused"][0] < 0.25
    assert time_shares(made_up(5.0, 2.0, -0.02))["reused"] == [0.0]


def test_times_that_do_not_grow_are_refused() -> None:
    with pytest.raises(ProfileError, match="does not grow with its computed steps; allowed: .* Measure the frontier"):
        time_shares({(50, 50): 1.0, (12, 12): 5.0, (50, 10): 4.0})


def test_identical_pictures_are_left_out_of_psnr() -> None:
    same, off = {"psnr": float("inf"), "ssim": 1.0}, {"psnr": 30.0, "ssim": 0.8}
    assert _summary([same, off], ["psnr"]) == {"psnr": 30.0, "psnr_spread": 0.0}
    assert _summary([same, same], ["psnr"]) == {"psnr": 1e3, "psnr_spread": 0.0}
    assert _summary([same, off], ["ssim"]) == {"ssim": pytest.approx(0.9), "ssim_spread": pytest.approx(0.1)}


def test_budgets_and_what_is_promising(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal ratios from the fewest there is a schedule for; both criteria where they differ, no hopeless predictor."""
    solver = Solver(calibrated(), Schedule(50), 50)
    monkeypatch.setattr(sweep, "BUDGETS", 10)
    budgets = _budgets(solver)
    assert (budgets[0], budgets[-1]) == (7, 37)
    ratios = [b / a for a, b in itertools.pairwise(budgets)]
    assert max(ratios) < 1.3
    assert _budgets(Solver(calibrated(), Schedule(5), 5)) == [3]
    for nfe in budgets:
        ways = _promising(solver, nfe)
        costs = {name: solver.cost(name, solver.paths(name, "min_sum")[nfe]) for name in PREDICTORS}
        assert {name for name, _ in ways} == {
            other for other, cost in costs.items() if cost <= 1.01 * min(costs.values())
        }
        paths = [(name, solver.paths(name, criterion)[nfe]) for name, criterion in ways]
        assert len({*paths}) == len(paths)


# -- how it is measured -----------------------------------------------------------------------------------------------


def test_an_interrupted_sweep_goes_on_where_it_stopped(
    whole: Whole, clockwork: Callable[..., Clockwork], tmp_path: Path
) -> None:
    """The first prompt that counts is done and the second is not; only the schedule is seen anew."""
    fully = [prompt for *_, prompt in whole.runs].index(PROMPTS[2])
    cut = clockwork(stop_after=fully + 2)
    with pytest.raises(KeyboardInterrupt):
        measured(checkpoint=tmp_path / "kept")
    assert find(pipe()) is None
    assert cut.taken == whole.runs[: fully + 2]
    with pytest.raises(ValueError, match="resume=True"):
        measured(checkpoint=tmp_path / "kept")
    rest = clockwork()
    found = measured(checkpoint=tmp_path / "kept", resume=True)
    assert rest.taken == [whole.runs[0], *whole.runs[fully:]]
    assert found.arrays == whole.profile.arrays
    assert not (tmp_path / "kept").exists()


def test_a_sweep_of_another_profile_is_not_gone_on_with(clockwork: Callable[..., Clockwork], tmp_path: Path) -> None:
    clockwork(stop_after=5)
    with pytest.raises(KeyboardInterrupt):
        measured(checkpoint=tmp_path / "kept")
    other = Profile.from_json(calibrated().to_json())
    other.arrays["sensitivity"]["all"][3] *= 2
    with pytest.raises(ValueError, match="of another calibration, which had profile"):
        measure_frontier(
            pipe(), other, PROMPTS, [STEPS], seed=40, call_options=SIZE, checkpoint=tmp_path / "kept", resume=True
        )


def with_lpips(score: Any) -> tuple[Metric, ...]:
    """The sweep's metrics with this in the place of LPIPS."""
    return tuple(replace(metric, score=score) if metric.name == "lpips" else metric for metric in sweep.METRICS)


def test_lpips_is_looked_for_once(clockwork: Callable[..., Clockwork], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    def missing(*_: Any) -> torch.Tensor:
        nonlocal asked
        asked += 1
        raise MetricUnavailable("no weights")

    clockwork()
    monkeypatch.setattr(sweep, "METRICS", with_lpips(missing))
    profile = measured(PROMPTS[:2])
    assert asked == 1
    assert "lpips" not in profile.arrays["frontier"]
    with pytest.raises(ProfileError, match="has no LPIPS; allowed: PSNR"):
        Auto(max_lpips=0.1).configured(profile).plan(Schedule(STEPS), profile)


def test_lpips_is_measured_where_it_can_be(
    clockwork: Callable[..., Clockwork], monkeypatch: pytest.MonkeyPatch
) -> None:
    clockwork()
    monkeypatch.setattr(sweep, "METRICS", with_lpips(lambda a, b, _: (a - b).abs().amax((1, 2, 3))))
    table = measured(PROMPTS[:1]).arrays["frontier"]
    assert table["lpips"][0] > table["lpips"][1] > 0
    assert table["lpips_spread"] == [0.0, 0.0]


def test_a_metric_that_some_prompts_lack_is_left_out(
    clockwork: Callable[..., Clockwork], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the weights turn up between an interruption and its resumption; columns must keep one length."""
    real, calls = Sweep._quality, itertools.count()

    def partly(self: Sweep, shot: Any, baseline: Any) -> dict[str, float]:
        found = real(self, shot, baseline)
        return found | ({"lpips": 0.5} if next(calls) > 1 else {})

    clockwork()
    monkeypatch.setattr(sweep, "METRICS", with_lpips(lambda *_: (_ for _ in ()).throw(MetricUnavailable("none"))))
    monkeypatch.setattr(Sweep, "_quality", partly)
    assert "lpips" not in measured(PROMPTS[:3]).arrays["frontier"]


def test_the_schedule_and_the_second_expert_are_read_off_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = ["transformer", "transformer", "transformer_2"]
    steps = [
        Step(index, 900.0 - index, 0.9 - index / 10, branch, expert, computed=True)
        for index, expert in enumerate(experts)
        for branch in ("cond", "uncond")
    ]
    monkeypatch.setattr(sweep, "last_run", lambda _: Run("auto", 3, steps))
    monkeypatch.setattr(Sweep, "_take", lambda *_: None)
    found = Sweep(pipe(), calibrated(), PROMPTS, 0, {}, Work())._schedule(3)
    assert found == (Schedule(3, (900.0, 899.0, 898.0), (0.9, 0.8, 0.7)), 2)


def test_nothing_to_measure_is_refused() -> None:
    with pytest.raises(ValueError, match="got no prompts"):
        measure_frontier(pipe(), calibrated(), [], [STEPS])
    for steps in ([], [4], [STEPS, 3]):
        with pytest.raises(ValueError, match="allowed: 5 or more, as shorter runs reuse nothing"):
            measure_frontier(pipe(), calibrated(), PROMPTS, steps)


def test_two_processes_measure_the_frontier_of_one(whole: Whole) -> None:
    """Both see the schedule; what is tried and what is measured is dealt out, each run made once."""
    seen = ranks(Path(__file__).with_name("rank_frontier.py"), patience=240)
    assert [rank["profile"] == contents(whole.profile) for rank in seen] == [True, True]
    shared, alone = [tuple(run) for rank in seen for run in rank["runs"]], whole.runs
    cached = [run for run in shared if run[1] != "None"]
    assert sorted(cached) == sorted([alone[0], *(run for run in alone if run[1] != "None")])
    assert {prompt for *_, prompt in seen[0]["runs"]} != {prompt for *_, prompt in seen[1]["runs"]}
    main, other = (rank["told"] for rank in seen)
    assert main[-1][0] == main[-1][1]
    assert other == []


# -- whom the profile serves ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SERVED)
def test_an_auto_profile_serves(name: str) -> None:
    try:
        cachedit.wrap(pipe(), name, profile=calibrated())
        generator = torch.Generator().manual_seed(3)
        pipe()(prompt="red star", num_inference_steps=STEPS, generator=generator, output_type="np", **SIZE)
        record = record_of(pipe())
        assert record.status == "finished"
        assert record.strategy.lower().startswith(name)
    finally:
        cachedit.unwrap(pipe())


def test_what_is_measured_along() -> None:
    assert {*calibrated().arrays} == {
        "sensitivity",
        "amplification",
        "response",
        "residual_distance",
        "residual_square",
        "magnitude_ratio",
        "residual_error",
        "channel_cluster",
        "cluster_solver",
        "indicator_polynomial",
    }
    pairs, steps = calibrated().arrays["residual_distance"], calibrated().arrays["residual_square"]
    assert {branch: len(row) for branch, row in pairs.items()} == dict.fromkeys(steps, STEPS * (STEPS - 1) // 2)
    assert [sum(row) / STEPS for row in steps.values()] == pytest.approx([1.0] * len(steps), rel=1e-4)


def test_what_the_model_does_not_allow_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """This one has no first block that could be listened to, and its channels are said to be of two widths."""

    def refuse(*_: Any) -> None:
        raise cachedit.UnsupportedModelError("two widths")

    whole = calibrate(Sampler(growing), "auto", prompts=["a"], num_inference_steps=STEPS)
    assert "channel_cluster" in whole.arrays
    assert "indicator_polynomial" not in whole.arrays
    monkeypatch.setattr(ChannelClusters, "watch", refuse)
    found = calibrate(Sampler(growing), "auto", prompts=["a"], num_inference_steps=STEPS)
    assert whole.arrays.keys() - found.arrays.keys() == {"channel_cluster", "cluster_solver"}
    assert {name: found.arrays[name] for name in found.arrays} == {name: whole.arrays[name] for name in found.arrays}
    with pytest.raises(cachedit.UnsupportedModelError, match="two widths"):
        calibrate(Sampler(growing), "hyca", prompts=["a"], num_inference_steps=STEPS)


def test_runs_too_short_for_what_is_measured_along_are_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """HyCa's clusters take more steps than these."""
    monkeypatch.setattr(channels, "FEWEST", 7)
    with pytest.raises(ProfileError, match="fewer than 7"):
        calibrate(Sampler(growing), "hyca", prompts=["a"], num_inference_steps=6)
    found = calibrate(Sampler(growing), "auto", prompts=["a"], num_inference_steps=6)
    assert "channel_cluster" not in found.arrays
    assert {"sensitivity", "residual_distance", "magnitude_ratio"} <= found.arrays.keys()


def test_distances_by_hand() -> None:
    """The residual of this model is (2 - s)^2 times (1, 2), in units of its mean square over the steps."""
    profile = calibrate(Sampler(growing), "auto", prompts=["a", "b"], num_inference_steps=6)
    level = [(1 + i / 6) ** 2 for i in range(6)]
    unit = sum(x * x for x in level) / 6
    assert profile.arrays["residual_square"]["0"] == pytest.approx([x * x / unit for x in level], rel=1e-4)
    wanted = [(a - b) ** 2 / unit for a, b in itertools.combinations(level, 2)]
    assert profile.arrays["residual_distance"]["0"] == pytest.approx(wanted, rel=1e-3)
    assert profile.axes["residual_distance"] == ["pair"]


def test_a_branch_that_is_not_called_at_some_steps_keeps_its_feature_there() -> None:
    """Guidance that ends early leaves one branch with fewer steps; tables of all branches have one size."""
    measure = Distance(Auto())
    measure.start(0)
    for branch, values in {"cond": {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}, "uncond": {1: 2.0, 2: 4.0}}.items():
        for index, value in values.items():
            step = Step(index, None, None, branch, "transformer", computed=True)
            measure.watch(step, {Stack(): (torch.tensor([[value]]), torch.tensor([0.0]))})
    found = measure.arrays([measure.stop()])
    unit = (4 + 4 + 16 + 16) / 4
    assert found["residual_square"]["uncond"] == [4 / unit, 4 / unit, 16 / unit, 16 / unit]
    assert found["residual_distance"]["uncond"] == [0.0, 4 / unit, 4 / unit, 4 / unit, 4 / unit, 0.0]
    assert found["residual_distance"]["cond"] == pytest.approx([x / 7.5 for x in (1, 4, 9, 1, 4, 1)], rel=1e-5)


def test_of_a_large_feature_a_sample_stands_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers at every step, so what does not change is at no distance."""
    monkeypatch.setattr(distance, "SAMPLED", 64)
    measure, feature = Distance(Auto()), torch.randn(1000, generator=torch.Generator().manual_seed(0))
    measure.start(0)
    for index, factor in enumerate((1.0, 1.0, 2.0)):
        step = Step(index, None, None, "cond", "transformer", computed=True)
        measure.watch(step, {Stack(): (factor * feature,)})
    found = measure.arrays([measure.stop()])
    assert found["residual_square"]["cond"] == pytest.approx([0.5, 0.5, 2.0])  # 1, 1 and 4 in units of 2
    assert found["residual_distance"]["cond"] == pytest.approx([0.0, 0.5, 0.5])
