"""ReferenceKV: reference images are computed every few steps, and attended to from a bank in between."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from cachedit.conditions.reference import ReferenceSession
from cachedit.conditions.strategy import ConditionStrategy
from cachedit.kernels.eight_bits import FORMATS

from .checks import check_choice, check_count, check_number

FEW = 4  # steps of a run in which nothing is reused by default


@dataclass(frozen=True)
class ReferenceKV(ConditionStrategy):
    """Keep keys and values of reference images for a few steps (layouts of FLUX.1 Kontext, arXiv 2506.15742).

    For pipelines that append the tokens of reference images to those of the image, which about doubles the sequence:
    FLUX.1 Kontext and QwenImage edit. There a reference sees the image and mostly the time too, so what is kept grows
    stale; the record says how much it moved between two computations. It moves less where a model gives references a
    fixed time (QwenImage edit with ``zero_cond_t``). Guidance branches have a bank each.

    interval:  references are computed at every ``interval``-th step; 1 never reuses.
    first:     leading steps at which they are always computed.
    last:      trailing steps at which they are always computed.
    max_drift: once the keys of a layer have changed by more between two computations, relative to their norm, the rest
               of the run computes them at every step. None does not ask.
    dtype:     None keeps keys and values as they are, "int8" and "fp8" in eight bits.
    """

    interval: int = 3
    first: int = 2
    last: int = 1
    max_drift: float | None = None
    dtype: Literal["int8", "fp8"] | None = None

    paper: ClassVar[str] = "arXiv 2506.15742"

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range.
        """
        check_count(self, "interval", lowest=1)
        check_count(self, "first", "last")
        check_choice(self, "dtype", (None, "int8", "fp8"))
        if self.max_drift is not None:
            check_number(self, "max_drift")

    def session(self, pipe: Any) -> ReferenceSession:
        """A session that asks ``is_fresh`` at every step."""
        return ReferenceSession(repr(self), pipe, self, FORMATS[self.dtype])

    def is_fresh(self, step: int, steps: int, drift: float | None) -> bool:
        """The first and last steps, every ``interval``-th after them, and all where the keys moved too far."""
        if steps <= FEW or step < self.first or step >= steps - self.last:
            return True
        if self.max_drift is not None and drift is not None and drift > self.max_drift:
            return True
        interval = self.interval if steps > 2 * FEW else min(self.interval, 2)
        return (step - self.first) % interval == 0
