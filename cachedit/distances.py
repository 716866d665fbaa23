"""How far apart what a site gives at two steps lies, and from that the error of any forecast at any step of any run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

EXTRAPOLATED = 1.0  # calibrated steps beyond the first and the last, along the line through the outermost two
FAINTEST = 1e-12  # least |y_t|^2 in those units: a feature that vanishes must not make numbers that are not finite


@dataclass(frozen=True)
class Distances:
    """Squared distances between the features y_t of the steps of a run.

    All weights of a forecast sum to 1, so distances are all that its error takes: for the weights w over the steps k,
    ``|y_t - sum w_k y_k|^2 = sum w_k |y_t - y_k|^2 - 1/2 sum w_k w_l |y_k - y_l|^2``. They lose nothing to
    cancellation, as inner products of features that hardly differ would.

    Attributes:
        between: ``[branches, T, T]``, |y_i - y_j|^2, in units of a typical |y|^2.
        squares: ``[branches, T]``, |y_t|^2 in the same units.
    """

    between: np.ndarray
    squares: np.ndarray

    @classmethod
    def over(
        cls,
        pairs: Mapping[str, Sequence[float]],
        squares: Mapping[str, Sequence[float]],
        known: Sequence[float],
        wanted: Sequence[float],
    ) -> Distances:
        """Distances on another list of noise levels: features in between lie on the line through their neighbours.

        Args:
            pairs: branch -> |y_i - y_j|^2 of the calibrated steps i < j: (0, 1), (0, 2), ... (1, 2), ...
            squares: branch -> |y_t|^2 per calibrated step.
            known: noise levels of the calibrated steps, not increasing.
            wanted: noise levels of the steps of the run.
        """
        steps = len(known)
        table = np.zeros((len(pairs), steps, steps))
        rows, columns = np.triu_indices(steps, 1)
        table[:, rows, columns] = list(pairs.values())
        table += table.transpose(0, 2, 1)
        mix = _mixing(known, wanted)
        mixed = mix @ table @ mix.T  # [branches, T', T']
        own = np.einsum("btt->bt", mixed) / 2
        between = mixed - own[:, :, None] - own[:, None, :]
        level = np.asarray([squares[branch] for branch in pairs]) @ mix.T - own
        return cls(np.maximum(between, 0.0), np.maximum(level, FAINTEST))

    def errors(self, computed: np.ndarray, weights: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Relative error of forecasts, ``|y_t - sum w_k y_k| / |y_t|``, of several branches the largest.

        Args:
            computed: ``[..., K]``, steps that forecasts are made of.
            weights: ``[..., S, K]``, rows that sum to 1.
            steps: ``[..., S]``, what is forecast.

        Returns:
            ``[..., S]``.
        """
        among = self.between[:, computed[..., :, None], computed[..., None, :]]  # [branches, ..., K, K]
        to = self.between[:, steps[..., :, None], computed[..., None, :]]  # [branches, ..., S, K]
        square = (weights * (to - weights @ among / 2)).sum(axis=-1)
        return np.asarray(np.sqrt(np.maximum(square, 0.0) / self.squares[:, steps]).max(axis=0))

    def fitted(self, before: np.ndarray, newest: np.ndarray, steps: np.ndarray, ridge: float) -> np.ndarray:
        """Weights of two computed steps that forecast others best in the mean square over all branches.

        ``y_t - y_newest`` is fitted by ``v (y_before - y_newest)``; the ridge, a share of the squared difference,
        pulls v towards 0, which is plain reuse.

        Args:
            before: ``[...]``, the older of the two.
            newest: ``[...]``, the newer.
            steps: ``[..., S]``, what is forecast.
            ridge: 0 for none.

        Returns:
            ``[..., S, 2]``, the weights v and 1 - v.
        """
        before, newest = before[..., None], newest[..., None]
        apart = self.between[:, before, newest]  # [branches, ..., 1]
        along = (apart + self.between[:, steps, newest] - self.between[:, steps, before]) / 2
        level = self.squares[:, steps]
        total = (apart / level).sum(axis=0) * (1 + ridge)
        share = np.divide((along / level).sum(axis=0), total, out=np.zeros(steps.shape), where=total > 0)
        return np.stack([share, 1 - share], axis=-1)


def _mixing(known: Sequence[float], wanted: Sequence[float]) -> np.ndarray:
    """``[T', T]``, how every wanted level mixes the two calibrated ones around it; rows sum to 1."""
    if list(known) == list(wanted):
        return np.eye(len(known))  # also of steps that share a level
    levels, mix = np.asarray(known, dtype=float), np.zeros((len(wanted), len(known)))
    for row, level in zip(mix, wanted, strict=True):
        i = int(np.clip(np.searchsorted(-levels, -level, side="right") - 1, 0, len(levels) - 2))
        span = levels[i] - levels[i + 1]
        share = (levels[i] - level) / span if span > 0 else 0.0
        row[i + 1] = float(np.clip(share, -EXTRAPOLATED, 1 + EXTRAPOLATED))
        row[i] = 1.0 - row[i + 1]
    return mix
