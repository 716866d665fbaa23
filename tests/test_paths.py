"""Shortest paths of every budget are those of brute force where costs depend on two computed steps or one."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from cachedit.paths import shortest_paths

Path = tuple[int, ...]
Costs = Callable[[Path], Sequence[float]]


def table_of(rng: random.Random, steps: int, widest: int, depth: int, forbidden: float = 0.0) -> Costs:
    """Costs of every tail that there is: few distinct values, so ties abound; eighths, so sums are exact."""
    table: dict[Path, list[float]] = {}

    def costs(tail: Path) -> list[float]:
        assert len(tail) <= depth
        if tail not in table:
            gaps = range(min(widest, steps - tail[-1]))
            table[tail] = [0.0] + [math.inf if rng.random() < forbidden else rng.randrange(9) / 8 for _ in gaps[1:]]
        return table[tail]

    for size in range(1, depth + 1):  # filled beforehand, so that it does not matter who asks first
        for tail in itertools.combinations(range(steps), size):
            costs(tail)
    return costs


def gaps_of(path: Path, steps: int, depth: int, costs: Costs) -> list[float]:
    """Costs of the gaps of a path; inf for one that is too wide."""
    found = []
    for k, (start, end) in enumerate(itertools.pairwise((*path, steps)), 1):
        row = costs(path[max(0, k - depth) : k])
        found.append(row[end - start - 1] if end - start <= len(row) else math.inf)
    return found


def total(gaps: Sequence[float], criterion: str) -> Any:
    return sum(gaps) if criterion == "min_sum" else sorted(gaps, reverse=True)


def brute_force(steps: int, depth: int, costs: Costs, criterion: str) -> dict[int, tuple[Any, Path]]:
    """The least (cost, path) of every budget that has one."""
    found: dict[int, tuple[Any, Path]] = {}
    for size in range(steps):
        for rest in itertools.combinations(range(1, steps), size):
            gaps = gaps_of((0, *rest), steps, depth, costs)
            if math.inf not in gaps:
                candidate = total(gaps, criterion), (0, *rest)
                found[size + 1] = min(candidate, found.get(size + 1, candidate))
    return found


@pytest.mark.parametrize("criterion", ["min_sum", "minimax"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("forbidden", [0.0, 0.4])
def test_paths_are_those_of_brute_force(criterion: str, depth: int, forbidden: float) -> None:
    """Of equal ones the one that computes earlier, too."""
    rng = random.Random(f"{criterion} {depth} {forbidden}")
    for _ in range(25):
        steps = rng.randrange(1, 10)
        costs = table_of(rng, steps, rng.randrange(1, 6), depth, forbidden)
        wanted = {budget: path for budget, (_, path) in brute_force(steps, depth, costs, criterion).items()}
        assert shortest_paths(steps, depth, costs, criterion) == wanted


@pytest.mark.parametrize("criterion", ["min_sum", "minimax"])
def test_with_a_third_step_paths_are_feasible_and_never_better_than_the_best(criterion: str) -> None:
    rng, missed = random.Random(3), 0
    for _ in range(25):
        steps = rng.randrange(8, 12)
        costs = table_of(rng, steps, 4, 3)
        best = brute_force(steps, 3, costs, criterion)
        found = shortest_paths(steps, 3, costs, criterion)
        assert found.keys() == best.keys()
        for budget, path in found.items():
            reached = total(gaps_of(path, steps, 3, costs), criterion)
            assert reached >= best[budget][0]
            assert len(path) == budget
            missed += reached > best[budget][0]
    assert missed  # so it is not exact, as its docstring says


def test_by_hand() -> None:
    """Reusing step 1, 2 or 3 of 4 costs 1, 4 or 2; a second one in a row costs 3 more."""
    alone = {1: 1.0, 2: 4.0, 3: 2.0}

    def costs(tail: Path) -> list[float]:
        reused = range(tail[-1] + 1, 4)
        return [0.0, *itertools.accumulate(alone[step] + 3 * (step > reused[0]) for step in reused)]

    assert shortest_paths(4, 1, costs) == {
        1: (0,),  # 1 + 7 + 5
        2: (0, 2),  # 1 + 2
        3: (0, 2, 3),  # 1
        4: (0, 1, 2, 3),
    }


def test_minimax_spreads_what_min_sum_concentrates() -> None:
    """Two ways to reuse two of three steps: gaps that cost 5 and 0, or 3 and 3."""
    prices = {(0,): [0.0, 3.0, 9.0], (1,): [0.0, 0.0, 5.0], (2,): [0.0, 3.0], (3,): [0.0]}
    assert shortest_paths(4, 1, prices.__getitem__, "min_sum")[2] == (0, 1)
    assert shortest_paths(4, 1, prices.__getitem__, "minimax")[2] == (0, 2)


def test_among_equals_earlier_steps_are_computed() -> None:
    found = shortest_paths(12, 2, lambda tail: [0.0] * min(4, 12 - tail[-1]))
    assert found[3] == (0, 4, 8)  # no gap is wider than 4
    assert found[4] == (0, 1, 4, 8)
    assert found[12] == tuple(range(12))
    assert min(found) == 3


def test_a_forbidden_gap_may_leave_a_budget_without_a_schedule() -> None:
    """Step 2 must be computed, so one computed step is too few."""

    def costs(tail: Path) -> list[float]:
        return [math.inf if tail[-1] < 2 < step else 0.0 for step in range(tail[-1] + 1, 5)]

    found = shortest_paths(4, 1, costs)
    assert [*found] == [2, 3, 4]
    assert found[2] == (0, 2)
