"""What calibration stores and a run reads: arrays over noise level, and the model they belong to."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from cachedit.errors import ProfileError
from cachedit.files import write_text
from cachedit.profile_fields import check_fields
from cachedit.schedules import resample
from cachedit.strategy import Axes, Schedule

T = TypeVar("T")
SCHEMA = 1
REMEMBERED = 2000  # results that a run has asked for, of some 40 schedules of 50 steps
COLUMNS = ("budget", "value")  # axes of arrays that hold columns of a table and not branches
SAME_SIGMA = 2e-3  # two schedules with sigmas this close are the same schedule, up to rounding of timesteps


@dataclass
class Profile:
    """Calibrated arrays of one model.

    Attributes:
        arrays: array name -> branch (or module kind, or site) -> numbers over the axes of the array.
        axes: array name -> its axes, such as ("step", "gap") or ("channel",); ("step",) where it is not named.
        sigmas: noise level in [0, 1] of each calibrated step, not increasing. None: the arrays lie over the position
            in the schedule, first to last step.
        name: how shipped profiles are asked for ("flux-dev").
        strategy: name of the strategy that it was calibrated for; others may read it too. "" if unknown.
        model: {"class", "fingerprint", "names"} of the denoiser; None fits every model.
        sampler: scheduler class and settings of the calibration.
        defaults: recommended options of the strategy.
        provenance, versions, date, command: where the numbers come from.
    """

    arrays: dict[str, dict[str, list[Any]]]
    sigmas: list[float] | None = None
    name: str = ""
    strategy: str = ""
    model: dict[str, Any] | None = None
    sampler: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, list[str]] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    date: str = ""
    command: str = ""

    def __post_init__(self) -> None:
        """Check the contents and prepare the memo of resampled arrays."""
        check_fields(self)
        self._memo: dict[Any, Any] = {}

    @property
    def branches(self) -> list[str]:
        """Names of the guidance branches that were calibrated."""
        tables = [rows for name, rows in self.arrays.items() if not set(self.axes.get(name, [])) & set(COLUMNS)]
        return list(dict.fromkeys(branch for rows in tables for branch in rows))

    @classmethod
    def from_ratios(
        cls, ratios: Sequence[float] | Mapping[str, Sequence[float]], sigmas: Sequence[float] | None = None
    ) -> Profile:
        """A MagCache table as a profile that fits every model.

        Args:
            ratios: one magnitude ratio per step (the first is 1), or one such list per branch.
            sigmas: noise level in [0, 1] per step; without them the table lies over the position in the schedule.
        """
        rows = ratios if isinstance(ratios, Mapping) else {"cond": ratios}
        arrays = {"magnitude_ratio": {branch: [float(r) for r in row] for branch, row in rows.items()}}
        return cls(arrays=arrays, sigmas=None if sigmas is None else [float(s) for s in sigmas])

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile.

        Raises:
            ProfileError: the file is missing, damaged, foreign or newer; the message names the field.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ProfileError(f"cannot read profile {path}: {error}") from error
        return cls.from_json(text, str(path))

    @classmethod
    def from_json(cls, text: str, origin: str = "profile") -> Profile:
        """Parse the JSON form; ``origin`` names it in errors."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ProfileError(f"{origin}: not valid JSON ({error})") from error
        if not isinstance(data, dict) or "schema" not in data:
            raise ProfileError(f"{origin}: field 'schema' is missing: this is not a cachedit profile")
        if data["schema"] != SCHEMA:
            raise ProfileError(
                f"{origin}: field 'schema' is {data['schema']!r}; this version of cachedit reads {SCHEMA}. "
                "Upgrade cachedit, or calibrate again with this version."
            )
        fields = {key: data[key] for key in cls.__dataclass_fields__ if key in data}
        if "arrays" not in fields:
            raise ProfileError(f"{origin}: field 'arrays' is missing")
        try:
            return cls(**fields)
        except ProfileError as error:
            raise ProfileError(f"{origin}: {error}") from error

    def to_json(self) -> str:
        """The JSON form."""
        text = json.dumps({"schema": SCHEMA, "branches": self.branches, **asdict(self)}, indent=1)
        return re.sub(r"\[[^][{}\"]*\]", lambda row: " ".join(row[0].split()), text) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the profile; the file is complete or absent, never half written."""
        write_text(path, self.to_json())

    def magnitude_ratios(
        self, schedule: Schedule, rule: Literal["sigma", "nearest"] = "sigma"
    ) -> dict[str, tuple[float, ...]]:
        """MagCache's ratios per branch on the steps of ``schedule``.

        "sigma" interpolates the cumulative log-magnitude at the noise level of every step and takes differences, so
        the product over any stretch of the schedule stays what was measured. "nearest" picks table entries by index,
        as the reference implementation does.
        """
        rows = self.arrays["magnitude_ratio"]
        return self.once(
            (schedule, rule),
            lambda: {branch: self._resample(row, schedule, rule) for branch, row in rows.items()},
        )

    def rows(self, array: str, schedule: Schedule) -> dict[str, list[Any]]:
        """An array over steps, and perhaps further axes, interpolated at the noise levels of a schedule."""

        def interpolated(rows: list[Any]) -> list[Any]:
            known, wanted = self.levels(schedule, len(rows))
            places = np.interp(-np.asarray(wanted), -np.asarray(known), np.arange(len(rows)))
            table, below = np.asarray(rows, dtype=float), np.floor(places).astype(int)
            share = (places - below).reshape(-1, *[1] * (table.ndim - 1))
            above = np.minimum(below + 1, len(rows) - 1)
            result: list[Any] = (table[below] * (1 - share) + table[above] * share).tolist()
            return result

        return self.once(
            (array, schedule), lambda: {key: interpolated(rows) for key, rows in self.arrays[array].items()}
        )

    def errors(self, array: str, schedule: Schedule) -> dict[str, list[list[float]]]:
        """A table of errors over (step, gap), see ``cachedit.schedules``, on the steps of a schedule."""
        return self.once(
            ("errors", array, schedule),
            lambda: {
                key: resample(table, *self.levels(schedule, len(table))) for key, table in self.arrays[array].items()
            },
        )

    def levels(self, schedule: Schedule, count: int) -> tuple[list[float], list[float]]:
        """Noise levels of the calibrated steps and of those of a schedule; positions in it where either is unknown.

        A schedule whose levels are those of the calibration up to rounding has the very list of the calibration.
        """
        if self.sigmas is not None and schedule.sigmas is not None:
            known, wanted = self.sigmas, list(schedule.sigmas)
        else:
            assert schedule.num_steps is not None
            known = [1 - Schedule(count).position(k) for k in range(count)]
            wanted = [1 - schedule.position(k) for k in range(schedule.num_steps)]
        same = len(known) == len(wanted) and max(abs(a - b) for a, b in zip(known, wanted, strict=True)) <= SAME_SIGMA
        return known, known if same else wanted

    def check_same_schedule(self, schedule: Schedule, strategy: str) -> None:
        """Raise ProfileError unless a run has the very steps that were calibrated."""
        count = max(len(rows) for name in self.arrays if self._over_steps(name) for rows in self.arrays[name].values())
        if schedule.num_steps == count:
            known, wanted = self.levels(schedule, count)
            if wanted is known:
                return
        raise ProfileError(
            f"{strategy} can only run on the steps that it was calibrated on: the profile has {count} steps of "
            f"{self.sampler.get('class', 'its sampler')}, this run has {schedule.num_steps} or other noise levels. "
            f"Run with num_inference_steps={count} and that sampler, or calibrate for these steps."
        )

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """The result of ``make``, made at the first time this key is asked for, or after ever so many others."""
        memo = self._memo
        if key not in memo:
            if len(memo) >= REMEMBERED:  # begun anew and not thinned out: other threads may be reading the old one
                memo = self._memo = {}
            memo[key] = make()
        found: T = memo[key]
        return found

    def _over_steps(self, array: str) -> bool:
        return self.axes.get(array, ["step"])[:1] == ["step"]

    def _resample(self, row: list[float], schedule: Schedule, rule: str) -> tuple[float, ...]:
        assert schedule.num_steps is not None
        steps, count = schedule.num_steps, len(row)
        if rule == "nearest":
            return tuple(row[round(k * (count - 1) / (steps - 1)) if steps > 1 else count - 1] for k in range(steps))
        levels, wanted = self.levels(schedule, count)
        if wanted is levels:
            return tuple(row)
        known, cumulative = _with_ends(np.asarray(levels), np.cumsum(np.log(row)))
        at_step = np.interp(-np.asarray(wanted), -known, cumulative)
        return (1.0, *np.exp(np.diff(at_step)).tolist())

    def check_fits(self, fingerprint: Mapping[str, Any]) -> None:
        """Raise ProfileError unless the profile was made for a denoiser with this fingerprint."""
        differences = self.differences(fingerprint)
        if differences:
            raise ProfileError(
                f"profile {self.name or 'without a name'} was made for another model: {'; '.join(differences)}. "
                "Make one for this model: cachedit calibrate MODEL --steps 50 -o my.json"
            )

    def check_arrays(self, axes: Axes, strategy: str) -> None:
        """Raise ProfileError unless the profile holds these arrays, over these axes."""
        missing = [name for name in axes if name not in self.arrays]
        if missing:
            raise ProfileError(
                f"profile {self.name or 'without a name'} lacks {', '.join(missing)}, which {strategy} reads; it holds "
                f"{', '.join(self.arrays)}. Calibrate for this strategy."
            )
        for name, allowed in axes.items():
            got = self.axes.get(name, ["step"])
            if got != [*allowed]:
                raise ProfileError(
                    f"profile {self.name or 'without a name'}: field 'arrays.{name}' lies over {', '.join(got)}; "
                    f"{strategy} reads it over {', '.join(allowed)}. Calibrate again with this version."
                )

    def differences(self, fingerprint: Mapping[str, Any]) -> list[str]:
        """What tells a denoiser with this fingerprint from the one that was calibrated, in words."""
        if self.model is None:
            return []
        wanted = {"class": self.model["class"], **self.model["fingerprint"]}
        return [
            f"{key} is {fingerprint.get(key)!r}, the profile's is {value!r}"
            for key, value in wanted.items()
            if value is not None and fingerprint.get(key) != value
        ]


def _with_ends(sigmas: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Extend a falling curve to sigma 1 and 0 along its first and last slope, where it does not reach that far."""
    falls = np.flatnonzero(np.diff(sigmas))
    if not len(falls):
        return sigmas, values
    first, last = falls[0], falls[-1]
    slopes = [(values[i + 1] - values[i]) / (sigmas[i + 1] - sigmas[i]) for i in (first, last)]
    head, tail = values[0] + slopes[0] * (1 - sigmas[0]), values[-1] - slopes[1] * sigmas[-1]
    return np.concatenate([[1.0], sigmas, [0.0]]), np.concatenate([[head], values, [tail]])
