"""Auto: schedules are the cheapest there are, targets are met or refused with their range, and runs follow the plan."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from conftest import attach, drive, equal_steps, record_of

import cachedit
from cachedit import Context, Profile, ProfileError, Schedule, UnsupportedModelError
from cachedit.frontier import Frontier, Point
from cachedit.paths import CRITERIA
from cachedit.planning import Planner
from cachedit.predictors import lagrange
from cachedit.solver import PREDICTORS, RIDGES, Solver
from cachedit.strategies.auto import Auto
from cachedit.strategy import Output, Stack
from zoo.models import CASES
from zoo.pipelines import PIPELINES, run
from zoo.unet_models import UNETS

AXES = {"residual_distance": ["pair"], "frontier": ["budget"], "time": ["value"]}
TIME = {"outside": [2.0], "reused": [0.1]}


def profile_of(
    features: np.ndarray,
    sensitivity: Sequence[float] | None = None,
    sigmas: Sequence[float] | None = None,
    frontier: Mapping[str, Sequence[float]] | None = None,
    **defaults: Any,
) -> Profile:
    """What a calibration would have stored of features ``[T, D]``, with or without a frontier."""
    pairs = itertools.combinations(range(len(features)), 2)
    arrays: dict[str, Any] = {
        "sensitivity": {"all": [1.0] * len(features) if sensitivity is None else list(sensitivity)},
        "residual_distance": {"cond": [float(((features[i] - features[j]) ** 2).sum()) for i, j in pairs]},
        "residual_square": {"cond": (features**2).sum(1).tolist()},
    }
    if frontier is not None:
        arrays |= {"frontier": {name: list(column) for name, column in frontier.items()}, "time": TIME}
    axes = {name: axis for name, axis in AXES.items() if name in arrays}
    return Profile(arrays, None if sigmas is None else list(sigmas), axes=axes, defaults=defaults)


def walk(steps: int) -> np.ndarray:
    """Every step leaves in a new direction: after a gap of g the error is sqrt(g) over the length of the feature."""
    return np.tri(steps) / np.sqrt(np.arange(1, steps + 1))[:, None]


def random_features(steps: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(steps, 5)).cumsum(0)


def evenly(steps: int) -> tuple[float, ...]:
    return tuple(1 - i / steps for i in range(steps))


class Even:
    """Twelve steps on which what is reused g steps later is off by sqrt(g), so the cheapest gaps are the evenest.

    A gap of 2 costs 1, one of 3 costs 1 + sqrt(2): 9 computed steps leave three gaps of 2, 6 leave six, and so on.
    """

    STEPS = 12
    COSTS = {9: 3.0, 6: 6.0, 4: 4 * (1 + 2**0.5), 3: 3 * (1 + 2**0.5 + 3**0.5)}
    PSNR = {9: 38.0, 6: 32.0, 4: 26.0, 3: 20.0}

    @classmethod
    def profile(cls, **columns: Sequence[float]) -> Profile:
        table: dict[str, Sequence[float]] = {
            "steps": [cls.STEPS] * 4,
            "nfe": [*cls.COSTS],
            "predictor": [[*PREDICTORS].index("plain")] * 4,
            "criterion": [[*CRITERIA].index("min_sum")] * 4,
            "cost": [*cls.COSTS.values()],
            "speedup": [1.0] * 4,
            "psnr": [*cls.PSNR.values()],
            "psnr_spread": [1.0] * 4,
        }
        return cls._with(table | columns)

    @classmethod
    def bare(cls, **defaults: Any) -> Profile:
        return cls._with(None, **defaults)

    @classmethod
    def _with(cls, table: Mapping[str, Sequence[float]] | None, **defaults: Any) -> Profile:
        found = profile_of(np.eye(cls.STEPS), frontier=table, **defaults)
        pairs = itertools.combinations(range(cls.STEPS), 2)
        found.arrays["residual_distance"]["cond"] = [float(j - i) for i, j in pairs]
        return found

    @classmethod
    def planner(cls, steps: int = 12, handover: int | None = None, terms: int = 1, **columns: Any) -> Planner:
        return Planner(cls.profile(**columns), Schedule(steps), handover or steps, terms)


# -- the solver -------------------------------------------------------------------------------------------------------


def direct_cost(solver: Solver, features: np.ndarray, sensitivity: Sequence[float], name: str, path: Any) -> float:
    """The cost of a schedule from the features themselves, forecasts drawing on their own expert alone."""
    cost, times = 0.0, evenly(len(features))
    for step in sorted({*range(len(features))} - {*path}):
        own = [k for k in path if k < step and (k >= solver.handover) == (step >= solver.handover)][-PREDICTORS[name] :]
        weights = [0.0] * (len(own) - 1) + [1.0]
        if name in RIDGES and len(own) == 2:
            d, y = features[own[0]] - features[own[1]], features[step] - features[own[1]]
            v = (d @ y) / (d @ d) / (1 + RIDGES[name])
            weights = [v, 1 - v]
        elif name in ("line", "quadratic"):
            weights = lagrange([times[k] for k in own], times[step], len(own) - 1)
        wrong = features[step] - np.array(weights) @ features[own]
        cost += float(np.linalg.norm(wrong) / np.linalg.norm(features[step])) * sensitivity[step]
    return cost


def feasible(steps: int, handover: int) -> list[tuple[int, ...]]:
    """All schedules with gaps up to 8 that compute the first step of every expert."""
    rests = itertools.chain.from_iterable(itertools.combinations(range(1, steps), n) for n in range(steps))
    paths = [(0, *rest) for rest in rests if handover in (*rest, steps)]
    return [path for path in paths if all(b - a <= 8 for a, b in itertools.pairwise((*path, steps)))]


@pytest.mark.parametrize("handover", [9, 4])
@pytest.mark.parametrize("name", PREDICTORS)
def test_schedules_are_the_cheapest_of_all(name: str, handover: int) -> None:
    features, sensitivity = random_features(9), [2.0, 1.0, 3.0, 1.0, 0.5, 2.0, 1.0, 0.2, 1.0]
    profile = profile_of(features, sensitivity, evenly(9))
    solver = Solver(profile, Schedule(9, sigmas=evenly(9)), handover)
    costs = {path: direct_cost(solver, features, sensitivity, name, path) for path in feasible(9, handover)}
    for path, cost in costs.items():
        assert solver.cost(name, path) == pytest.approx(cost)
    found = solver.paths(name, "min_sum")
    assert found.keys() == {len(path) for path in costs}
    for nfe, path in found.items():
        least = min(cost for other, cost in costs.items() if len(other) == nfe)
        if PREDICTORS[name] < 3:
            assert costs[path] == pytest.approx(least)
        else:
            assert least - 1e-9 <= costs[path] <= 1.2 * least  # of three residuals the best may be missed


def test_minimax_lowers_the_worst_gap() -> None:
    features = random_features(12, seed=2)
    solver = Solver(profile_of(features), Schedule(12), 12)
    for nfe in (3, 4, 5, 6):
        gaps = {}
        for criterion in CRITERIA:
            path = (*solver.paths("plain", criterion)[nfe], 12)
            gaps[criterion] = [
                solver.cost("plain", (*range(a + 1), *range(b, 12))) for a, b in itertools.pairwise(path)
            ]
        assert max(gaps["minimax"]) <= max(gaps["min_sum"])
        assert sum(gaps["min_sum"]) <= sum(gaps["minimax"]) + 1e-12


def test_no_gap_spans_the_handover_and_nothing_is_drawn_on_before_it() -> None:
    """By hand: 1 and 2 repeat 0; 4 lies on the line 0-3; 6 would on that of 3-5, but 5 is the first of its expert."""
    path = (0, 3, 5, *range(7, 12))
    solver, alone = (Solver(Even.bare(), Schedule(12), handover) for handover in (5, 12))
    assert solver.cost("line", path) == pytest.approx(1 + 2**0.5 + (4 / 3) ** 0.5 + 1)
    assert alone.cost("line", path) == pytest.approx(1 + 2**0.5 + (4 / 3) ** 0.5 + 1.5**0.5)
    assert all(5 in computed for computed in solver.paths("line", "min_sum").values())


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_a_run_of_four_steps_or_fewer_is_computed(steps: int) -> None:
    solver = Solver(Even.bare(), Schedule(steps), steps)
    for name in PREDICTORS:
        assert solver.paths(name, "min_sum") == {steps: tuple(range(steps))}


@pytest.mark.parametrize("steps", [5, 8])
def test_a_short_run_reuses_one_step_in_a_row(steps: int) -> None:
    found = Solver(Even.bare(), Schedule(steps), steps).paths("plain", "min_sum")
    assert min(found) == math.ceil(steps / 2)
    assert all(b - a <= 2 for path in found.values() for a, b in itertools.pairwise((*path, steps)))


def test_schedules_follow_the_noise_levels_of_the_run() -> None:
    """What changes in the upper half of the noise levels alone is computed there, however many steps lie in it."""
    features = np.array([[max(level, 0.5), 1.0] for level in evenly(40)])
    profile = profile_of(features, sigmas=evenly(40))
    for sigmas in (evenly(20), tuple(level**0.5 for level in evenly(16)), tuple(level**2 for level in evenly(16))):
        solver = Solver(profile, Schedule(len(sigmas), sigmas=sigmas), len(sigmas))
        least = 1 + math.ceil(sum(level <= 0.5 for level in sigmas) / 8)
        nfe = sum(level > 0.5 for level in sigmas) + least
        path = solver.paths("plain", "min_sum")[nfe]
        assert {k for k, level in enumerate(sigmas) if level > 0.5} <= {*path}
        assert solver.cost("plain", path) == pytest.approx(0, abs=1e-9)


def test_sensitivity_keeps_its_sum_over_any_number_of_steps() -> None:
    solver = Solver(profile_of(np.eye(40), [0.1] * 40, evenly(40)), Schedule(20, sigmas=evenly(20)), 20)
    assert solver.sensitivity == pytest.approx([0.2] * 20)


# -- the frontier -----------------------------------------------------------------------------------------------------


def points(*rows: tuple[int, int, float, dict[str, float]]) -> list[Point]:
    return [Point(steps, nfe, 0, 0, cost, quality, {}) for steps, nfe, cost, quality in rows]


def test_quality_is_read_off_over_the_logarithm_of_the_cost() -> None:
    """Half way between costs 1 and 4 lies 2: the mean in dB, the geometric mean of distances."""
    worst, best = {"psnr": 20.0, "ssim": 0.6, "lpips": 0.4}, {"psnr": 30.0, "ssim": 0.9, "lpips": 0.1}
    frontier = Frontier(points((10, 3, 4.0, worst), (10, 5, 1.0, best)), 0.1, 0.0)
    assert frontier.metrics == ["psnr", "ssim", "lpips"]
    found = {metric: frontier.quality(metric, 10, 2.0) for metric in worst}
    assert found == pytest.approx({"psnr": 25.0, "ssim": 0.8, "lpips": 0.2})
    for metric, known in worst.items():
        assert frontier.quality(metric, 10, 4.0) == pytest.approx(known)
        assert frontier.quality(metric, 10, 1e6) == pytest.approx(known)  # nothing is known of what is worse
        assert frontier.quality(metric, 10, 0.0) == pytest.approx(best[metric])


def test_a_measured_cost_of_zero_is_no_obstacle() -> None:
    frontier = Frontier(points((10, 3, 1.0, {"psnr": 20.0}), (10, 5, 0.0, {"psnr": 90.0})), 0.1, 0.0)
    assert frontier.quality("psnr", 10, 0.0) == 90.0


def test_points_of_the_nearest_number_of_steps_count() -> None:
    both = points((10, 3, 1.0, {"psnr": 20.0}), (40, 9, 1.0, {"psnr": 40.0}), (40, 20, 0.5, {"psnr": 50.0}))
    frontier = Frontier(both, 0.1, 0.0)
    assert [frontier.quality("psnr", steps, 1.0) for steps in (4, 19, 20, 21, 100)] == [20.0, 20.0, 20.0, 40.0, 40.0]
    assert frontier.range("psnr", 30) == (40.0, 50.0)
    assert [frontier.point(40, nfe).nfe for nfe in (1, 14, 15, 39)] == [9, 9, 20, 20]


def test_speedups_by_hand() -> None:
    """Of 12 steps 6 are computed: 2 + 12 against 2 + 6 + 0.6 of a step's time."""
    frontier = Frontier(points((12, 6, 1.0, {})), 0.1, 2.0)
    assert frontier.speedup(12, 6) == pytest.approx(14 / 8.6)
    assert frontier.speedup(12, 12) == 1.0
    keeping = Frontier(points((12, 6, 1.0, {})), 0.1, 2.0, 0.2)
    assert keeping.speedup(12, 6) == pytest.approx(14 / 9.8)
    assert keeping.speedup(12, 12) == 1.0  # nothing is kept


# -- plans ------------------------------------------------------------------------------------------------------------


def test_plans_within_a_budget() -> None:
    planner = Even.planner()
    assert planner.within(6).computed == (0, 2, 4, 6, 8, 10)
    assert planner.within(6).cost == 6
    assert planner.within(4).computed == (0, 3, 6, 9)
    assert planner.within(12).computed == planner.within(50).computed == tuple(range(12))
    with pytest.raises(ValueError, match=r"max_nfe=2; allowed for 12 steps: 3 to 12\. With fewer"):
        planner.within(2)


def test_plans_near_a_speed_up() -> None:
    """14 / (2 + n + 0.1 * (12 - n)): 2.37 for 3 steps, 2.06 for 4, 1.82 for 5."""
    planner = Even.planner()
    assert len(planner.near(2.06).computed) == len(planner.near(2.0).computed) == 4
    assert len(planner.near(1.9).computed) == 5
    assert len(planner.near(1.0).computed) == 12
    assert len(planner.near(2.4).computed) == 3
    with pytest.raises(ValueError, match=r"target_speedup=2\.5; allowed for 12 steps: 1 to 2\.37, .*3 computed"):
        planner.near(2.5)


def test_in_a_short_run_the_nearest_speed_up_may_be_far() -> None:
    assert Even.planner(8).near(5.0).computed == (0, 2, 4, 6)
    assert Even.planner(4).near(5.0).computed == (0, 1, 2, 3)


def test_plans_that_reach_a_quality() -> None:
    """With 7 steps the cost is 5 and PSNR 32 + 6 * log(6 / 5) / log 2 = 33.6; with 8 it is 4 and 35.5."""
    planner = Even.planner()
    for limit, nfe in ((20.0, 3), (26.5, 5), (32.0, 6), (32.1, 7), (33.5, 7), (33.7, 8), (38.0, 9)):
        assert len(planner.reaching("psnr", limit).computed) == nfe
    for limit in (19.9, 38.1):
        with pytest.raises(ValueError, match=rf"PSNR {limit}; allowed for 12 steps: 20 to 38, .*in between"):
            planner.reaching("psnr", limit)


def test_of_distances_less_is_better() -> None:
    planner = Even.planner(lpips=[0.02, 0.08, 0.16, 0.32], lpips_spread=[0.0] * 4)
    assert len(planner.reaching("lpips", 0.081).computed) == 6
    assert len(planner.reaching("lpips", 0.079).computed) == 7
    with pytest.raises(ValueError, match=r"LPIPS 0\.5; allowed for 12 steps: 0\.02 to 0\.32"):
        planner.reaching("lpips", 0.5)


def test_the_ends_of_the_range_that_an_error_tells_are_allowed() -> None:
    planner = Even.planner(psnr=[37.98765, 32.0, 26.0, 20.12341])
    with pytest.raises(ValueError, match=r"allowed for 12 steps: 20\.13 to 37\.98,"):
        planner.reaching("psnr", 50.0)
    assert len(planner.reaching("psnr", 20.13).computed) == 4
    assert len(planner.reaching("psnr", 37.98).computed) == 9


def test_a_metric_that_was_not_measured_is_refused() -> None:
    with pytest.raises(ProfileError, match="no LPIPS; allowed: PSNR. Calibrate where"):
        Even.planner().reaching("lpips", 0.1)


def test_what_did_best_at_a_budget_is_taken_as_far_as_residuals_are_kept() -> None:
    quadratic, minimax = [*PREDICTORS].index("quadratic"), [*CRITERIA].index("minimax")
    columns = {"predictor": [0, 0, quadratic, quadratic], "criterion": [0, minimax, 0, 0]}
    chosen = {terms: Even.planner(terms=terms, **columns).every for terms in (1, 2, 3)}
    assert [chosen[terms][4].predictor for terms in (1, 2, 3)] == ["plain", "fitted", "quadratic"]
    assert [chosen[3][nfe].predictor for nfe in (3, 5, 6, 12)] == ["quadratic", "quadratic", "plain", "plain"]
    assert (chosen[3][6].criterion, chosen[3][9].criterion) == ("minimax", "min_sum")
    fixed = Planner(Even.profile(**columns), Schedule(12), 12, 2, "damped", "min_sum")
    assert {(plan.predictor, plan.criterion) for plan in fixed.every.values()} == {("damped", "min_sum")}


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"target_speedup": 0.5}, r"target_speedup=0.5; allowed: a number, 1 or more"),
        ({"target_speedup": math.inf}, "target_speedup=inf"),
        ({"target_speedup": math.nan}, "target_speedup=nan"),
        ({"target_speedup": "fast"}, "target_speedup='fast'"),
        ({"target_speedup": True}, "target_speedup=True"),
        ({"max_nfe": 2.5}, "max_nfe=2.5; allowed: a number, 1 or more"),
        ({"max_nfe": 0}, "max_nfe=0"),
        ({"min_psnr": -1}, "min_psnr=-1; allowed: a number, 0 or more"),
        ({"max_lpips": "low"}, "max_lpips='low'"),
        ({"max_nfe": 3, "min_ssim": 0.9}, r"got max_nfe=3, min_ssim=0\.9; allowed: one of them"),
        ({"predictor": "cubic"}, "predictor='cubic'; allowed: 'plain', 'line', 'quadratic', 'fitted', 'damped', None"),
        ({"criterion": "mean"}, "criterion='mean'; allowed: 'min_sum', 'minimax', None"),
        ({"cached": "blocks"}, "cached='blocks'; allowed: 'stack', 'output', None"),
        ({"terms": 4}, "terms=4; allowed: 1 to 3, None"),
        ({"terms": 0}, "terms=0"),
        ({"predictor": "line", "terms": 1}, "predictor='line', terms=1; allowed: terms of 2 or more"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"Auto .*{said}"):
        Auto(**options)


def test_open_options_come_from_the_profile() -> None:
    assert Auto().configured(None) == Auto(terms=2, cached="stack")
    assert Auto().configured(Even.bare()) == Auto(terms=2, cached="stack")
    assert Auto().configured(Even.profile()) == Auto(terms=1, cached="stack")  # only plain reuse did best
    assert Auto(predictor="quadratic").configured(Even.profile()) == Auto(
        predictor="quadratic", terms=3, cached="stack"
    )
    known = Even.bare(cached="output", max_nfe=5, predictor="line", criterion="minimax")
    assert Auto().configured(known) == Auto(max_nfe=5, predictor="line", criterion="minimax", terms=2, cached="output")
    assert Auto(max_nfe=7, terms=1).configured(known) == Auto(max_nfe=7, criterion="minimax", terms=1, cached="output")


def test_the_sites_and_the_depth_follow() -> None:
    assert Auto().sites == ()
    assert Auto().configured(None).sites == (Stack(),)
    assert Auto(cached="output").sites == (Output(),)
    assert [Auto(predictor=name).configured(None).depth for name in PREDICTORS] == [*PREDICTORS.values()]  # type: ignore[arg-type]


def test_what_was_not_calibrated_is_refused() -> None:
    with pytest.raises(ProfileError, match="cached='output'; allowed: 'stack', .*--option cached=output"):
        Auto(cached="output").configured(Even.bare())
    for options in ({"target_speedup": 2}, {"min_psnr": 30.0}):
        with pytest.raises(ProfileError, match=f"{next(iter(options))} takes a measured frontier.*Allowed: max_nfe"):
            Auto(**options).configured(Even.bare())  # type: ignore[arg-type]


# -- plans of the strategy --------------------------------------------------------------------------------------------


def plan_of(strategy: Auto, profile: Profile, steps: int = 12) -> tuple[int, ...]:
    return strategy.configured(profile).plan(Schedule(steps), profile).computed


def test_every_target_by_hand() -> None:
    profile = Even.profile(ssim=[0.98, 0.92, 0.84, 0.68], ssim_spread=[0.0] * 4)
    assert plan_of(Auto(max_nfe=6), profile) == (0, 2, 4, 6, 8, 10)
    assert plan_of(Auto(target_speedup=2), profile) == (0, 3, 6, 9)
    assert plan_of(Auto(min_psnr=31), profile) == (0, 2, 4, 6, 8, 10)
    assert plan_of(Auto(min_ssim=0.919), profile) == (0, 2, 4, 6, 8, 10)
    assert plan_of(Auto(), profile) == plan_of(Auto(target_speedup=2.0), profile)


def test_without_a_frontier_the_default_is_half_of_the_steps() -> None:
    assert len(plan_of(Auto(), Even.bare())) == 6
    assert len(plan_of(Auto(), Even.bare(), 13)) == 7
    assert len(plan_of(Auto(), Even.bare(), 4)) == 4


def test_the_default_is_no_target_that_could_be_out_of_reach() -> None:
    """With 9 of 12 steps or more computed, 14 / 11.3 is the highest speed-up."""
    profile = Even.profile()
    profile.arrays["frontier"] = {name: column[:1] for name, column in profile.arrays["frontier"].items()}
    assert len(plan_of(Auto(), profile)) == 9
    with pytest.raises(ValueError, match=r"target_speedup=2; allowed for 12 steps: 1 to 1\.24"):
        plan_of(Auto(target_speedup=2), profile)


def test_the_second_expert_is_known_before_the_run() -> None:
    """Two experts of 6 steps need 2 computed steps at least, one of 8 or fewer needs 1."""
    profile = profile_of(random_features(8), sigmas=evenly(8))
    strategy = Auto(max_nfe=2).configured(profile)
    alone = Context(schedule=Schedule(16), profile=profile, expert_steps=16)
    assert strategy.expected(alone)["computed_steps"] == 2
    shared = Context(schedule=Schedule(16), profile=profile, expert_steps=6)
    with pytest.raises(ValueError, match="max_nfe=2; allowed for 16 steps: 3 to 16"):
        strategy.expected(shared)
    assert dataclasses.replace(strategy, max_nfe=3).expected(shared)["computed_steps"] == 3


# -- runs -------------------------------------------------------------------------------------------------------------


def test_a_run_follows_the_plan_and_says_what_it_expects() -> None:
    case, profile = CASES["dit"], Even.profile()
    model = case.build()
    plain = drive(model, case, evenly(12))
    attach(model, case, Auto(max_nfe=6), profile=profile, num_inference_steps=12)
    outputs = drive(model, case, evenly(12))
    record = record_of(model)
    assert record.computed_steps == [0, 2, 4, 6, 8, 10] == equal_steps(outputs, plain)
    assert record.expected == {
        "computed_steps": 6,
        "predictor": "plain",
        "speedup": pytest.approx(14 / 8.6),
        "psnr": pytest.approx(32.0),
    }
    assert "expected          computed_steps 6, predictor plain, speedup 1.628, psnr 32\n" in str(record)
    assert '"expected": {"computed_steps": 6' in record.to_json()
    assert equal_steps(drive(model, case, evenly(12)), outputs) == [*range(12)]
    assert record_of(model).computed_steps == record.computed_steps


def test_a_target_out_of_reach_is_refused_before_the_first_step() -> None:
    case = CASES["dit"]
    model = attach(case.build(), case, Auto(max_nfe=2), profile=Even.profile(), num_inference_steps=12)
    with pytest.raises(ValueError, match="max_nfe=2; allowed for 12 steps: 3 to 12"):
        case.call(model, 1.0)


def test_the_output_of_a_unet() -> None:
    case, profile = UNETS["unet-sd"], Even.bare(cached="output")
    model = case.build()
    plain = drive(model, case, evenly(12))
    attach(model, case, Auto(max_nfe=6, predictor="line"), profile=profile, num_inference_steps=12)
    outputs = drive(model, case, evenly(12))
    record = record_of(model)
    assert equal_steps(outputs, plain) == record.computed_steps
    assert record.nfe == 6
    with pytest.raises(UnsupportedModelError, match="UNet2DConditionModel is a UNet"):
        attach(case.build(), case, Auto(), profile=Even.bare(), num_inference_steps=12)


def drifting(steps: int = 40) -> Profile:
    """Features that turn with the noise level, faster where there is less noise."""
    levels = evenly(steps)
    features = np.array([[math.cos(4 * (1 - s) ** 2), math.sin(4 * (1 - s) ** 2), 1 + s] for s in levels])
    profile = profile_of(features, [0.1] * steps, levels)
    profile.arrays["response"] = {"all": [-1 / steps] * steps}  # Euler's
    return profile


def schedule_of(record: cachedit.Run) -> Schedule:
    """The noise schedule of the steps that a run made."""
    steps = {step.index: step for step in record.steps}.values()
    timesteps, sigmas = zip(*((step.timestep, step.sigma) for step in steps), strict=True)
    assert record.response is not None
    return Schedule(len(steps), timesteps, sigmas, tuple(record.response[record.steps[0].index :]))


@pytest.mark.parametrize(
    ("name", "steps", "length"),
    [("flux", 12, 12), ("flux", 28, 28), ("flux_unipc", 20, 20), ("flux_img2img", 24, 12), ("sd", 12, 12)],
)
def test_pipelines_run_what_is_solved_for_their_steps(name: str, steps: int, length: int) -> None:
    """Other numbers of steps, a multistep sampler, the second half of a schedule and a UNet, from one profile."""
    profile, options = drifting(), {"predictor": "line", "criterion": "min_sum"}
    if name == "sd":
        profile.defaults["cached"] = "output"
    built = PIPELINES[name]()
    cachedit.wrap(built.pipe, Auto(max_nfe=length // 2, **options), profile=profile)  # type: ignore[arg-type]
    first = run(built, steps=steps)
    record = record_of(built.pipe)
    wanted = Solver(profile, schedule_of(record), length).paths("line", "min_sum")[length // 2]
    assert (record.status, record.computed_steps) == ("finished", [steps - length + step for step in wanted])
    assert max(b - a for a, b in itertools.pairwise((*wanted, length))) > 2 or length == 12
    assert run(built, steps=steps).equal(first)


def test_both_experts_of_a_pipeline() -> None:
    """Three of ten steps belong to the first; the plan and what is expected know it."""
    profile, built = drifting(), PIPELINES["wan22"]()
    cachedit.wrap(built.pipe, Auto(max_nfe=4, predictor="line", criterion="min_sum"), profile=profile)
    run(built)
    record = record_of(built.pipe)
    experts = {step.index: step.expert for step in record.steps}
    handover = [*experts.values()].index("transformer_2")
    wanted = Solver(profile, schedule_of(record), handover).paths("line", "min_sum")[4]
    assert handover == 3
    assert record.computed_steps == [*wanted]
    assert handover in wanted
    assert record.expected["computed_steps"] == 4


def test_after_a_step_out_of_turn_weights_are_solved_for_what_is_kept() -> None:
    """By hand: the line through steps 4 and 5, a step further; of 4 and 6 half of their distance further."""
    profile = drifting(12)
    strategy = Auto(max_nfe=4, predictor="line", criterion="min_sum").configured(profile)
    schedule = Schedule(12, sigmas=evenly(12))
    assert not {4, 6} & {*strategy.plan(schedule, profile).computed}

    def weights(kept: list[int], step: int) -> Sequence[float]:
        return strategy.weights(
            Context(step=step, schedule=schedule, computed_steps=kept, profile=profile, expert_steps=12)
        )

    assert weights([4, 5], 6) == pytest.approx([-1, 2])
    assert weights([4, 6], 7) == pytest.approx([-0.5, 1.5])
    assert weights([5], 6) == [1.0]
    fitted = Auto(max_nfe=4, predictor="fitted", terms=3).configured(profile)
    context = Context(step=7, schedule=schedule, computed_steps=[2, 4, 6], profile=profile, expert_steps=12)
    (wanted,) = Solver(profile, schedule, 12).distances.fitted(
        np.array(4), np.array(6), np.array([7]), RIDGES["fitted"]
    )
    assert fitted.weights(context) == pytest.approx([0.0, *wanted])


def test_a_control_input_that_appears_is_computed_and_then_drawn_on() -> None:
    """A step out of turn in a run: the plan is kept, and what follows it is forecast from the newest."""
    case, profile = CASES["flux"], drifting(12)
    assert case.control is not None
    model = attach(case.build(), case, Auto(max_nfe=6, predictor="line"), profile=profile, num_inference_steps=12)
    drive(model, case, evenly(12))
    planned = record_of(model).computed_steps
    late = next(step for step in range(2, 11) if step not in planned)
    for step, sigma in enumerate(evenly(12)):
        case.call(model, sigma, **(case.control(0, 1) if step >= late else {}))
    assert record_of(model).computed_steps == sorted({*planned, late})
