"""Measures that are taken along for other strategies than the one that is calibrated for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cachedit.calibration.measure import Arrays, Measure
from cachedit.calibration.trial import Trial
from cachedit.errors import ProfileError, UnsupportedModelError
from cachedit.feature.place import Residual
from cachedit.profile import Profile
from cachedit.run import Step
from cachedit.strategy import Site

REFUSED = (ProfileError, UnsupportedModelError)


class Extra(Measure):
    """A measure that is left out where the model or the length of the runs does not allow it.

    Args:
        measure: to be taken along.
    """

    def __init__(self, measure: Measure) -> None:
        super().__init__(measure.strategy)
        self.measure, self._refused = measure, False
        self.defaults, self.notes = measure.defaults, measure.notes

    @property
    def stage(self) -> int:  # type: ignore[override]
        """Its stage."""
        return self.measure.stage

    @property
    def signal(self) -> str:  # type: ignore[override]
        """Its signal."""
        return self.measure.signal

    @property
    def sites(self) -> tuple[Site, ...]:
        """Its sites."""
        return self.measure.sites

    @property
    def runs(self) -> int:
        """Its runs."""
        return self.measure.runs

    def join(self, trial: Trial) -> bool:
        """Take part in a trial. False if the model has not got what is to be watched."""
        self.trial = self.measure.trial = trial
        return trial.allows(self.sites, self.signal)

    def begin(self, profile: Profile | None) -> None:
        """As the measure's."""
        self.measure.begin(profile)

    def start(self, k: int) -> None:
        """As the measure's, which may be refused again."""
        self._refused = False
        self.measure.start(k)

    def watch(self, step: Step, values: Mapping[Site, Residual]) -> None:
        """As the measure's, until it is refused."""
        if not self._refused:
            try:
                self.measure.watch(step, values)
            except REFUSED:
                self._refused = True

    def stop(self) -> Any:
        """The part of this prompt; None where it was refused."""
        return None if self._refused else self.measure.stop()

    def arrays(self, parts: list[Any]) -> Arrays:
        """What was measured; nothing where it was refused."""
        if any(part is None for part in parts):
            return {}
        try:
            found = self.measure.arrays(parts)
        except REFUSED:
            return {}
        self.defaults, self.notes = self.measure.defaults, self.measure.notes
        return found
