"""How wrong a residual is some steps later: the tables from which schedules are solved."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from cachedit.calibration.measure import Arrays, Measure, mean
from cachedit.feature.place import Residual
from cachedit.run import Step
from cachedit.strategy import Module, Output, Site, Skip, Stack

GAPS = 10  # steps ahead; residuals of so many steps are held while a run is measured
Table = dict[int, dict[int, float]]


class _Errors(Measure):
    """``error[i][g] = mean|y_i - y_{i+g}| / mean|y_{i+g}|`` of a site, averaged over prompts."""

    array: ClassVar[str] = ""

    def start(self, k: int) -> None:
        """New tables."""
        self._tables: dict[str, Table] = {}
        self._past: dict[tuple[str, str], deque[tuple[int, Residual]]] = {}

    def key(self, site: Site, step: Step) -> str:
        """Under which a table is stored."""
        return step.branch

    def watch(self, step: Step, values: Mapping[Site, Residual]) -> None:
        """Compare the sites with what they gave at the steps before."""
        for site in self.sites:
            if site not in values:
                continue
            key = self.key(site, step)
            past = self._past.setdefault((f"{key} {step.branch}", step.expert), deque(maxlen=GAPS))
            for then, residual in past:
                row = self._tables.setdefault(key, {}).setdefault(then, {})
                error = relative_l1(residual, values[site])
                row[step.index - then] = max(error, row.get(step.index - then, 0.0))
            past.append((step.index, values[site]))

    def stop(self) -> dict[str, Table]:
        """The tables, each under its key."""
        return self._tables

    def arrays(self, parts: list[Any]) -> Arrays:
        """The tables, rectangular: a short row repeats its last value."""
        steps = 1 + max(then + max(row) for table in parts[0].values() for then, row in table.items())
        gaps = min(GAPS, steps - 1)
        return {
            self.array: {
                key: mean([_rectangular(part.get(key, {}), steps, gaps) for part in parts]) for key in parts[0]
            }
        }


class ResidualError(_Errors):
    """Of the whole stack's residual, per branch."""

    array = "residual_error"
    makes: ClassVar[dict[str, tuple[str, ...]]] = {"residual_error": ("step", "gap")}

    @property
    def sites(self) -> tuple[Site, ...]:
        """The feature of a UNet's way up that the strategy reuses, else the whole stack."""
        return tuple([site for site in self.strategy.sites if isinstance(site, Skip)])[:1] or (Stack(),)


class OutputError(_Errors):
    """Of the output minus the latent, per branch."""

    array = "output_error"
    makes: ClassVar[dict[str, tuple[str, ...]]] = {"output_error": ("step", "gap")}

    @property
    def sites(self) -> tuple[Site, ...]:
        """The output."""
        return (Output(residual=True),)


class ModuleError(_Errors):
    """Of the modules before their gates, per kind; of several branches the worst."""

    array = "module_error"
    makes: ClassVar[dict[str, tuple[str, ...]]] = {"module_error": ("step", "gap")}

    @property
    def sites(self) -> tuple[Site, ...]:
        """All kinds of modules."""
        return (Module("attn"), Module("temporal"), Module("cross"), Module("mlp"))

    def key(self, site: Site, step: Step) -> str:
        """The kind."""
        assert isinstance(site, Module)
        return site.kind


class StepErrors:
    """Error of reusing, at every step of a run, what a site gave at the step before; of several branches the largest.

    Args:
        error: of two features of a site; relative L1 by default.

    Attributes:
        of: site -> step -> error; an expert's first step has none.
    """

    def __init__(self, error: Callable[[Residual, Residual], float] | None = None) -> None:
        self._error = error or relative_l1
        self.of: dict[Site, dict[int, float]] = {}
        self._previous: dict[tuple[Site, str, str], Residual] = {}

    def watch(self, step: Step, values: Mapping[Site, Residual]) -> None:
        """Compare every site with what it gave at the step before."""
        for site, value in values.items():
            key, errors = (site, step.branch, step.expert), self.of.setdefault(site, {})
            if key in self._previous:
                errors[step.index] = max(self._error(self._previous[key], value), errors.get(step.index, 0.0))
            self._previous[key] = value


def relative_l1(then: Residual, now: Residual) -> float:
    """mean|then - now| / mean|now| over all tensors of a site, each counted alike; 0 where both are zero."""
    errors = []
    for a, b in zip(then, now, strict=True):
        moved, level = float((a.float() - b.float()).abs().mean()), float(b.float().abs().mean())
        errors.append(moved / level if level > 0 else float(torch.tensor(moved > 0)) * 1e3)
    return sum(errors) / len(errors)


def relative_l2(then: Residual, now: Residual) -> float:
    """|then - now| / |now| over all tensors of a site together; 0 where both are zero."""
    moved = math.hypot(*[float((a.float() - b.float()).norm()) for a, b in zip(then, now, strict=True)])
    level = math.hypot(*[float(b.float().norm()) for b in now])
    return moved / level if level > 0 else float(moved > 0) * 1e3


def _rectangular(table: Table, steps: int, gaps: int) -> list[list[float]]:
    rows = []
    for i in range(steps):
        row = [0.0]
        for gap in range(1, gaps + 1):
            row.append(round(table.get(i, {}).get(gap, row[-1]), 6))
        rows.append(row)
    return rows
