"""Distances between features tell the error of every forecast, on the calibrated steps and on any others."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from cachedit.distances import FAINTEST, Distances
from cachedit.predictors import lagrange

LEVELS = [1.0, 0.8, 0.7, 0.4, 0.1]


def measured(
    features: np.ndarray | dict[str, np.ndarray],
    known: Sequence[float] = LEVELS,
    wanted: Sequence[float] | None = None,
) -> Distances:
    """What a calibration would have stored of features ``[T, D]``, per branch, on a list of noise levels."""
    branches = features if isinstance(features, dict) else {"cond": features}
    pairs = {
        branch: [float(((y[i] - y[j]) ** 2).sum()) for i, j in itertools.combinations(range(len(y)), 2)]
        for branch, y in branches.items()
    }
    squares = {branch: [float((row**2).sum()) for row in y] for branch, y in branches.items()}
    return Distances.over(pairs, squares, known, known if wanted is None else wanted)


def random_features(seed: int = 0, steps: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(steps, 5))


def line(levels: Sequence[float]) -> np.ndarray:
    """Features that are linear in the noise level."""
    return np.array([[3 - 2 * level, 1 + level] for level in levels])


def direct(features: np.ndarray, computed: Sequence[int], weights: Sequence[float], step: int) -> float:
    """Relative error of a forecast, from the features themselves."""
    forecast = sum(weight * features[k] for weight, k in zip(weights, computed, strict=True))
    return float(np.linalg.norm(features[step] - forecast) / np.linalg.norm(features[step]))


def error(distances: Distances, computed: Sequence[int], weights: Sequence[float], step: int) -> float:
    return float(distances.errors(np.array(computed), np.array([weights]), np.array([step]))[0])


def test_points_on_a_line_by_hand() -> None:
    """At 1, 3 and 6 the distances are 2, 5 and 3; reuse of 3 at 6 is off by half of 6."""
    found = measured(np.array([[1.0], [3.0], [6.0]]), [1.0, 0.5, 0.2])
    assert found.between.tolist() == [[[0, 4, 25], [4, 0, 9], [25, 9, 0]]]
    assert found.squares.tolist() == [[1, 9, 36]]
    assert error(found, [1], [1.0], 2) == 0.5
    assert error(found, [0, 1], [-1.5, 2.5], 2) == pytest.approx(0, abs=1e-7)  # 3 + 1.5 * (3 - 1)
    assert error(found, [0, 1], [-1.0, 2.0], 2) == pytest.approx(1 / 6)  # 5 in place of 6


@pytest.mark.parametrize("seed", range(5))
def test_errors_are_those_of_the_features_themselves(seed: int) -> None:
    features, rng = random_features(seed), np.random.default_rng(100 + seed)
    found = measured(features)
    for computed in ([1], [0, 2], [0, 1, 3]):
        free = rng.normal(size=len(computed) - 1)
        for weights in ([*free, 1 - free.sum()], lagrange([LEVELS[k] for k in computed], LEVELS[4], len(computed) - 1)):
            assert error(found, computed, weights, 4) == pytest.approx(direct(features, computed, weights, 4))


def test_many_forecasts_at_once() -> None:
    features = random_features()
    computed, steps = np.array([[0, 1], [1, 2]]), np.array([[2, 3], [3, 4]])
    weights = np.array([[[-1.0, 2.0], [-2.0, 3.0]], [[0.0, 1.0], [0.5, 0.5]]])
    found = measured(features).errors(computed, weights, steps)
    for i, j in itertools.product(range(2), range(2)):
        assert found[i, j] == pytest.approx(direct(features, computed[i], weights[i, j], steps[i, j]))


def test_small_differences_of_large_features_are_not_lost() -> None:
    features = np.array([[1e6, 0.0], [1e6, 1e-3], [1e6, 2e-3], [1e6, 4e-3]])
    found = measured(features, [1.0, 0.9, 0.8, 0.7])
    assert error(found, [1], [1.0], 2) == pytest.approx(1e-9)
    assert error(found, [1, 2], [-1.0, 2.0], 3) == pytest.approx(1e-9)


def test_of_several_branches_the_worst_counts() -> None:
    steady, moving = np.ones((5, 2)), line(LEVELS)
    found = measured({"cond": steady, "uncond": moving})
    assert error(found, [0], [1.0], 3) == pytest.approx(direct(moving, [0], [1.0], 3))
    swapped = measured({"cond": moving, "uncond": steady})
    assert error(swapped, [0], [1.0], 3) == error(found, [0], [1.0], 3)


# -- weights that are fitted ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ridge", [0.0, 0.3, 1.5])
def test_fitted_weights_are_least_squares_with_a_ridge(ridge: float) -> None:
    """Of both branches, each relative to what is forecast."""
    branches = {"cond": random_features(1), "uncond": 3 * random_features(2)}
    found = measured(branches).fitted(np.array(1), np.array(2), np.array([3, 4]), ridge)
    for row, step in zip(found, (3, 4), strict=True):
        d = np.concatenate([(y[1] - y[2]) / np.linalg.norm(y[step]) for y in branches.values()])
        target = np.concatenate([(y[step] - y[2]) / np.linalg.norm(y[step]) for y in branches.values()])
        rows = np.concatenate([d, [np.sqrt(ridge) * np.linalg.norm(d)]])[:, None]
        (v,), *_ = np.linalg.lstsq(rows, np.concatenate([target, [0.0]]), rcond=None)
        assert row == pytest.approx([v, 1 - v])


def test_without_a_ridge_no_other_weights_do_better() -> None:
    found = measured(random_features(3))
    (row,) = found.fitted(np.array(0), np.array(2), np.array([4]), 0.0)
    best = error(found, [0, 2], row.tolist(), 4)
    assert all(error(found, [0, 2], [row[0] + off, row[1] - off], 4) > best for off in (-0.01, 0.01))


def test_fitted_weights_of_what_does_not_move_are_plain_reuse() -> None:
    found = measured(np.ones((5, 2)))
    assert found.fitted(np.array(0), np.array(1), np.array([2, 3]), 0.3).tolist() == [[0.0, 1.0]] * 2


# -- other noise levels -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("levels", [LEVELS, [1.0, 1.0, 0.5, 0.5, 0.5]])
def test_the_same_levels_give_the_same_tables(levels: Sequence[float]) -> None:
    """Also where neighbours share a level: samplers of a higher order visit some twice."""
    features = random_features()
    found = measured(features, levels)
    for i, j in itertools.product(range(5), range(5)):
        assert found.between[0, i, j] == pytest.approx(((features[i] - features[j]) ** 2).sum(), abs=1e-12)
    assert found.squares[0].tolist() == pytest.approx((features**2).sum(1).tolist())


def test_features_linear_in_the_noise_level_are_exact_at_any_levels() -> None:
    """In between, and one calibrated step beyond either end: 1.2 and -0.2 lie a step of the slope outside."""
    wanted = [1.2, 1.05, 0.8, 0.75, 0.33, 0.1, 0.0, -0.2]
    found, features = measured(line(LEVELS), wanted=wanted), line(wanted)
    for i, j in itertools.product(range(len(wanted)), repeat=2):
        assert found.between[0, i, j] == pytest.approx(((features[i] - features[j]) ** 2).sum(), abs=1e-9)
    assert found.squares[0].tolist() == pytest.approx((features**2).sum(1).tolist())
    assert error(found, [1, 2], lagrange([1.05, 0.8], 0.33, 1), 4) == pytest.approx(0, abs=1e-6)


def test_farther_outside_features_stand_still() -> None:
    found = measured(line(LEVELS), wanted=[1.5, 1.2, 0.5])
    assert found.between[0, 0, 1] == pytest.approx(0, abs=1e-12)


def test_in_between_features_lie_on_the_chord() -> None:
    features = random_features(4)
    found = measured(features, wanted=[0.9, 0.5])
    first, second = (features[0] + features[1]) / 2, features[2] / 3 + features[3] * 2 / 3
    assert found.between[0, 0, 1] == pytest.approx(((first - second) ** 2).sum())
    assert found.squares[0].tolist() == pytest.approx([(first**2).sum(), (second**2).sum()])


def test_equal_neighbours_among_the_calibrated_levels() -> None:
    """Every table stays finite, and what lies beside the pair is interpolated with its nearer member."""
    features = np.array([[0.0], [1.0], [2.0], [4.0]])
    found = measured(features, [1.0, 0.5, 0.5, 0.0], [0.75, 0.5, 0.25])
    assert np.isfinite(found.between).all()
    assert found.between[0, 0, 2] == pytest.approx((0.5 - 3.0) ** 2)


def test_a_feature_that_vanishes_makes_no_number_that_is_not_finite() -> None:
    features = np.array([[1.0], [0.5], [0.0], [0.0]])
    found = measured(features, [1.0, 0.7, 0.4, 0.1])
    assert found.squares[0, 2] == FAINTEST
    row = found.fitted(np.array(0), np.array(1), np.array([2, 3]), 0.3)
    assert np.isfinite(row).all()
    assert np.isfinite(found.errors(np.array([0, 1]), row, np.array([2, 3]))).all()
