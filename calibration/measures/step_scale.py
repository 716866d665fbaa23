"""How much of its way a step of the sampler may go when its output is a forecast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from cachedit.calibration.measure import Arrays
from cachedit.calibration.measures.correction import Forecasts
from cachedit.feature.place import Residual
from cachedit.strategy import Output, Site


class StepScale(Forecasts):
    """ERTACache's ``phi = clip(1 - |v~ - v| / |v|, 0, 1)``, averaged over prompts (arXiv 2508.21091).

    v is the output of the denoiser, v~ what would stand for it, both by their L1 norms; 1 at computed steps. The paper
    knows v at run time only from the step after; calibrated, it is the step's own.
    """

    makes: ClassVar[dict[str, tuple[str, ...]]] = {"step_scale": ("step",)}

    @property
    def sites(self) -> tuple[Site, ...]:
        """What the strategy reuses, and the output itself."""
        return (self.site, Output())

    def compare(self, forecast: Residual, values: Mapping[Site, Residual]) -> float:
        """Measure a forecast that differs from what is reused just as v~ differs from v."""
        pairs = zip(forecast, values[self.site], strict=True)
        moved = sum(float((f.float() - y.float()).abs().sum()) for f, y in pairs)
        level = sum(float(v.float().abs().sum()) for v in values[Output()])
        return min(max(1.0 - moved / level, 0.0), 1.0) if level > 0 else 1.0

    def arrays(self, parts: list[Any]) -> Arrays:
        """The mean over prompts."""
        scales: dict[tuple[str, int], list[float]] = {}
        for part in parts:
            for at, scale in part["found"].items():
                scales.setdefault(at, []).append(scale)
        means = {at: round(sum(seen) / len(seen), 6) for at, seen in scales.items()}
        return {"step_scale": self.filled(means, 1.0, parts)}
