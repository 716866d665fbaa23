"""Schedules whose gaps cost what the steps computed before them make them cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

Costs = Callable[[tuple[int, ...]], Sequence[float]]


def shortest_paths(steps: int, depth: int, costs: Costs, criterion: str = "min_sum") -> dict[int, tuple[int, ...]]:
    """The cheapest schedule of every budget: number of computed steps -> their indices, rising from 0.

    Dynamic programming over the two newest computed steps. It is exact where a gap's cost depends on them alone; where
    a third counts (``depth`` 3) it is that of the cheapest way to the two, which may miss the best.

    Args:
        steps: of the run, T.
        depth: newest computed steps that costs depend on.
        costs: of the newest computed steps, oldest first: what it costs to compute next the step after them, or the
            second one after them, and so on, as far as a gap may reach; T is the end of the run. inf forbids a gap.
        criterion: "min_sum" adds the gaps up; "minimax" compares the sorted costs, the largest first (LeMiCa).
    """
    nothing, add = CRITERIA[criterion]
    layer: dict[tuple[int, ...], tuple[Any, tuple[int, ...]]] = {(0,): (nothing, (0,))}
    found: dict[int, tuple[int, ...]] = {}
    for budget in range(1, steps + 1):
        ends: list[tuple[Any, tuple[int, ...]]] = []
        following: dict[tuple[int, ...], tuple[Any, tuple[int, ...]]] = {}
        for total, path in layer.values():
            newest = path[-1]
            for step, price in enumerate(costs(path[-depth:]), newest + 1):
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
