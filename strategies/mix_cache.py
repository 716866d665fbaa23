"""MixCache: at every reused step cache what costs least there: the step, the guidance or a range of blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from cachedit.strategies.checks import check_count
from cachedit.strategy import Axes, Context, FeatureStrategy, Guidance, Site, Stack

REPEATED = 5


@dataclass(frozen=True)
class MixCache(FeatureStrategy):
    """Choose at every reused step between the whole stack, the guidance and a range of blocks (arXiv 2508.12691).

    Every site has a cost: how much it changed between the two steps at which it was last computed, times its impact on
    the result, five times as much if it was reused at the last reused step. The cheapest is reused. A model that is
    called once per step has no guidance to choose.

    The paper (known to us from its abstract and a survey) ends the warm-up when the output has settled, and makes the
    interval longer or shorter by two thresholds; neither those nor its blocks are known. Ours: a fixed warm-up,
    interval and range; costs are divided by the share of the model that a site saves, without which the smallest would
    always win. The sample of a batch that changes most decides.

    warmup:   share of the leading steps that is always computed.
    interval: one step in ``interval`` is computed after it; 1 never reuses.
    span:     the range of blocks, as shares of the depth.
    impact:   of the stack, the guidance and the range on the result, where no profile says it for every step
              (``cachedit calibrate --strategy mixcache``); only their ratios matter.
    """

    warmup: float = 0.2
    interval: int = 3
    span: tuple[float, float] = (0.25, 0.75)
    impact: tuple[float, float, float] = (1.0, 1.0, 1.0)

    paper: ClassVar[str] = "arXiv 2508.12691"
    profile_arrays: ClassVar[Axes] = {"impact": ("step",)}
    needs_schedule: ClassVar[bool] = True
    measures_change: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range.
        """
        if not _is_number(self.warmup) or not 0 <= self.warmup <= 1:
            raise ValueError(f"MixCache warmup={self.warmup!r}; allowed: a share from 0 to 1")
        check_count(self, "interval", lowest=1)
        numbers = isinstance(self.span, tuple) and len(self.span) == 2 and all(map(_is_number, self.span))
        if not numbers or not 0 <= self.span[0] < self.span[1] <= 1 or self.span == (0, 1):
            raise ValueError(f"MixCache span={self.span!r}; allowed: two rising shares from 0 to 1, not both ends")
        numbers = isinstance(self.impact, tuple) and len(self.impact) == 3 and all(map(_is_number, self.impact))
        if not numbers or not min(self.impact) > 0:
            raise ValueError(f"MixCache impact={self.impact!r}; allowed: three positive numbers")

    @property
    def needed_arrays(self) -> Axes:
        """None: a profile is used if it is given."""
        return {}

    @property
    def sites(self) -> tuple[Site, ...]:
        """The stack, the guidance and the range."""
        return Stack(), Guidance(), Stack(float(self.span[0]), float(self.span[1]))

    def should_compute(self, ctx: Context) -> bool | str:
        """The warm-up, then one step in ``interval``."""
        if ctx.step - ctx.expert_start < self.warmup * (ctx.expert_steps or ctx.schedule.num_steps or 0):
            return "warm-up"
        if not ctx.changes:
            return "no two computed steps yet"
        return ctx.step - ctx.computed_steps[-1] >= self.interval

    def reuses(self, ctx: Context, site: Site) -> bool:
        """The site that costs least."""
        saved = (1.0, 0.5, self.span[1] - self.span[0])
        impacts: tuple[float, ...] = self.impact
        if ctx.profile is not None:
            rows = ctx.profile.rows("impact", ctx.schedule)
            impacts = tuple([rows[str(k)][ctx.step] if str(k) in rows else impact for k, impact in enumerate(impacts)])
        costs = {
            one: ctx.changes[one] * impact / share * (REPEATED if one in ctx.reused else 1)
            for one, impact, share in zip(self.sites, impacts, saved, strict=True)
            if one in ctx.changes
        }
        return site == min(costs, key=lambda one: costs[one])


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)
