"""What turns the runs of a calibration into the arrays of a profile: one class per array or group of arrays."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from cachedit.errors import ProfileError
from cachedit.feature.place import Residual
from cachedit.run import Step
from cachedit.strategy import FeatureStrategy, Site

if TYPE_CHECKING:
    from cachedit.calibration.trial import Trial
    from cachedit.profile import Profile

Arrays = dict[str, dict[str, list[Any]]]


class Measure:
    """Base of all measures. Subclassing enters it into the registry under the arrays that it makes.

    A calibration goes through the stages that its measures name, in order: before the first run of a stage ``begin``,
    then for every prompt ``start``, ``watch`` for every call of the denoiser, ``stop``, and at the end ``arrays``.

    Prompts may be watched by other processes, or have been watched before an interruption: whatever ``arrays`` is to
    know of them must be in the part that ``stop`` returns, and what it runs itself goes through ``trial.map``. Parts
    and results of ``trial.map`` are plain data: numbers, strings, None, lists, tuples, dicts, and tensors on the CPU.

    Class attributes:
        makes: array name -> its axes.
        stage: 0 to be run first; later ones see what the earlier ones made.
        signal: of the strategy's signals (``cachedit.feature.signals``) to be heard at every step; "" for none.

    Attributes:
        trial: runs the pipeline.
        defaults: options of the strategy that were found to be best.
        notes: what a reader of the profile should know.
    """

    trial: Trial

    registry: ClassVar[dict[str, type[Measure]]] = {}
    makes: ClassVar[dict[str, tuple[str, ...]]] = {}
    stage: ClassVar[int] = 0
    signal: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Enter the class under every array that it makes."""
        super().__init_subclass__(**kwargs)
        cls.registry.update(dict.fromkeys(cls.makes, cls))

    def __init__(self, strategy: FeatureStrategy) -> None:
        self.strategy = strategy
        self.defaults: dict[str, Any] = {}
        self.notes: dict[str, Any] = {}

    @property
    def sites(self) -> tuple[Site, ...]:
        """What is to be watched; nothing for a measure that makes runs of its own."""
        return ()

    @property
    def runs(self) -> int:
        """Runs of the pipeline that ``arrays`` will make, for whoever watches the progress; known before the first."""
        return 0

    def begin(self, profile: Profile | None) -> None:
        """A stage begins; ``profile`` holds what the earlier stages made."""

    def start(self, k: int) -> None:
        """The run of prompt ``k`` begins; forget the one before."""

    def watch(self, step: Step, values: Mapping[Site, Residual]) -> None:
        """One call of the denoiser, with what the watched sites gave."""

    def stop(self) -> Any:
        """The run is over; returns what it showed, the part of this prompt."""

    def arrays(self, parts: list[Any]) -> Arrays:
        """What was measured.

        Args:
            parts: what ``stop`` returned for every prompt, in the order of the prompts; empty if nothing is watched.
        """
        raise NotImplementedError


def mean(rows: list[Any]) -> Any:
    """Element-wise mean of nested lists of one shape."""
    if isinstance(rows[0], list):
        return [mean(list(items)) for items in zip(*rows, strict=True)]
    return sum(rows) / len(rows)


def rounded(values: Iterable[float]) -> list[float]:
    """To the six digits that profiles keep."""
    return [float(f"{value:.6g}") for value in values]


def check_finite(values: list[float], what: str) -> None:
    """Raise ProfileError unless all are finite."""
    wrong = [value for value in values if not math.isfinite(value)]
    if wrong:
        raise ProfileError(
            f"{what} has {wrong[0]} among its {len(values)} values; allowed: finite numbers. The model gives "
            "non-finite or zero features there; try another dtype."
        )
