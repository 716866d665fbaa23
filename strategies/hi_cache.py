"""HiCache: TaylorSeer with Hermite polynomials."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from cachedit.predictors import hermite
from cachedit.strategy import Context

from .taylor_seer import TaylorSeer


@dataclass(frozen=True)
class HiCache(TaylorSeer):
    """Forecast by scaled Hermite polynomials of the steps ahead (arXiv 2508.16984).

    TaylorSeer's differences D_m, with ``scale^m H_m(scale * u)`` in the place of ``u^m``; H_m are the physicists'
    Hermite polynomials, which keep the higher terms in bounds. The scale trades trust in the slope for calm: 0.5 takes
    half of it, sqrt(0.5) all of it, so only from there on is a line forecast as a line.

    Everything but the basis is as in TaylorSeer, and so is what is ours: the stack's residual as the default scope.

    interval: one step in ``interval`` is computed after the warm-up, counted from its end (FLUX: 5 or 6 in 50 steps).
    order:    highest difference (FLUX: 1 or 2).
    warmup:   leading steps that are always computed (FLUX: 3).
    scope:    "stack" or "modules" (the paper's), as TaylorSeer has it.
    scale:    contraction of the basis, above 0 (paper: 0.5; its released scripts up to 0.7).
    """

    order: int = 2
    scale: float = 0.5

    paper: ClassVar[str] = "arXiv 2508.16984"

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range.
        """
        super().__post_init__()
        if type(self.scale) not in (int, float) or not 0 < self.scale < math.inf:
            raise ValueError(f"HiCache scale={self.scale!r}; allowed: a number above 0, such as 0.5")

    def weights(self, ctx: Context) -> Sequence[float]:
        """Those of the expansion; the unit of time is the step."""
        return hermite(ctx.computed_steps, ctx.step, self.order, self.scale)
