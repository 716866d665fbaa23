"""How much of its way a step of the sampler may go when its output is a forecast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from cachedit.calibration.measure import Arrays
from cachedit.calibration.measures.correction import Forecasts
from cachedit.feature.place import Residual
from cachedit.run import Step
from cachedit.strategy import FeatureStrategy, Output, Site


class StepScale(Forecasts):
    """ERTACache's ``phi = clip(1 - |v~ - v| / |v|, 0, 1)``, averaged over prompts (arXiv 2508.21091).

    v is the output of the denoiser, v~ what would stand for it, both by their L1 norms; 1 at computed steps. The paper
    knows v at run time only from the step after; calibrated, it is the step's own.
    """

    makes: ClassVar[dict[str, tuple[str, ...]]] = {"step_scale": ("step",)}

    def __init__(self, strategy: FeatureStrategy) -> None:
        super().__init__(strategy)
        self._scales: dict[tuple[str, int], list[float]] = {}

    @property
    def sites(self) -> tuple[Site, ...]:
        """What the strategy reuses, and the output itself."""
        return (self.site, Output())

    def compare(self, step: Step, forecast: Residual, values: Mapping[Site, Residual]) -> None:
        """Measure a forecast that differs from what is reused just as v~ differs from v."""
        pairs = zip(forecast, values[self.site], strict=True)
        moved = sum(float((f.float() - y.float()).abs().sum()) for f, y in pairs)
        level = sum(float(v.float().abs().sum()) for v in values[Output()])
        scale = min(max(1.0 - moved / level, 0.0), 1.0) if level > 0 else 1.0
        self._scales.setdefault((step.branch, step.index), []).append(scale)

    def arrays(self) -> Arrays:
        """The mean over prompts."""
        means = {at: round(sum(scales) / len(scales), 6) for at, scales in self._scales.items()}
        return {"step_scale": self.filled(means, 1.0)}
