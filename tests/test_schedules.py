"""Schedules: published lists come out, both optimisers match brute force, and tables move to other noise schedules."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from cachedit import schedules
from cachedit.schedules import edge_costs, furthest, min_sum, minimax, resample, resample_amplification, scan

Rows = list[list[float]]

# -- rules over the step index ------------------------------------------------------------------------------------


def test_every_gives_taylorseers_published_list() -> None:
    assert schedules.every(50, 6, 3) == (0, 1, 2, 8, 14, 20, 26, 32, 38, 44)
    assert schedules.every(50, 4, 2) == (0, 1, *range(5, 50, 4))


@pytest.mark.parametrize("interval", [1, 2, 3, 7, 50, 60])
def test_every_after_one_step_is_foras_rule(interval: int) -> None:
    assert schedules.every(50, interval) == tuple(i for i in range(50) if i % interval == 0)


def test_growing_gives_spectrums_lists() -> None:
    assert schedules.growing(50, 2, 0.75, 5) == (0, 1, 2, 3, 4, 6, 8, 11, 15, 20, 25, 31, 38, 46)
    assert schedules.growing(50, 2, 3, 5) == (0, 1, 2, 3, 4, 6, 11, 19, 30, 44)
    assert schedules.growing(50, 6, 0, 3) == schedules.every(50, 6, 3)


def test_shrinking_gives_profilingdits_published_list() -> None:
    published = (6, 18, 26, 32, 38, 42, 46, 48)
    assert schedules.shrinking(50, 6, 12, 3, multiple=2) == (*range(6), *published)
    # by hand: gaps 4 - 2 * s / 8 at s = 0, 4, 7 are 4, 3, 2.25
    assert schedules.shrinking(8, 0, 4, 2) == (0, 4, 7)


def test_no_whole_step_rounding_gives_profilingdits_list() -> None:
    """Gaps 12 at 6 and 8 at 18 need a slope above 3/12, gaps 6 at 26 and 6 at 32 one below 1/6."""
    published = (6, 18, 26, 32, 38, 42, 46, 48)
    found = {schedules.shrinking(50, 6, large / 10, small / 10) for large in range(110, 140) for small in range(10, 60)}
    assert (*range(6), *published) not in found


@pytest.mark.parametrize(
    ("steps", "interval", "center", "power", "expected"),
    [
        (50, 5, 0, 1.4, (0, 1, 5, 9, 13, 18, 24, 30, 36, 43)),  # by hand: 50 * (k / 10) ** 1.4
        # the rest: DeepCache's recipe, run with numpy
        (50, 5, 15, 1.4, (0, 5, 9, 13, 17, 21, 26, 31, 37, 43)),
        (50, 3, 15, 1.4, (0, 3, 6, 8, 11, 13, 15, 17, 20, 22, 25, 28, 32, 35, 38, 42, 46)),
        (20, 3, 5, 1.4, (0, 3, 5, 6, 9, 12, 16)),
        (40, 2, 3, 1.5, (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 18, 21, 23, 26, 28, 31, 34, 37)),  # power falls once
        (50, 1, 15, 1.4, tuple(range(50))),
    ],
)
def test_quad_center_gives_deepcaches_lists(
    steps: int, interval: int, center: int, power: float, expected: tuple[int, ...]
) -> None:
    assert schedules.quad_center(steps, interval, center, power) == expected


def test_a_warm_up_longer_than_the_run_computes_everything() -> None:
    everything = (0, 1, 2)
    assert schedules.every(3, 2, 9) == schedules.growing(3, 2, 1, 9) == schedules.shrinking(3, 9, 4, 2) == everything


# -- optimisers against brute force -------------------------------------------------------------------------------


def random_costs(rng: random.Random, steps: int, widest: int) -> Rows:
    """Few distinct values, so ties abound; eighths, so sums are exact. Entries past the end are rubbish."""
    return [[0.0, 0.0, *(rng.randrange(9) / 8 for _ in range(widest - 1))] for _ in range(steps)]


def paths(steps: int, gaps: int, end: int, sizes: range) -> Iterator[tuple[int, ...]]:
    for middle in itertools.combinations(range(1, end), gaps - 1):
        path = (0, *middle, end)
        if all(b - a in sizes for a, b in itertools.pairwise(path)):
            yield path


def test_minimax_is_brute_force() -> None:
    rng = random.Random(0)
    for _ in range(200):
        steps = rng.randrange(2, 11)
        widest = rng.randrange(1, steps + 1)
        budget = rng.randrange(1 + math.ceil((steps - 1) / widest), steps + 1)
        costs = random_costs(rng, steps, widest)
        ranked = [
            (sorted((costs[a][b - a] for a, b in itertools.pairwise(path)), reverse=True), path)
            for path in paths(steps, budget - 1, steps - 1, range(1, widest + 1))
        ]
        assert minimax(costs, budget) == min(ranked)[1]


def test_min_sum_is_brute_force() -> None:
    rng = random.Random(1)
    for _ in range(200):
        shortest = rng.randrange(1, 3)
        longest = rng.randrange(shortest, shortest + 4)
        budget = rng.randrange(1, 5)
        steps = rng.randrange(max(2, budget * shortest), budget * longest + 2)
        costs = random_costs(rng, steps, longest)
        ranked = [
            (sum(costs[a][b - a] for a, b in itertools.pairwise(path)), path[:-1])
            for path in paths(steps, budget, steps, range(shortest, longest + 1))
        ]
        if ranked:
            assert min_sum(costs, budget, shortest, longest) == min(ranked)[1]
        else:
            with pytest.raises(ValueError, match="budget"):
                min_sum(costs, budget, shortest, longest)


def test_minimax_avoids_the_worst_gap_first_and_the_second_worst_next() -> None:
    # ways from 0 to 4 over one step: 0-1-4 costs (5, 0), 0-2-4 (3, 3), 0-3-4 (6, 0); the sums would choose the first
    costs = [[0.0, 0, 3, 6], [0.0, 0, 9, 5], [0.0, 0, 3, 3], [0.0, 0, 0, 0], [0.0, 0, 0, 0]]
    assert minimax(costs, 3) == (0, 2, 4)
    # the gap from 0 to 2 gets as bad as that from 1 to 4: (5, 3) against (5, 0)
    costs[0][2] = 5
    assert minimax(costs, 3) == (0, 1, 4)


def test_min_sum_by_hand() -> None:
    # groups of 2 to 4 in 6 steps: lengths 2 + 4 cost 1 + 9, 3 + 3 cost 2 + 4, 4 + 2 cost 3 + 1; then 4 + 2 is forbidden
    costs = [[0.0, 0, 1, 2, 3], [0.0, 0, 0, 0, 0], [0.0, 0, 0, 0, 9], [0.0, 0, 0, 4, 4], [0.0, 0, 1, 1, 1], [0.0] * 5]
    assert min_sum(costs, 2, 2, 4) == (0, 4)
    costs[0][4] = math.inf
    assert min_sum(costs, 2, 2, 4) == (0, 3)


def test_the_tightest_budgets_leave_no_choice() -> None:
    costs = random_costs(random.Random(2), 50, 7)
    assert minimax(costs, 8) == (0, 7, 14, 21, 28, 35, 42, 49)
    assert minimax(costs, 50) == tuple(range(50))
    assert min_sum(costs, 10, 5, 5) == tuple(range(0, 50, 5))
    assert minimax([[0.0, 0.0]], 1) == (0,)


def test_equal_costs_compute_early_steps() -> None:
    flat = [[0.0] * 8 for _ in range(50)]
    assert minimax(flat, 10) == (0, 1, 2, 7, 14, 21, 28, 35, 42, 49)
    assert min_sum(flat, 10, 3, 7) == (0, 3, 6, 9, 12, 15, 22, 29, 36, 43)


# -- threshold rules ----------------------------------------------------------------------------------------------

ERRORS: Rows = [
    [0.0, 0.10, 0.30, 0.15],
    [0.0, 0.05, 0.20, 0.25],
    [0.0, 0.20, 0.30, 0.40],
    [0.0, 0.05, 0.10, 0.15],
    [0.0, 0.10, 0.10, 0.10],
    [0.0, 0.25, 0.30, 0.30],
    [0.0, 0.05, 0.05, 0.05],
    [0.0, 0.00, 0.00, 0.00],
]


def test_scan_by_hand() -> None:
    # from 0: .10 at 1, .30 at 2; from 2: .20 at 3 is not below; from 3: .15 at 6, and 7 was not measured
    assert scan(ERRORS, 0.2) == (0, 2, 3, 7)
    assert scan(ERRORS, 0.11) == (0, 2, 3, 6)  # from 3: .10 at 5, .15 at 6; from 6: .05 at 7
    assert scan(ERRORS, 0.0) == tuple(range(8))


def test_furthest_by_hand() -> None:
    # from 0: .15 three steps on, though .30 lies between; from 4: .10 up to the end; 7 is the last
    assert furthest(ERRORS, 0.2) == (0, 4, 7)
    # from 0: only .10, one step on; from 2: nothing; from 3: .10 two steps on; from 6: .05, but 7 is the last
    assert furthest(ERRORS, 0.12) == (0, 2, 3, 6, 7)
    assert furthest(ERRORS, 0.0) == tuple(range(8))


def test_values_repeated_past_the_end_are_never_read() -> None:
    poisoned = [[99.0 if i + g > 7 else value for g, value in enumerate(row)] for i, row in enumerate(ERRORS)]
    for threshold in (0.0, 0.11, 0.12, 0.2, 1.0):
        assert scan(poisoned, threshold) == scan(ERRORS, threshold)
        assert furthest(poisoned, threshold) == furthest(ERRORS, threshold)
    assert edge_costs(poisoned) == edge_costs(ERRORS)
    sigmas, new = [0.9 - i / 10 for i in range(8)], [0.85, 0.6, 0.33, 0.05]
    assert resample(poisoned, sigmas, new) == resample(ERRORS, sigmas, new)
    costs = edge_costs(ERRORS)
    poisoned = [[99.0 if i + g > 8 else value for g, value in enumerate(row)] for i, row in enumerate(costs)]
    assert [minimax(poisoned, b) for b in range(3, 9)] == [minimax(costs, b) for b in range(3, 9)]
    assert [min_sum(poisoned, b, 1, 4) for b in range(2, 9)] == [min_sum(costs, b, 1, 4) for b in range(2, 9)]


def test_edge_costs_by_hand() -> None:
    errors = [[0.0, 0.5, 0.25], [0.0, 1.0, 2.0], [0.0, 0.75, 0.75], [0.0, 0.0, 0.0]]
    assert edge_costs(errors, [1, 1, 2, 4]) == [
        [0, 0, 0.5, 1.0],  # .5 * 1, + .25 * 2
        [0, 0, 2.0, 10.0],  # 1 * 2, + 2 * 4
        [0, 0, 3.0, 3.0],  # .75 * 4, and step 4 is no more
        [0, 0, 0, 0],
    ]
    assert edge_costs(errors)[1] == [0, 0, 1.0, 3.0]


# -- tables on another noise schedule -----------------------------------------------------------------------------


def uniform(steps: int, start: float = 1.0) -> list[float]:
    return [start * (1 - i / steps) for i in range(steps)]


def shifted(steps: int, shift: float = 3.0) -> list[float]:
    return [shift * s / (1 + (shift - 1) * s) for s in uniform(steps)]


def true_error(earlier: float, later: float) -> float:
    """Saturating with distance and larger at high noise; its second derivatives are at most 6 and 8."""
    return (1 - math.exp(-2 * (earlier - later))) * (1 + later / 2)


def table(sigmas: list[float], widest: int) -> Rows:
    last = len(sigmas) - 1
    return [[true_error(s, sigmas[min(i + g, last)]) for g in range(widest + 1)] for i, s in enumerate(sigmas)]


@pytest.mark.parametrize("old", [uniform(50), shifted(50)], ids=["uniform", "shifted"])
@pytest.mark.parametrize(
    "new",
    [uniform(20), uniform(28), uniform(100), shifted(20), shifted(50), uniform(15, start=0.6)],
    ids=["20", "28", "100", "20 shifted", "50 shifted", "partial"],
)
def test_resampled_tables_are_those_of_the_new_schedule(old: list[float], new: list[float]) -> None:
    widest = 6
    found, wanted = np.array(resample(table(old, 49), old, new)), np.array(table(new, 49))
    # a linear interpolation is off by h^2 / 8 of the second derivative; half a step past the last, by three times that
    spacing = max(a - b for a, b in itertools.pairwise([*old, 0.0]))
    bound = 3 * spacing**2 / 8 * (6 + 8)
    assert np.abs(found - wanted).max() <= bound
    costs, wanted_costs = np.array(edge_costs(found[:, : widest + 1].tolist())), edge_costs(table(new, widest))
    assert np.abs(costs - wanted_costs).max() <= widest * bound


def test_reading_a_table_by_index_is_ten_times_worse() -> None:
    old, new = uniform(50), shifted(20)
    wanted = [row[1] for row in table(new, 1)]
    found = [row[1] for row in resample(table(old, 8), old, new)]
    by_index = [table(old, 8)[round(i * 49 / 19)][1] for i in range(20)]
    off, off_by_index = (max(abs(a - b) for a, b in zip(row, wanted, strict=True)) for row in (found, by_index))
    assert off < off_by_index / 10


def test_resampling_by_hand() -> None:
    sigmas, errors = [0.9, 0.6, 0.3], [[0.0, 0.2, 0.5], [0.0, 0.4, 0.4], [0.0, 0.0, 0.0]]

    def at(*new: float) -> list[object]:
        return [pytest.approx(row) for row in resample(errors, sigmas, list(new))]

    assert at(0.9, 0.75, 0.6) == [[0, 0.1, 0.2], [0, 0.1, 0.1], [0, 0, 0]]  # half the way, half the error
    # between steps 0.5 and 1.5: the mean of (0,1) .2, (0,2) .5, (1,1) 0, (1,2) .4
    assert at(0.75, 0.45) == [[0, 0.275, 0.275], [0, 0, 0]]
    assert at(0.6, 0.15) == [[0, 0.6, 0.6], [0, 0, 0]]  # half a step past the last: 1.5 times .4
    assert at(1.0, 0.9) == [[0, 0.2 / 3, 0.2 / 3], [0, 0, 0]]  # a third of a step before the first
    assert at(0.5) == [[0.0, 0.0, 0.0]]


def test_schedules_that_agree_are_copied_exactly() -> None:
    old = shifted(50)
    errors = table(old, 8)
    same = resample(errors, old, list(old))
    assert same == errors
    assert same is not errors
    assert same[0] is not errors[0]
    assert resample(errors, old, old[20:]) == errors[20:]  # the end of the schedule: image to image
    assert resample_amplification(old, old, list(old)) == old
    doubled = [0.9, 0.9, 0.5, 0.5]  # two calls per noise level
    assert resample(ERRORS[4:], doubled, doubled) == ERRORS[4:]


def test_every_second_step_reads_twice_the_distance() -> None:
    old = uniform(50)
    errors = table(old, 8)
    found = resample(errors, old, old[::2])
    assert [row[:5] for row in found[:20]] == [[errors[2 * i][2 * g] for g in range(5)] for i in range(20)]
    # distance 10 was not measured: 10/8 of that at 8, which is more than the truth where errors saturate
    assert found[3][5] == pytest.approx(errors[6][8] * 10 / 8)
    assert found[3][5] > true_error(old[6], old[16])


@pytest.mark.parametrize("steps", [10, 20, 28, 50, 100])
def test_resampled_errors_grow_with_distance(steps: int) -> None:
    found = resample(table(shifted(50), 8), shifted(50), uniform(steps))
    assert len(found) == steps
    assert {len(row) for row in found} == {9}
    for i, row in enumerate(found):
        assert row[0] == 0
        assert all(a < b for a, b in itertools.pairwise(row[: steps - i]))
        assert len(set(row[steps - 1 - i :])) <= 1  # past the end the last value is repeated
    assert json.loads(json.dumps(found)) == found


def test_amplification_keeps_its_sum() -> None:
    sigmas, amplification = [0.9, 0.6, 0.3], [1.0, 2.0, 4.0]
    # 1 + half of 2, then the other half + 4
    assert resample_amplification(amplification, sigmas, [0.9, 0.45]) == pytest.approx([2, 5])
    halves = resample_amplification(amplification, sigmas, [0.9, 0.75, 0.6, 0.45, 0.3, 0.15])
    assert halves == pytest.approx([0.5, 0.5, 1, 1, 2, 2])
    assert resample_amplification(amplification, sigmas, [0.6, 0.45]) == pytest.approx([1, 5])  # partial: less to do
    # a third of a step earlier: as much again as the first step had there
    assert resample_amplification(amplification, sigmas, [1.0, 0.6]) == pytest.approx([4 / 3, 6])


@pytest.mark.parametrize("rule", [scan, furthest])
def test_a_larger_threshold_computes_no_more_steps(rule: Callable[[Rows, float], tuple[int, ...]]) -> None:
    errors = table(shifted(50), 10)
    counts = [len(rule(errors, threshold / 100)) for threshold in range(0, 60, 2)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == 50
    assert counts[-1] < 10


def test_a_larger_budget_has_no_worse_gap() -> None:
    costs = edge_costs(table(shifted(50), 8))
    worst = [max(costs[a][b - a] for a, b in itertools.pairwise(minimax(costs, budget))) for budget in range(8, 51)]
    assert worst == sorted(worst, reverse=True)
    assert worst[-1] == 0


# -- what cannot be -----------------------------------------------------------------------------------------------

FLAT: Rows = [[0.0] * 4 for _ in range(10)]
LEVELS = uniform(10)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: schedules.every(0, 2), "steps=0; allowed: an integer, 1 or more"),
        (lambda: schedules.every(50, 2.5), "interval=2.5; allowed: an integer"),  # type: ignore[arg-type]
        (lambda: schedules.every(50, 2, 0), "warmup=0; allowed: an integer, 1 or more"),
        (lambda: schedules.growing(50, 0.5, 1, 3), "window=0.5; allowed: a number, 1 or more"),
        (lambda: schedules.growing(50, 2, math.nan, 3), "growth=nan; allowed: a number, 0 or more"),
        (lambda: schedules.shrinking(50, 6, 2, 3), "largest=2; allowed: a number, 3 or more"),
        (lambda: schedules.shrinking(50, 6, 12, 1, 2), "smallest=1; allowed: a number, 2 or more"),
        (lambda: schedules.quad_center(50, 5, 50, 1.4), "center=50; allowed: a step index, 0 to 49"),
        (lambda: schedules.quad_center(6, 2, 0, 1.0), "give no 3 distinct steps of 6; allowed: a power above 1"),
        (lambda: minimax(FLAT, 1), "budget=1; allowed for 10 steps and gaps up to 3: 4 to 10"),
        (lambda: minimax(FLAT, 3), "budget=3; allowed for 10 steps and gaps up to 3: 4 to 10"),
        (lambda: minimax(FLAT, 11), "budget=11; allowed .* 4 to 10"),
        (lambda: minimax([[0.0, 0.0, math.inf]] * 5, 3), "2 gaps avoids infinite costs"),
        (lambda: min_sum(FLAT, 2, 2, 3), "budget=2; allowed for 10 steps in groups of 2 to 3: 4 to 5"),
        (lambda: min_sum(FLAT, 3, 3, 3), "budget=3; allowed .*: none"),
        (lambda: min_sum(FLAT, 3, 2, 4), "longest=4; allowed: up to 3"),
        (lambda: min_sum(FLAT, 3, 3, 2), "longest=2; allowed: an integer, 3 or more"),
        (lambda: scan(FLAT, -1), "threshold=-1; allowed: a number, 0 or more"),
        (lambda: furthest(FLAT, math.nan), "threshold=nan; allowed"),
        (lambda: scan([[0.0, 1.0], [0.0]], 1), r"errors has rows of lengths \[1, 2\]; allowed: one"),
        (lambda: scan([], 1), r"errors has rows of lengths \[\]"),
        (lambda: furthest([[0.0, math.nan]], 1), "errors holds nan; allowed"),
        (lambda: edge_costs([[0.0, math.inf]]), "errors holds inf; allowed"),
        (lambda: edge_costs(FLAT, [1.0]), "amplification has 1 entries; allowed: 10"),
        (lambda: resample(FLAT, LEVELS[1:], LEVELS), "sigmas has 9 entries; allowed: 10"),
        (lambda: resample([[0.0, 0.0]], [1.0], LEVELS), "calibrated_steps=1; allowed: an integer, 2 or more"),
        (lambda: resample(FLAT, LEVELS, []), r"new_sigmas=\[\]; allowed: noise levels in \[0, 1\]"),
        (lambda: resample(FLAT, LEVELS, [14.6, 1.0]), "new_sigmas=.*; allowed: noise levels"),
        (lambda: resample(FLAT, LEVELS, [0.5, 0.6]), "new_sigmas=.*do not increase"),
        (lambda: resample(FLAT, uniform(10, 0.5), [1.0, 0.5]), "new_sigmas start at 1; allowed: up to 0.55"),
        (lambda: resample_amplification([1.0], LEVELS, LEVELS), "sigmas has 10 entries; allowed: 1,"),
    ],
)
def test_what_cannot_be_says_what_can(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
