"""PAB (Pyramid Attention Broadcast): reuse attention in the middle of the run, each kind at its own pace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cachedit.strategies.checks import check_count
from cachedit.strategies.clocks import check_timesteps, training_time
from cachedit.strategy import Context, FeatureStrategy, Module, Site


@dataclass(frozen=True)
class PAB(FeatureStrategy):
    """Reuse attention outputs while they change least, cross-attention for the longest (arXiv 2408.12588).

    Outside of a range of timesteps everything is computed. Inside it every kind of attention is computed once it is as
    old as its interval; feed-forward modules always are.

    Timesteps are those of training, 1000 at pure noise. On flow models they are 1000 sigma after the shift, so a range
    covers more or fewer steps than on the models of the paper. Where a model counts otherwise, 1000 times the noise
    level stands for them, and the place in the run where that is not known either.

    Ours: a kind's age counts from the step at which it was last computed. The published code counts the calls of the
    run (computed at multiples of the interval), which may compute a kind again right after the range begins.

    spatial:   age at which self- or joint attention is computed again; 1 computes it always (paper: 2).
    temporal:  the same for attention along time (paper: 4).
    cross:     the same for cross-attention (paper: 6).
    timesteps: limits between which attention is reused, exclusive (paper: 100 and 800).
    """

    spatial: int = 2
    temporal: int = 4
    cross: int = 6
    timesteps: tuple[float, float] = (100, 800)

    paper: ClassVar[str] = "arXiv 2408.12588"
    needs_schedule: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range.
        """
        check_count(self, "spatial", "temporal", "cross", lowest=1)
        if not self._intervals:
            raise ValueError("PAB spatial=1, temporal=1, cross=1 reuse nothing; allowed: at least one above 1")
        check_timesteps("PAB", "timesteps", self.timesteps)

    @property
    def _intervals(self) -> dict[Site, int]:
        pace = (("attn", self.spatial), ("temporal", self.temporal), ("cross", self.cross))
        return {Module(kind): interval for kind, interval in pace if interval > 1}

    @property
    def sites(self) -> tuple[Site, ...]:
        """The kinds of attention that are ever reused."""
        return tuple(self._intervals)

    def should_compute(self, ctx: Context) -> bool | str:
        """Everything outside of the range, and where all kinds are due."""
        if not self.timesteps[0] < training_time(ctx.schedule, ctx.step) < self.timesteps[1]:
            return "outside of the timesteps"
        return all((ctx.step - ctx.computed_steps[-1]) % interval == 0 for interval in self._intervals.values())

    def reuses(self, ctx: Context, site: Site) -> bool:
        """A kind that is younger than its interval."""
        return bool(ctx.computed_steps) and ctx.step - ctx.computed_steps[-1] < self._intervals[site]
