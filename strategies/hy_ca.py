"""HyCa: every channel is forecast by the solver that suits its cluster."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar

from cachedit.errors import ProfileError
from cachedit.predictors import bdf2, hermite, lagrange, plain, taylor
from cachedit.profile import Profile
from cachedit.strategies.rules import at_interval
from cachedit.strategy import Axes, Channels, Context, FeatureStrategy

SOLVERS: dict[str, Callable[[Sequence[float], float], list[float]]] = {
    "plain": plain,
    "line": partial(lagrange, order=1),
    "taylor 2": partial(taylor, order=2),
    "newton 2": partial(lagrange, order=2),
    "bdf 2": bdf2,
    "hermite 2": partial(hermite, order=2, scale=math.sqrt(0.5)),
}
"""What a cluster may choose from, simplest first. Profiles store the place in this list, so new ones go to its end."""


@dataclass(frozen=True)
class HyCa(FeatureStrategy):
    """Forecast clusters of channels by a solver of their own (arXiv 2510.04188).

    Channels of the features move in different ways, alike over prompts and steps. Calibration groups them once by how
    they move and gives every group the solver that forecasts it best. Options left at None take the profile's
    recommendation, else the value named below; solvers are chosen for the calibrated interval, so keep to it.

    The paper's solvers are Runge-Kutta, Adams-Bashforth, Adams-Moulton, BDF and Taylor, whose formulas were not seen.
    Ours: the weights over three snapshots that these come down to (``cachedit.predictors``); clusters of the stack's
    residual, shared by its streams, where the paper has those of every module. The gain over the best single solver
    depends on the model: a profile's ``provenance`` tells both errors.

    interval: one step in ``interval`` is computed after the warm-up, counted from its last step (4; paper: 4 to 8).
    warmup:   leading steps that are always computed (3).
    """

    interval: int | None = None
    warmup: int | None = None

    paper: ClassVar[str] = "arXiv 2510.04188"
    history: ClassVar[int] = 3
    profile_arrays: ClassVar[Axes] = {"channel_cluster": ("channel",), "cluster_solver": ("cluster",)}
    partition: ClassVar[Channels] = Channels("channel_cluster")

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range.
        """
        for name, value in (("interval", self.interval), ("warmup", self.warmup)):
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"HyCa {name}={value!r}; allowed: an integer, 1 or more, or None")

    def configured(self, profile: Profile | None) -> HyCa:
        """Open options from the profile's recommendation, else the defaults of the field.

        Raises:
            ProfileError: the profile names clusters or solvers that do not exist.
        """
        recommended: dict[str, Any] = {"interval": 4, "warmup": 3}
        if profile is not None:
            _check(profile)
            recommended |= profile.defaults
        return replace(self, **{f.name: recommended[f.name] for f in fields(self) if getattr(self, f.name) is None})

    def should_compute(self, ctx: Context) -> bool | str:
        """The warm-up, then one step in ``interval``; a later expert begins anew."""
        assert self.interval is not None
        assert self.warmup is not None
        return at_interval(ctx, self.interval, self.warmup)

    def weights(self, ctx: Context) -> list[list[float]]:
        """One row per cluster: its solver's."""
        assert ctx.profile is not None
        solvers = list(SOLVERS.values())
        return [solvers[int(k)](ctx.computed_steps, ctx.step) for k in _row(ctx.profile, "cluster_solver")]


def _row(profile: Profile, array: str) -> list[Any]:
    """An array with one key."""
    return next(iter(profile.arrays[array].values()))


def _check(profile: Profile) -> None:
    """Raise ProfileError unless every channel has a cluster, and every cluster a solver."""
    solvers = _row(profile, "cluster_solver")
    wanted = {"channel_cluster": len(solvers), "cluster_solver": len(SOLVERS)}
    for array, count in wanted.items():
        wrong = sorted(set(_row(profile, array)) - set(range(count)))
        if wrong:
            raise ProfileError(
                f"field 'arrays.{array}' holds {wrong[0]}; allowed: integers from 0 to {count - 1}. Calibrate again "
                "with this version: cachedit calibrate MODEL --strategy hyca."
            )
