"""Which steps are computed: rules over the step index, and optimisers over measured tables.

Every schedule is a tuple of the computed step indices, rising from 0; the steps between them are reused. Two kinds of
table describe what reuse costs. Both are plain nested lists, one row per step i, columns g = 0..G, all rows of one
length (JSON holds them as they are):

* errors: ``errors[i][g]`` is the relative L1 difference mean|y_i - y_{i+g}| / mean|y_{i+g}| of a site between steps i
  and i+g, so column 0 is zero. A continuous function of two noise levels, hence what is stored and resampled.
* costs: ``costs[i][g]`` is what it costs to compute step i, reuse it at the g-1 steps after it, and compute i+g next
  (or end the run there: i+g == T). Columns 0 and 1 are zero. ``edge_costs`` makes them from errors; they may also be
  measured directly on the final sample. ``inf`` forbids a gap.

A row near the end of the run has no partner for its larger g; it repeats its last value that exists (errors: that of
g = T-1-i, costs: that of g = T-i). Repeated values are never read as measurements.

Whatever is out of range, damaged or impossible raises ValueError: what was got, what is allowed, what to do next.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

Row = Sequence[float]
Table = Sequence[Row]


def every(steps: int, interval: int, warmup: int = 1) -> tuple[int, ...]:
    """Warm-up steps, then one step in ``interval`` (TaylorSeer, arXiv 2503.06923, as in its reference code).

    The first gap is counted from the last warm-up step, so ``warmup=1`` is ``step % interval == 0`` (FORA,
    arXiv 2407.01425; DeepCache's uniform schedule).
    """
    _check_at_least(1, steps=steps, interval=interval, warmup=warmup)
    return (*range(min(warmup, steps)), *range(warmup - 1 + interval, steps, interval))


def growing(steps: int, window: float, growth: float, warmup: int) -> tuple[int, ...]:
    """Gaps of ``floor(window)`` steps, where every computed step adds ``growth`` (Spectrum, arXiv 2603.01623)."""
    _check_at_least(1, steps=steps, warmup=warmup)
    _check_at_least(1, float, window=window)
    _check_at_least(0, float, growth=growth)
    computed, step = [*range(min(warmup, steps))], warmup - 1 + math.floor(window)
    while step < steps:
        computed.append(step)
        window += growth
        step += math.floor(window)
    return tuple(computed)


def shrinking(steps: int, warmup: int, largest: float, smallest: float, multiple: int = 1) -> tuple[int, ...]:
    """Gaps that fall linearly over the run (ProfilingDiT, arXiv 2504.03140).

    Steps 0..warmup are computed. After a computed step s the gap is
    ``largest - (largest - smallest) * (s - warmup) / (steps - warmup)``, rounded down to a multiple of ``multiple``.
    The formula is the paper's, the rounding is ours: no rounding to whole steps yields the released list
    6 18 26 32 38 42 46 48 of 50; ``largest=12, smallest=3, multiple=2`` does.
    """
    _check_at_least(1, steps=steps, multiple=multiple)
    _check_at_least(0, warmup=warmup)
    _check_at_least(multiple, float, smallest=smallest)
    _check_at_least(smallest, float, largest=largest)
    computed, step = [*range(min(warmup, steps))], warmup
    while step < steps:
        computed.append(step)
        gap = largest - (largest - smallest) * (step - warmup) / (steps - warmup)
        step += multiple * math.floor(gap / multiple)
    return tuple(computed)


def quad_center(steps: int, interval: int, center: int, power: float) -> tuple[int, ...]:
    """``ceil(steps / interval)`` steps, dense around ``center`` (DeepCache, arXiv 2312.00858).

    As published: the points are equally spaced between the ``power``-th roots of both ends (the root of the negative
    end is complex), raised to ``power`` again, and the real parts cut to whole steps. While steps coincide, ``power``
    falls by 0.02. numpy's complex power is used because the cut sees its last digit.
    """
    _check_at_least(1, steps=steps, interval=interval)
    if type(center) is not int or not 0 <= center < steps:
        raise ValueError(f"center={center!r}; allowed: a step index, 0 to {steps - 1}. Choose one inside the run.")
    _check_at_least(1, float, power=power)
    if interval == 1:
        return tuple(range(steps))
    count, exponent = math.ceil(steps / interval), float(power)
    while exponent > 1:
        first, last = (np.complex128(end) ** (1 / exponent) for end in (-center, steps - center))
        points = (np.linspace(first, last, count + 1) ** exponent).real.astype(int)
        computed = (0, *(int(point) + center for point in np.unique(points)[1:-1]))
        if len(computed) == count:
            return computed
        exponent -= 0.02
    raise ValueError(
        f"power={power!r}, center={center} give no {count} distinct steps of {steps}; allowed: a power above 1 and a "
        "center that do. Take a larger interval, another center or a larger power."
    )


def minimax(costs: Table, budget: int) -> tuple[int, ...]:
    """The schedule whose worst gaps cost least (LeMiCa, arXiv 2511.00090).

    The first and the last step are computed. Among all schedules the one is taken whose list of gap costs, sorted from
    the largest down, comes first in lexicographic order; among equals the one that computes earlier. Exact, because
    adding one gap to two sorted lists keeps their order.

    Args:
        costs: ``[T][G + 1]``, cost of each gap; no gap is longer than G.
        budget: number of computed steps.
    """
    steps, widest = _shape("costs", costs)
    _check_budget(budget, 1 + math.ceil((steps - 1) / widest), steps, f"{steps} steps and gaps up to {widest}")
    return _cheapest(
        costs, budget - 1, range(1, widest + 1), steps - 1, (), lambda worst, cost: tuple(sorted((*worst, cost))[::-1])
    )


def min_sum(costs: Table, budget: int, shortest: int, longest: int) -> tuple[int, ...]:
    """The schedule whose gap costs sum to the least (CacheQuant's DPS, arXiv 2503.01323).

    The run is split into ``budget`` groups of neighbouring steps, of which the first is computed; the last step need
    not be. Among equals the one that computes earlier is taken. The paper sets, for an interval N,
    ``budget = ceil(T / N)``, ``shortest = ceil(N / 2)`` and ``longest = 2 * N``.

    Args:
        costs: ``[T][G + 1]``, cost of each group by its length.
        budget: number of computed steps.
        shortest, longest: limits of the number of steps in a group, at most G.
    """
    steps, widest = _shape("costs", costs)
    _check_at_least(1, shortest=shortest)
    _check_at_least(shortest, longest=longest)
    if min(longest, steps) > widest:
        raise ValueError(f"longest={longest}; allowed: up to {widest}, the largest gap measured. Measure larger gaps.")
    lengths = f"{steps} steps in groups of {shortest} to {longest}"
    _check_budget(budget, math.ceil(steps / longest), steps // shortest, lengths)
    return _cheapest(costs, budget, range(shortest, longest + 1), steps, 0.0, operator.add)[:-1]


def scan(errors: Table, threshold: float) -> tuple[int, ...]:
    """Compute as soon as the error since the last computed step reaches ``threshold`` (ERTACache, arXiv 2508.21091).

    Ours: at most G steps in a row are reused, as no larger gap was measured (errors ``[T][G + 1]``).
    """
    steps, widest = _shape("errors", errors)
    _check_at_least(0, float, threshold=threshold)
    computed = [0]
    for step in range(1, steps):
        row, gap = errors[computed[-1]], step - computed[-1]
        if gap > widest or row[gap] >= threshold:
            computed.append(step)
    return tuple(computed)


def furthest(errors: Table, threshold: float) -> tuple[int, ...]:
    """From each computed step, reuse as far as the error is below ``threshold`` (SmoothCache, arXiv 2411.10510).

    The largest gap decides, even where a smaller one has a larger error. As in the released code the last step is
    always computed; that code compares with ``<=``, the paper and this function with ``<``. At most G steps in a row
    are reused (errors ``[T][G + 1]``; the paper: G = 3).
    """
    steps, widest = _shape("errors", errors)
    _check_at_least(0, float, threshold=threshold)
    computed, step = [], 0
    while step < steps - 1:
        computed.append(step)
        gaps = range(1, min(widest, steps - 1 - step) + 1)
        step += 1 + max((gap for gap in gaps if errors[step][gap] < threshold), default=0)
    return (*computed, steps - 1)


def edge_costs(errors: Table, amplification: Row | None = None) -> list[list[float]]:
    """Costs ``[T][G + 2]`` from errors ``[T][G + 1]``.

    ``costs[i][g] = sum over q = 1..g-1 of errors[i][q] * amplification[i + q]``: reuse at G steps in a row needs
    errors up to G and makes a gap of G + 1.

    Args:
        errors: relative L1 by step and distance.
        amplification: ``[T]``, what an error of 1 at each step does to the final sample; None weighs all steps alike.
    """
    steps, widest = _shape("errors", errors)
    weights = [1.0] * steps if amplification is None else list(amplification)
    _check_length("amplification", weights, steps)
    weights += [0.0] * widest  # nothing is reused after the last step
    return [
        [0.0, *accumulate((row[q] * weights[i + q] for q in range(1, widest + 1)), initial=0.0)]
        for i, row in enumerate(errors)
    ]


def resample(errors: Table, sigmas: Row, new_sigmas: Row) -> list[list[float]]:
    """An error table for another list of noise levels: more or fewer steps, shifted, or only the end of the schedule.

    Every new step gets a fractional position among the calibrated ones by its noise level; the error between two
    positions is interpolated bilinearly in both, and linearly in their distance where they share a calibrated step
    (distance 0 is error 0). Distances beyond the largest measured one, G calibrated steps, extend in proportion to it:
    a guess, mostly too high, as errors saturate. The result is ``[T'][G + 1]``, as many steps in a row as before, and
    equal to ``errors`` where the schedules agree.

    Args:
        errors: ``[T][G + 1]``, relative L1.
        sigmas: ``[T]`` noise levels in [0, 1] of the calibrated steps, not increasing.
        new_sigmas: ``[T']`` noise levels of the wanted steps, not increasing.
    """
    steps, widest = _shape("errors", errors)
    _check_at_least(2, calibrated_steps=steps)
    _check_length("sigmas", sigmas, steps)
    if list(sigmas) == list(new_sigmas):
        return [list(row) for row in errors]
    at = _positions(sigmas, new_sigmas)
    reach = [[at[min(i + g, len(at) - 1)] for g in range(widest + 1)] for i in range(len(at))]
    return [[_between(errors, start, end) for end in ends] for start, ends in zip(at, reach, strict=True)]


def resample_amplification(amplification: Row, sigmas: Row, new_sigmas: Row) -> list[float]:
    """The ``amplification`` ``[T]`` of ``edge_costs`` for another list of noise levels; ``[T']``, as in ``resample``.

    What a step does to the final sample is proportional to the part of the schedule that it stands for: from its own
    position to that of the next step, the last one to the end of the run. So the sum over any stretch stays: with
    half the steps each counts twice.
    """
    _check_length("sigmas", sigmas, len(amplification))
    if list(sigmas) == list(new_sigmas):
        return list(amplification)
    known = np.concatenate([[-amplification[0], 0.0], np.cumsum(amplification)])  # sum before step -1, 0, ... T
    at = [*_positions(sigmas, new_sigmas), len(sigmas)]
    return [float(share) for share in np.diff(np.interp(at, np.arange(-1, len(sigmas) + 1), known))]


def _positions(sigmas: Row, new_sigmas: Row) -> list[float]:
    """Fractional index of each new noise level among ``sigmas``; sigma 0 is the end of the run, index T."""
    for name, levels in (("sigmas", sigmas), ("new_sigmas", new_sigmas)):
        if not levels or not 1 >= levels[0] > 0 <= levels[-1] or any(b > a for a, b in pairwise(levels)):
            raise ValueError(
                f"{name}={list(levels)}; allowed: noise levels in [0, 1], the first above 0, that do not increase. "
                "Pass one per step, in sampling order."
            )
    index = [i for i in range(len(sigmas)) if i == 0 or sigmas[i] < sigmas[i - 1]]  # of equal levels the first
    known = [float(sigmas[i]) for i in index]
    if known[-1] > 0:
        index, known = [*index, len(sigmas)], [*known, 0.0]
    index, known = [-1, *index], [2 * known[0] - known[1], *known]  # one step of the first slope above the schedule
    if new_sigmas[0] > known[0]:
        raise ValueError(
            f"new_sigmas start at {new_sigmas[0]:g}; allowed: up to {known[0]:g}, one step above the calibrated ones. "
            "Calibrate on a schedule that starts there."
        )
    return [float(p) for p in np.interp([-level for level in new_sigmas], [-level for level in known], index)]


def _between(errors: Table, start: float, end: float) -> float:
    """Error between two fractional positions, ``start <= end``; positions off the table continue its outermost cell."""

    def error(i: int, j: int) -> float:
        row, widest = errors[i], len(errors[i]) - 1
        return row[j - i] if j - i <= widest else row[widest] * (j - i) / widest

    if start == end:
        return 0.0
    i, j = (min(max(math.floor(at), 0), len(errors) - 2) for at in (start, end))
    u, v = start - i, end - j
    if i == j:
        return (v - u) * error(i, i + 1)
    first = (1 - v) * error(i, j) + v * error(i, j + 1)
    second = (1 - v) * error(i + 1, j) + v * error(i + 1, j + 1)
    return max((1 - u) * first + u * second, 0.0)


def _cheapest(
    costs: Table, gaps: int, sizes: range, end: int, nothing: Any, add: Callable[..., Any]
) -> tuple[int, ...]:
    """Path from step 0 to ``end`` in ``gaps`` gaps with the least (cost, path), by dynamic programming over gaps."""
    best: dict[int, tuple[Any, tuple[int, ...]]] = {0: (nothing, (0,))}
    for _ in range(gaps):
        reached: dict[int, tuple[Any, tuple[int, ...]]] = {}
        for i, (cost, path) in best.items():
            for gap in sizes:
                if i + gap <= end and costs[i][gap] < math.inf:
                    candidate = add(cost, costs[i][gap]), (*path, i + gap)
                    reached[i + gap] = min(candidate, reached.get(i + gap, candidate))
        best = reached
    if end not in best:
        raise ValueError(f"no schedule of {gaps} gaps avoids infinite costs; allowed: a budget that does. Raise it.")
    return best[end][1]


def _shape(name: str, table: Table) -> tuple[int, int]:
    """Steps and largest gap of a table."""
    lengths = sorted({len(row) for row in table})
    if len(lengths) != 1 or lengths[0] < 2:
        raise ValueError(f"{name} has rows of lengths {lengths}; allowed: one, 2 or more. Repeat the last value.")
    wrong = [v for row in table for v in row if not v >= 0 or (v == math.inf and name == "errors")]
    if wrong:
        raise ValueError(f"{name} holds {wrong[0]}; allowed: numbers, 0 or more. Calibrate again without its run.")
    return len(table), lengths[0] - 1


def _check_budget(budget: int, lowest: int, highest: int, what: str) -> None:
    if type(budget) is not int or not lowest <= budget <= highest:
        allowed = f"{lowest} to {highest}" if lowest <= highest else "none"
        raise ValueError(f"budget={budget!r}; allowed for {what}: {allowed}. Choose such a budget, or other gaps.")


def _check_length(name: str, values: Row, steps: int) -> None:
    if len(values) != steps:
        raise ValueError(f"{name} has {len(values)} entries; allowed: {steps}, one per calibrated step. Pass its own.")


def _check_at_least(lowest: float, kind: type = int, **options: float) -> None:
    for name, value in options.items():
        number = type(value) is int or (kind is float and isinstance(value, float))
        if not number or not lowest <= value < math.inf:
            what = "an integer" if kind is int else "a number"
            raise ValueError(f"{name}={value!r}; allowed: {what}, {lowest:g} or more. Choose such a number.")
