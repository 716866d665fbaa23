"""How wrong a strategy's forecasts are, step by step, and the lines that correct them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from cachedit.calibration.measure import Arrays, Measure, rounded
from cachedit.errors import UnsupportedModelError
from cachedit.feature.kept import Kept
from cachedit.feature.options import Options
from cachedit.feature.place import Place, Residual
from cachedit.profile import Profile
from cachedit.run import Step
from cachedit.strategies.corrected import Corrected
from cachedit.strategy import Context, FeatureStrategy, Schedule, Site

Rows = dict[str, list[Any]]
MOST_CHECKED = 3  # prompts that are left out in turn
ENOUGH = 0.9  # of the error without; gains that are smaller than a tenth did not carry over to further prompts
CHUNK = 1 << 14  # positions that are held in float64 at a time
NO_VARIANCE = 1e-6  # share of the mean square below which a variance is rounding


class Forecasts(Measure):
    """Base of what compares a strategy's forecasts with the truth, along runs that compute every step.

    Forecasts are made from true features at the steps that the strategy would compute (teacher forcing), so an error at
    one step does not spoil what is measured at the next.

    Attributes:
        planned: the strategy with all options filled in.
        computed: the steps that it would compute.
    """

    stage: ClassVar[int] = 1
    planned: Corrected
    computed: tuple[int, ...]

    def __init__(self, strategy: FeatureStrategy) -> None:
        super().__init__(strategy)
        if not isinstance(strategy, Corrected):
            raise TypeError(
                f"{type(strategy).__name__} does not say which steps it computes; allowed: strategies that do, such as "
                "CacheQuant. Derive it from cachedit.strategies.cache_quant.Corrected."
            )

    @property
    def site(self) -> Site:
        """What the strategy reuses."""
        return self.strategy.sites[0]

    @property
    def sites(self) -> tuple[Site, ...]:
        """What the strategy reuses."""
        return (self.site,)

    def begin(self, profile: Profile | None) -> None:
        """Ask the strategy which steps it computes."""
        assert profile is not None
        planned = self.strategy.configured(profile)
        assert isinstance(planned, Corrected)
        self.profile, self.planned = profile, planned
        sigmas = None if profile.sigmas is None else tuple(profile.sigmas)
        self.schedule = Schedule(self.trial.num_inference_steps, sigmas=sigmas)
        self.computed = planned.computed(self.schedule, profile)

    def start(self, k: int) -> None:
        """Nothing is kept yet."""
        self._kept: dict[str, Kept] = {}
        self._branches: dict[str, None] = {}
        self._found: dict[tuple[str, int], Any] = {}

    def watch(self, step: Step, values: Mapping[Site, Residual]) -> None:
        """Keep a step that the strategy would compute, compare one that it would reuse; experts keep their own."""
        kept = self._kept.setdefault(step.expert, Kept([Place(self.site)], self.planned, self.profile, Options()))
        self._branches[step.branch] = None
        if step.index in self.computed or not kept.has(0, step.branch):
            kept.push(0, step.branch, step.index, values[self.site], False)
            kept.not_finite(step.index)
            return
        context = Context(
            step.index,
            step.timestep,
            step.sigma,
            self.schedule,
            kept.steps(0, step.branch),
            self.profile,
            step.branch,
            step.expert,
            site=self.site,
        )
        forecast = kept.forecast(0, context, (1.0,), False)
        foretold = tuple([forecast.value(k) for k in range(len(values[self.site]))])
        self._found[step.branch, step.index] = self.compare(foretold, values)

    def stop(self) -> dict[str, Any]:
        """The branches that were called, and what ``compare`` found for each of them and each reused step."""
        return {"branches": list(self._branches), "found": self._found}

    def compare(self, forecast: Residual, values: Mapping[Site, Residual]) -> Any:
        """How a forecast differs from the truth."""
        raise NotImplementedError

    def filled(self, rows: Mapping[tuple[str, int], Any], computed: Any, parts: Sequence[Any]) -> Rows:
        """Branch -> an entry for every step, ``computed`` where the strategy would compute."""
        steps = range(self.trial.num_inference_steps)
        return {branch: [rows.get((branch, step), computed) for step in steps] for branch in _branches(parts)}


class Correction(Forecasts):
    """CacheQuant's line per step and channel, ``a = cov(f, y) / var(f)`` and ``b = mean y - a mean f`` (2503.01323).

    f is the forecast, y the truth; both are pooled over samples, positions and prompts, and over the tensors of a site
    that has several. Errors are fed back through guidance and sampler, so lines that fit every step can still do harm
    to a run. They are therefore stored only if they help where they were not fitted: up to three prompts are run with
    the lines of all others, and their final latents must on average come nearer to the uncached ones, by a tenth at
    least. Otherwise a scale of 1 and a shift of 0 are stored.
    """

    makes: ClassVar[dict[str, tuple[str, ...]]] = {
        "correction_mask": ("step",),
        "correction_scale": ("step", "channel"),
        "correction_shift": ("step", "channel"),
    }
    stage: ClassVar[int] = 2

    @property
    def runs(self) -> int:
        """With and without the lines, for every prompt that is left out."""
        return 2 * len(self.trial.prompts[-MOST_CHECKED:])

    def compare(self, forecast: Residual, values: Mapping[Site, Residual]) -> torch.Tensor:
        """What least squares need."""
        return moments(forecast, values[self.site])

    def arrays(self, parts: list[Any]) -> Arrays:
        """The lines, if they help, and the steps that were computed while they were fitted."""
        helps = any(part["found"] for part in parts) and self._help(parts)
        return self._rows(range(len(parts)) if helps else [], parts)

    def _help(self, parts: Sequence[Any]) -> bool:
        """True if prompts' runs end nearer to the uncached ones with the lines of the others than without."""
        prompts = range(len(parts))
        checked = prompts[-MOST_CHECKED:]

        def ends(at: tuple[int, bool]) -> float:
            k, correction = at
            rows = self._rows([other for other in prompts if other != k] or [k], parts)
            profile = replace(self.profile, arrays=self.profile.arrays | rows, axes=self.profile.axes | _axes())
            truth = self.trial.latents(k)
            found = self.trial.latents(k, replace(self.planned, correction=correction), profile)
            return float((found - truth).norm() / truth.norm())

        tried = [(k, correction) for k in checked for correction in (False, True)]
        error = {False: 0.0, True: 0.0}
        for (_, correction), off in zip(tried, self.trial.map("correction", tried, ends), strict=True):
            error[correction] += off / len(checked)
        kept = error[True] < ENOUGH * error[False]
        self.notes["correction"] = {
            "kept": kept,
            "checked_on": f"{len(checked)} left out" if len(prompts) > 1 else "the prompt it was fitted on",
            "error_with": round(error[True], 6),
            "error_without": round(error[False], 6),
        }
        return kept

    def _rows(self, prompts: Sequence[int], parts: Sequence[Any]) -> Arrays:
        """Mask and lines of these prompts; without prompts lines that change nothing."""
        sums: dict[tuple[str, int], torch.Tensor] = {}
        for k in prompts:
            for at, found in parts[k]["found"].items():
                sums[at] = sums[at] + found if at in sums else found
        lines = {at: line(found) for at, found in sums.items()}
        channels = len(next(iter(lines.values()))[0]) if lines else 1
        steps = range(self.trial.num_inference_steps)
        return {
            "correction_mask": {branch: [int(step in self.computed) for step in steps] for branch in _branches(parts)},
            "correction_scale": self.filled({at: scale for at, (scale, _) in lines.items()}, [1.0] * channels, parts),
            "correction_shift": self.filled({at: shift for at, (_, shift) in lines.items()}, [0.0] * channels, parts),
        }


def moments(forecast: Residual, truth: Residual) -> torch.Tensor:
    """Per channel the number of pairs and the sums of f, y, f f and f y: [5, C], float64.

    Args:
        forecast: tensors of a site, [B, N, C] or [B, C, H, W] or [B, C, F, H, W].
        truth: as many of the same shapes.

    Raises:
        UnsupportedModelError: their numbers of channels differ.
    """
    widths = sorted({_by_channel(x).shape[1] for x in forecast})
    if len(widths) > 1:
        raise UnsupportedModelError(
            f"what is reused has tensors of {' and '.join(map(str, widths))} channels; allowed: one number, because a "
            "correction has one line per channel. Use a strategy without a correction."
        )
    total = torch.zeros(5, widths[0], dtype=torch.float64)
    for tensors in zip(forecast, truth, strict=True):
        for chunks in zip(*[_by_channel(x).split(CHUNK) for x in tensors], strict=True):
            f, y = (chunk.double() for chunk in chunks)
            sums = [torch.ones_like(f).sum(0), f.sum(0), y.sum(0), (f * f).sum(0), (f * y).sum(0)]
            total += torch.stack(sums).cpu()
    return total


def line(sums: torch.Tensor) -> tuple[list[float], list[float]]:
    """Least squares (scale, shift) per channel from ``moments``; (1, 0) where the forecast does not vary."""
    count, f, y, ff, fy = sums
    f, y, ff, fy = (total / count for total in (f, y, ff, fy))
    variance = ff - f * f
    varies = variance > NO_VARIANCE * ff
    scale = torch.where(varies, (fy - f * y) / torch.where(varies, variance, 1.0), 1.0)
    shift = torch.where(varies, y - scale * f, 0.0)
    return rounded(scale.tolist()), rounded(shift.tolist())


def _branches(parts: Sequence[Any]) -> list[str]:
    """The branches that were called in any run."""
    return list(dict.fromkeys(branch for part in parts for branch in part["branches"]))


def _by_channel(x: torch.Tensor) -> torch.Tensor:
    """[positions, C]; channels lie where ``cachedit.feature.place.along_channels`` has them."""
    return (x.movedim(1, -1) if x.ndim > 3 else x).reshape(-1, x.shape[1 if x.ndim > 3 else -1])


def _axes() -> dict[str, list[str]]:
    return {name: list(axes) for name, axes in Correction.makes.items() if axes != ("step",)}
