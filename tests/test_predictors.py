"""Forecast weights: numbers that can be checked by hand, and the published facts about each forecaster."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from cachedit.predictors import bdf2, chebyshev, damped_line, hermite, heun, lagrange, mean_velocity, plain, taylor

Predictor = Callable[[Sequence[float], float], list[float]]

HE = math.sqrt(0.5)  # the scale at which HiCache's basis is the probabilists' Hermite polynomials

# Each predictor with the highest polynomial degree it reproduces on uneven gaps.
DEGREES: dict[str, tuple[Predictor, int]] = {
    "plain": (plain, 0),
    "damped line": (partial(damped_line, gain=0.5), 0),
    "lagrange 0": (partial(lagrange, order=0), 0),
    "lagrange 1": (partial(lagrange, order=1), 1),
    "lagrange 2": (partial(lagrange, order=2), 2),
    "lagrange 3": (partial(lagrange, order=3), 3),
    "lagrange 4": (partial(lagrange, order=4), 4),
    "taylor 0": (partial(taylor, order=0), 0),
    "taylor 1": (partial(taylor, order=1), 1),
    "taylor 2": (partial(taylor, order=2), 1),
    "taylor 3": (partial(taylor, order=3), 1),
    "hermite 1 at 0.5": (partial(hermite, order=1, scale=0.5), 0),
    "hermite 2 at 0.5": (partial(hermite, order=2, scale=0.5), 0),
    "hermite 1 at sqrt 0.5": (partial(hermite, order=1, scale=HE), 1),
    "hermite 2 at sqrt 0.5": (partial(hermite, order=2, scale=HE), 1),
    "hermite 3 at sqrt 0.5": (partial(hermite, order=3, scale=HE), 1),
    "bdf2": (bdf2, 1),
    "heun": (heun, 1),
    "mean velocity 1": (partial(mean_velocity, span=1), 0),
    "mean velocity 3": (partial(mean_velocity, span=3), 0),
    "chebyshev, ridge": (partial(chebyshev, degree=4, ridge=0.1, span=50, mix=1.0), 0),
    "chebyshev, ridge, half line": (partial(chebyshev, degree=4, ridge=0.1, span=50, mix=0.5), 0),
    "chebyshev 1, least squares": (partial(chebyshev, degree=1, ridge=0.0, span=50, mix=1.0), 1),
    "chebyshev 2, least squares": (partial(chebyshev, degree=2, ridge=0.0, span=50, mix=1.0), 2),
    "chebyshev, only the line": (partial(chebyshev, degree=4, ridge=0.1, span=50, mix=0.0), 1),
}
SCALE_FREE = [name for name in DEGREES if not name.startswith(("hermite", "chebyshev"))]


def forecast(weights: Sequence[float], values: Sequence[float]) -> float:
    return sum(weight * value for weight, value in zip(weights, values, strict=True))


def noise_gain(weights: Sequence[float]) -> float:
    return sum(abs(weight) for weight in weights)


def random_history(rng: random.Random, length: int) -> tuple[list[float], float]:
    """Uneven integer steps, and a step to forecast."""
    times = [float(rng.randrange(4))]
    for _ in range(length - 1):
        times.append(times[-1] + rng.randint(1, 6))
    return times, times[-1] + rng.randint(1, 6)


@pytest.mark.parametrize("name", DEGREES)
def test_weights_sum_to_one_at_every_history_length(name: str) -> None:
    predictor = DEGREES[name][0]
    rng = random.Random(1)
    for length in range(1, 7):
        for _ in range(30):
            times, now = random_history(rng, length)
            weights = predictor(times, now)
            assert len(weights) == length
            assert sum(weights) == pytest.approx(1.0, abs=1e-12 * noise_gain(weights))


@pytest.mark.parametrize("name", DEGREES)
def test_degree_on_uneven_gaps_is_exactly_the_stated_one(name: str) -> None:
    predictor, degree = DEGREES[name]
    times, now = [0.0, 1.0, 4.0, 6.0, 11.0, 13.0], 16.0
    weights = predictor(times, now)
    for power in range(degree + 1):
        assert forecast(weights, [(time - 8.0) ** power for time in times]) == pytest.approx(8.0**power, rel=1e-9)
    power = degree + 1
    assert forecast(weights, [(time - 8.0) ** power for time in times]) != pytest.approx(8.0**power, rel=1e-3)


@pytest.mark.parametrize("name", DEGREES)
def test_one_snapshot_is_reused_as_it_is(name: str) -> None:
    assert DEGREES[name][0]([7.0], 9.0) == pytest.approx([1.0])


@pytest.mark.parametrize(
    "predictor",
    [
        partial(lagrange, order=4),
        partial(taylor, order=4),
        partial(hermite, order=1, scale=HE),
        bdf2,
        heun,
        partial(chebyshev, degree=4, ridge=0.0, span=50, mix=1.0),
        partial(damped_line, gain=0.5),
    ],
)
def test_two_snapshots_give_the_line(predictor: Predictor) -> None:
    assert predictor([3.0, 7.0], 9.0) == pytest.approx([-0.5, 1.5])


@pytest.mark.parametrize(
    ("predictor", "wanted"),
    [
        (plain, 9.0),
        (partial(damped_line, gain=0.5), 9 + 0.5 * 8),
        (partial(lagrange, order=1), 9 + 2 * 4),
        (partial(lagrange, order=2), 25.0),
        (partial(taylor, order=1), 9 + 2 * 4),
        (partial(taylor, order=2), 9 + 2 * 4 + 2 * 1.5),  # D_1 = 4, before that 1, D_2 = (4 - 1) / 2
        (partial(hermite, order=1, scale=0.5), 9 + 1 * 4),
        (partial(hermite, order=2, scale=HE), 9 + 2 * 4 + 1.5 * 1.5),  # (u^2 - 1) / 2 = 1.5
        (bdf2, 9 + 2 * 6),  # the slope of t^2 at 3
        (heun, 9 + 4 + 16 / 3),  # slopes 4 and 6, the forecast's (4 + 2 * 6) / 3
        (partial(mean_velocity, span=2), 9 + (5 - 1) / 4 * 2),  # mean (1 * 2 + 9 * 2) / 4 = 5
        (partial(mean_velocity, span=3), 9 + (4 - 0) / 5 * 2),  # mean (0 * 1 + 1 * 2 + 9 * 2) / 5 = 4
    ],
)
def test_squares_at_0_1_3_forecast_to_5(predictor: Predictor, wanted: float) -> None:
    assert forecast(predictor([0.0, 1.0, 3.0], 5.0), [0.0, 1.0, 9.0]) == pytest.approx(wanted)


@pytest.mark.parametrize("gap", [1.0, 5.0])
@pytest.mark.parametrize("theta", [0.2, 0.8, 1.0, 2.0])
def test_weights_on_a_uniform_grid(gap: float, theta: float) -> None:
    times, now = [0.0, gap, 2 * gap], (2 + theta) * gap
    square = theta**2
    assert lagrange(times, now, 1) == pytest.approx([0, -theta, 1 + theta])
    assert lagrange(times, now, 2) == pytest.approx(
        [0.5 * theta + 0.5 * square, -2 * theta - square, 1 + 1.5 * theta + 0.5 * square]
    )
    assert taylor(times, now, 1) == pytest.approx([0, -theta, 1 + theta])
    assert taylor(times, now, 2) == pytest.approx([square / 2, -theta - square, 1 + theta + square / 2])
    assert bdf2(times, now) == pytest.approx([0.5 * theta, -2 * theta, 1 + 1.5 * theta])
    assert hermite(times, now, 1, 0.5) == pytest.approx([0, -theta / 2, 1 + theta / 2])
    assert hermite(times, now, 1, HE) == pytest.approx([0, -theta, 1 + theta])


def test_hermite_by_hand() -> None:
    # Three steps ahead at gap 5: D_1 = (y0 - y1) / 5, D_2 = (y0 - 2 y1 + y2) / 25, their factors 3 and (9 - 1) / 2.
    assert hermite([0, 5, 10], 13, 2, HE) == pytest.approx([0.16, -0.92, 1.76])
    # At 0.5 the factors are 3 / 2 and 0.25 * (4 * 1.5^2 - 2) / 2 = 0.875.
    assert hermite([0, 5, 10], 13, 2, 0.5) == pytest.approx([0.035, -0.37, 1.335])
    # At unit gaps, two steps ahead: He_2(2) / 2 = 1.5 and He_3(2) / 3! = (8 - 6) / 6.
    third = 1 / 3
    assert hermite([0, 1, 2, 3], 5, 3, HE) == pytest.approx(
        [-third, 1.5 + 3 * third, -2 - 3 - 3 * third, 1 + 2 + 1.5 + third]
    )


def test_hermite_depends_on_the_unit_of_time() -> None:
    steps = hermite([0, 5, 10], 13, 2, HE)
    assert hermite([0, 0.1, 0.2], 0.26, 2, HE) != pytest.approx(steps, abs=0.1)


def test_taylor_on_uneven_gaps_by_hand() -> None:
    # D_1 = (y0 - y1) / 2, before that (y1 - y2) / 5, D_2 = their difference / 2; factors 3 and 4.5.
    assert taylor([-7, -2, 0], 3, 2) == pytest.approx([0.45, -3.075, 3.625])


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_taylor_is_the_recursion_that_carries_only_the_previous_differences(order: int) -> None:
    rng = random.Random(order)
    for length in range(1, 8):
        times, now = random_history(rng, length)
        values = [rng.gauss(0, 1) for _ in times]
        factors: dict[int, float] = {}
        for k in range(length):  # as the reference runs: one list of factors, updated at every computed step
            updated = {0: values[k]}
            for m in range(order):
                if m in factors:
                    updated[m + 1] = (updated[m] - factors[m]) / (times[k] - times[k - 1])
            factors = updated
        wanted = sum(factor * (now - times[-1]) ** m / math.factorial(m) for m, factor in factors.items())
        assert forecast(taylor(times, now, order), values) == pytest.approx(wanted, rel=1e-9, abs=1e-9)


def test_snapshots_beyond_the_order_have_no_weight() -> None:
    cases: list[tuple[Predictor, int]] = [
        (partial(lagrange, order=2), 3),
        (partial(taylor, order=2), 3),
        (partial(hermite, order=2, scale=0.5), 3),
        (bdf2, 3),
        (heun, 3),
        (partial(mean_velocity, span=2), 2),
        (partial(damped_line, gain=0.5), 2),
        (plain, 1),
    ]
    for predictor, used in cases:
        weights = predictor([0.0, 1.0, 4.0, 6.0, 11.0], 13.0)
        assert weights[:-used] == [0.0] * (5 - used)
        assert all(weights[-used:])


@pytest.mark.parametrize(("k", "binomials"), [(2, [-1, 2]), (3, [1, -3, 3]), (5, [1, -5, 10, -10, 5])])
def test_lagrange_one_grid_step_ahead_is_adams_bashforth(k: int, binomials: list[int]) -> None:
    assert lagrange(list(range(k)), k, k - 1) == pytest.approx(binomials)


@pytest.mark.parametrize(
    ("k", "gains"), [(2, [3, 5, 7, 9, 11]), (3, [7, 17, 31, 49, 71]), (5, [31, 129, 351, 769, 1471])]
)
def test_noise_gain_of_adams_bashforth_grows_with_the_gap(k: int, gains: list[int]) -> None:
    assert [noise_gain(lagrange(list(range(k)), k - 1 + u, k - 1)) for u in range(1, 6)] == pytest.approx(gains)


def test_second_order_taylor_is_quieter_than_lagrange() -> None:
    assert noise_gain(taylor([0, 5, 10], 14, 2)) == pytest.approx(3.88)
    assert noise_gain(lagrange([0, 5, 10], 14, 2)) == pytest.approx(5.48)


@pytest.mark.parametrize("gain", [0.0, 0.5, 1.0])
def test_damped_line_does_not_look_at_the_time(gain: float) -> None:
    for now in (4.0, 9.0):
        assert damped_line([0.0, 1.0, 3.0], now, gain) == pytest.approx([0.0, -gain, 1 + gain])


def test_heun_is_the_published_forecast_and_correction_where_the_step_is_the_gap() -> None:
    y2, y1, y0 = 2.0, -1.0, 5.0
    slope, full = (3 * y0 - 4 * y1 + y2) / 2, y0 - y1
    predicted = 4 / 3 * y0 - 1 / 3 * y1 + 2 / 3 * slope
    corrected = y0 + (full + (predicted - y0)) / 2
    assert forecast(heun([0, 1, 2], 3), [y2, y1, y0]) == pytest.approx(corrected)
    assert heun([0, 1, 2], 3) == pytest.approx([1 / 6, -4 / 3, 13 / 6])


@pytest.mark.parametrize(("u", "share"), [(1e-6, 1 / 2), (1, 1 / 3), (1e6, 1 / 4)])
def test_heun_adds_to_the_line_a_half_to_a_quarter_of_what_bdf2_adds(u: float, share: float) -> None:
    times, now = [0.0, 1.0, 2.0], 2.0 + u
    line, curved, corrected = (
        weights[0] / u for weights in (lagrange(times, now, 1), bdf2(times, now), heun(times, now))
    )
    assert line == 0
    assert corrected / curved == pytest.approx(share, rel=1e-5)


@pytest.mark.parametrize(("span", "share"), [(1, 0), (2, 1 / 4), (3, 1 / 3), (4, 3 / 8), (5, 2 / 5), (6, 5 / 12)])
@pytest.mark.parametrize("step", [1.0, -0.02])
def test_mean_velocity_adds_a_share_of_the_slope(span: int, share: float, step: float) -> None:
    times = [1 + k * step for k in range(8)]
    weights = mean_velocity(times, 1 + 8 * step, span)
    assert forecast(weights, list(range(8))) == pytest.approx(7 + share)


@pytest.mark.parametrize("span", [1, 2, 3, 6])
def test_mean_velocity_is_the_published_rule_on_euler_latents(span: int) -> None:
    rng = random.Random(span)
    sigmas = [1 - k / 20 for k in range(12)]
    velocities = [rng.gauss(0, 1) for _ in range(10)]
    latents = [0.3]
    for k, velocity in enumerate(velocities):
        latents.append(latents[-1] + velocity * (sigmas[k + 1] - sigmas[k]))
    i = len(velocities)
    length = sigmas[i] - sigmas[i - span]
    slope = (velocities[i - span] - (latents[i] - latents[i - span]) / length) / length
    wanted = velocities[i - 1] - slope * (sigmas[i + 1] - sigmas[i])
    assert forecast(mean_velocity(sigmas[:i], sigmas[i], span), velocities) == pytest.approx(wanted)


@pytest.mark.parametrize(("u", "share"), [(1, 1 / 4), (3, 9 / 16), (9, 81 / 100)])
def test_mean_velocity_never_adds_a_whole_slope_in_a_long_gap(u: int, share: float) -> None:
    assert mean_velocity([0, 1], 1 + u, 2) == pytest.approx([-share, 1 + share])


def test_chebyshev_by_hand() -> None:
    # tau = -1, 0 and 1 at now; T_0 and T_1 with a ridge of 1: the fit shrinks the line's (-1, 2) to (-0.2, 1.2).
    assert chebyshev([0, 2], 4, 1, 1.0, 4, 1.0) == pytest.approx([-0.2, 1.2])
    assert chebyshev([0, 2], 4, 1, 1.0, 4, 0.5) == pytest.approx([-0.6, 1.6])
    assert chebyshev([0, 2], 4, 4, 1.0, 4, 1.0) == pytest.approx([-0.2, 1.2])
    # tau = -1, 0, 1 and 2 at now, where T_0, T_1, T_2 are 1, 2, 7; the coefficients of the solution are -1/5, 2/3, 9/5.
    assert chebyshev([0, 2, 4], 6, 2, 1.0, 4, 1.0) == pytest.approx([14 / 15, -2, 31 / 15])


def test_chebyshev_without_a_ridge_runs_through_as_many_snapshots_as_coefficients() -> None:
    times, now = [0.0, 9.0, 22.0, 31.0, 45.0], 50.0
    series = [(time / 10) ** 4 - 2 * (time / 10) ** 3 for time in times]
    assert forecast(chebyshev(times, now, 4, 0.0, 50, 1.0), series) == pytest.approx(625 - 250)


def test_chebyshev_under_a_heavy_ridge_is_plain_reuse() -> None:
    assert chebyshev([0, 1, 2, 3, 4, 6], 8, 4, 1e9, 50, 1.0) == pytest.approx([0, 0, 0, 0, 0, 1], abs=1e-6)


@pytest.mark.parametrize("name", SCALE_FREE)
def test_a_falling_noise_level_gives_the_weights_of_the_step_index(name: str) -> None:
    predictor = DEGREES[name][0]
    rng = random.Random(3)
    for length in range(1, 7):
        times, now = random_history(rng, length)
        sigmas = [1 - time / 64 for time in times]
        assert predictor(sigmas, 1 - now / 64) == pytest.approx(predictor(times, now), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("mix", [0.5, 1.0])
def test_chebyshev_on_a_falling_noise_level_whose_run_spans_one(mix: float) -> None:
    times, now = [0.0, 1.0, 2.0, 5.0, 9.0, 14.0], 20.0
    sigmas = [1 - time / 50 for time in times]
    wanted = chebyshev(times, now, 4, 0.1, 50, mix)
    assert chebyshev(sigmas, 1 - now / 50, 4, 0.1, 1.0, mix) == pytest.approx(wanted, rel=1e-9)
