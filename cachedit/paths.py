"""Schedules whose gaps cost what the steps computed before them make them cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Cost = Callable[[tuple[int, ...], int], float]


def shortest_paths(
    steps: int, widest: int, depth: int, cost: Cost, criterion: str = "min_sum"
) -> dict[int, tuple[int, ...]]:
    """The cheapest schedule of every budget: number of computed steps -> their indices, rising from 0.

    Dynamic programming over the two newest computed steps. It is exact where a gap's cost depends on them alone; where
    a third counts (``depth`` 3) it is that of the cheapest way to the two, which may miss the best.

    Args:
        steps: of the run, T.
        widest: largest distance between computed steps, and from the last one to the end.
        depth: newest computed steps that ``cost`` looks at.
        cost: of the tail of a path and the step that is computed next, T for the end of the run; inf forbids it.
        criterion: "min_sum" adds the gaps up; "minimax" compares the sorted costs, the largest first (LeMiCa).
    """
    nothing, add = CRITERIA[criterion]
    layer: dict[tuple[int, ...], tuple[Any, tuple[int, ...]]] = {(0,): (nothing, (0,))}
    found: dict[int, tuple[int, ...]] = {}
    for budget in range(1, steps + 1):
        ends: list[tuple[Any, tuple[int, ...]]] = []
        following: dict[tuple[int, ...], tuple[Any, tuple[int, ...]]] = {}
        for total, path in layer.values():
            tail, newest = path[-depth:], path[-1]
            for step in range(newest + 1, min(newest + widest, steps) + 1):
                price = cost(tail, step)
                if price == math.inf:
                    continue
                if step == steps:
                    ends.append((add(total, price), path))
                    continue
                reached = (add(total, price), (*path, step))
                key = (newest, step)
                following[key] = min(reached, following.get(key, reached))
        if ends:
            found[budget] = min(ends)[1]
        layer = following
    return found


def _insert(worst: tuple[float, ...], cost: float) -> tuple[float, ...]:
    return tuple(sorted((*worst, cost), reverse=True)) if cost > 0 else worst


CRITERIA: dict[str, tuple[Any, Callable[[Any, float], Any]]] = {
    "min_sum": (0.0, lambda total, cost: total + cost),
    "minimax": ((), _insert),
}
"""Criterion -> the cost of no gap, and how a gap is added. Profiles store places in it: new ones go to its end."""
