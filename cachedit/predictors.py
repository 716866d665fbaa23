"""Forecasters: from the times of the computed snapshots to one weight per snapshot.

A skipped value is forecast as ``sum_k weights[k] * snapshot[k]`` over *computed* snapshots; a forecast never enters the
history. Every function takes

* ``times``: when the snapshots were computed, oldest first, at least one, no two equal. Step indices, or noise levels,
  which fall; gaps may be uneven.
* ``now``: the time of the forecast, past the newest snapshot in the same direction and unit.

and returns as many floats, oldest first, that sum to 1, so a constant is kept. While the history is too short for what
is asked, a lower order is used. Below, y0, y1, y2 are the newest snapshots (y0 the newest), u = now - time of y0.
``hermite`` and ``chebyshev`` depend on the unit of time, the others do not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def plain(times: Sequence[float], now: float) -> list[float]:
    """The newest snapshot as it is."""
    return _newest(times)


def damped_line(times: Sequence[float], now: float, gain: float) -> list[float]:
    """FasterCache's line ``y0 + gain * (y0 - y1)`` (arXiv 2410.19355), however far ``now`` is.

    Args:
        times: see the module.
        now: see the module; not read.
        gain: 0 is plain reuse; the paper raises it from 0 to 1 over a run, diffusers keeps 0.5.
    """
    weights = _newest(times)
    if len(times) > 1:
        weights[-1] += gain
        weights[-2] -= gain
    return weights


def lagrange(times: Sequence[float], now: float, order: int) -> list[float]:
    """The polynomial through the newest ``order + 1`` snapshots, at their true times: exact up to that degree.

    Order 1 is the line. Several published forecasters are these same weights: AB-Cache (arXiv 2504.10540) with k
    snapshots is order k - 1, and on a uniform grid one step ahead gives its binomials 2, -1 or 3, -3, 1; HyCa's
    (arXiv 2510.04188) two-step Adams-Bashforth is order 1, and its midpoint (RK2) and trapezoidal (AM2) steps on the
    quadratic interpolant are order 2. AB-Cache as described pushes forecasts into its history, which diverges from
    gaps of 3 on; over computed snapshots it is stable. The price of exactness is noise: the absolute weights of order 1
    sum to 2 u + 1 on a unit grid, those of order 2 to 7, 17, 31 at u = 1, 2, 3.

    Args:
        times: see the module.
        now: see the module.
        order: degree of the polynomial, 0 or more.
    """
    first = max(0, len(times) - order - 1)
    nodes = times[first:]
    return [0.0] * first + [
        math.prod(((now - other) / (node - other) for j, other in enumerate(nodes) if j != k), start=1.0)
        for k, node in enumerate(nodes)
    ]


def taylor(times: Sequence[float], now: float, order: int) -> list[float]:
    """TaylorSeer (arXiv 2503.06923): ``sum_m D_m u^m / m!`` with differences in the place of derivatives.

    Exact to degree 1 at every order >= 1, since a backward difference is the derivative between two snapshots and not
    at the newest: order 2 is a damped quadratic, quieter than ``lagrange``'s.

    Args:
        times: see the module.
        now: see the module.
        order: highest difference, 0 or more.
    """
    u = now - times[-1]
    return _combine([u**m / math.factorial(m) for m in range(order + 1)], _differences(times, order))


def hermite(times: Sequence[float], now: float, order: int, scale: float) -> list[float]:
    """HiCache (arXiv 2508.16984): TaylorSeer's differences with ``scale^m H_m(scale * u)`` in the place of ``u^m``.

    H_m are the physicists' Hermite polynomials. They are not homogeneous, so the unit of time matters: ``times`` and
    ``now`` must be step indices. Noise levels would give other weights.

    Args:
        times: see the module; step indices.
        now: see the module; a step index.
        order: highest difference, 0 or more.
        scale: 0.5 (HiCache) halves the slope and is exact for constants only; sqrt(0.5) (FreqCa, rounded to 0.71)
            is exact for lines.
    """
    u = now - times[-1]
    coefficients = [1.0]
    before = 0.0
    for m in range(order):  # H_{m+1}(x) = 2 x H_m(x) - 2 m H_{m-1}(x), with scale^m / m! multiplied in
        following = 2 * scale**2 * (u * coefficients[-1] - before) / (m + 1)
        before = coefficients[-1]
        coefficients.append(following)
    return _combine(coefficients, _differences(times, order))


def bdf2(times: Sequence[float], now: float) -> list[float]:
    """HyCa's BDF2 (arXiv 2510.04188): ``y0 + u * slope``, slope ``(3 y0 - 4 y1 + y2) / 2`` per gap. Exact for lines.

    The paper's formulas were not seen; as an explicit step this is our reading. On uneven gaps the slope is that of the
    quadratic through the three newest snapshots.
    """
    return _combine([1.0, now - times[-1]], [_newest(times), _tangent(times)])


def heun(times: Sequence[float], now: float) -> list[float]:
    """FoCa (arXiv 2508.16211): a BDF2 forecast, calibrated by Heun's rule. Exact for lines.

    The paper, by second-hand accounts, with h the step and d a slope: the forecast is ``4/3 y0 - 1/3 y1 + 2/3 h d0``,
    the result ``y0 + h / 2 * (d_full + d_forecast)``. Which differences stand for the slopes is not settled there, and
    implementations feed forecasts back into the history. Ours: one step from the newest computed snapshot to ``now``;
    the forecast's coefficients for uneven gaps, with the slope of ``bdf2``; ``d_full`` is the slope from y1 to y0,
    ``d_forecast`` that from y0 to the forecast. The result is the line plus a half (u small) to a quarter (u large) of
    what ``bdf2`` adds to the line.
    """
    if len(times) < 2:
        return plain(times, now)
    u = now - times[-1]
    ratio = u / (times[-1] - times[-2])
    full, tangent = _secant(times, len(times) - 1), _tangent(times)
    forecast = _combine([ratio / (1 + 2 * ratio), (1 + ratio) / (1 + 2 * ratio)], [full, tangent])
    return _combine([1.0, u / 2, u / 2], [_newest(times), full, forecast])


def mean_velocity(times: Sequence[float], now: float, span: int) -> list[float]:
    """MeanCache (arXiv 2601.19961): a line damped by the mean velocity of the latest part of the trajectory.

    The snapshots are velocities, the times noise levels. The paper corrects the last velocity by ``-J * (length of this
    step)``, where J compares the velocity at the start of the span with the mean velocity since, read off the latents.
    Under Euler that mean is a weighted sum of the velocities travelled with.

    Ours: only computed velocities are used, each held until the next computed one; the span counts computed snapshots;
    the correction reaches from the newest of them to ``now`` at once, where the paper repeats it on its own forecasts.
    On a uniform grid with all steps computed both agree: for a velocity that changes linearly the forecast adds
    (span - 1) / (2 span) of one step's change, never all of it.

    Args:
        times: see the module.
        now: see the module.
        span: computed snapshots from the start of the mean to now, 1 or more; 1 is plain reuse.
    """
    first = max(0, len(times) - span)
    elapsed = now - times[first]
    share = (now - times[-1]) / elapsed
    held_until = [*times[first + 1 :], now]
    weights = [0.0] * first
    weights += [share * (end - start) / elapsed for start, end in zip(times[first:], held_until, strict=True)]
    weights[first] -= share
    weights[-1] += 1.0
    return weights


def chebyshev(times: Sequence[float], now: float, degree: int, ridge: float, span: float, mix: float) -> list[float]:
    """Spectrum (arXiv 2603.01623): a ridge fit of Chebyshev polynomials to all snapshots, mixed with the line.

    Ours: the fit is to what the snapshots differ by from the newest, which is added back. The published fit penalises
    the constant with the rest, so its weights sum to 0.95 one step ahead and 0.65 thirteen ahead: harmless before a
    normalisation, where the paper applies it, but it shrinks a residual. The degree is at most one less than there are
    snapshots.

    Args:
        times: see the module.
        now: see the module.
        degree: of the highest polynomial (paper: 4).
        ridge: penalty on the squared coefficients (paper: 0.1); 0 is least squares.
        span: time of the whole run, from 0, that is mapped onto [-1, 1] (paper: 50 steps).
        mix: share of the fit, the rest is the line (paper: 0.5 to 1).
    """
    degree = min(degree, len(times) - 1)
    rows = [_chebyshev_row(2 * time / span - 1, degree) for time in times]
    normal = [
        [sum(row[i] * row[j] for row in rows) + (ridge if i == j else 0.0) for j in range(degree + 1)]
        for i in range(degree + 1)
    ]
    solution = _solve(normal, _chebyshev_row(2 * now / span - 1, degree))
    fit = [sum(value * factor for value, factor in zip(row, solution, strict=True)) for row in rows]
    fit[-1] += 1.0 - sum(fit)
    return _combine([mix, 1.0 - mix], [fit, lagrange(times, now, 1)])


def _newest(times: Sequence[float]) -> list[float]:
    return [0.0] * (len(times) - 1) + [1.0]


def _combine(factors: Sequence[float], terms: Sequence[Sequence[float]]) -> list[float]:
    """``sum_m factors[m] * terms[m]``; factors without a term are left out."""
    columns = zip(*terms, strict=True)
    return [sum(factor * value for factor, value in zip(factors, column, strict=False)) for column in columns]


def _differences(times: Sequence[float], order: int) -> list[list[float]]:
    """TaylorSeer's D_0 .. D_order at the newest snapshot, each as weights; fewer while the history is short.

    ``D_{m+1} = (D_m - D_m at the previous snapshot) / gap``. D_m reads m + 1 snapshots, so starting at the newest
    ``order + 1`` gives what the reference gets by carrying the previous list of differences along from the beginning.
    """
    previous: list[list[float]] = []
    for k in range(max(0, len(times) - order - 1), len(times)):
        current = [[1.0 if j == k else 0.0 for j in range(len(times))]]
        for old in previous:
            gap = times[k] - times[k - 1]
            current.append([(a - b) / gap for a, b in zip(current[-1], old, strict=True)])
        previous = current
    return previous


def _secant(times: Sequence[float], k: int) -> list[float]:
    """Slope between snapshots k - 1 and k, as weights; k at least 1."""
    slope = [0.0] * len(times)
    slope[k] = 1.0 / (times[k] - times[k - 1])
    slope[k - 1] = -slope[k]
    return slope


def _tangent(times: Sequence[float]) -> list[float]:
    """Slope at the newest snapshot of the quadratic through the newest three, as weights; with two, of their line."""
    if len(times) == 1:
        return [0.0]
    newest = _secant(times, len(times) - 1)
    if len(times) == 2:
        return newest
    share = (times[-1] - times[-2]) / (times[-1] - times[-3])
    return _combine([1.0 + share, -share], [newest, _secant(times, len(times) - 2)])


def _chebyshev_row(x: float, degree: int) -> list[float]:
    """T_0(x) .. T_degree(x)."""
    row = [1.0, x]
    while len(row) <= degree:
        row.append(2 * x * row[-1] - row[-2])
    return row[: degree + 1]


def _solve(matrix: Sequence[Sequence[float]], vector: Sequence[float]) -> list[float]:
    """Gaussian elimination without pivoting, which a positive definite ``matrix`` does not need."""
    rows = [[*row, value] for row, value in zip(matrix, vector, strict=True)]
    for k, pivot in enumerate(rows):
        for row in rows[k + 1 :]:
            factor = row[k] / pivot[k]
            row[k:] = [a - factor * b for a, b in zip(row[k:], pivot[k:], strict=True)]
    solution: list[float] = []
    for k, row in reversed(list(enumerate(rows))):
        known = sum(a * b for a, b in zip(row[k + 1 : -1], solution, strict=True))
        solution.insert(0, (row[-1] - known) / row[k])
    return solution
