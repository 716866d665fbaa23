"""Delta-Cache (Delta-DiT): reuse the rear blocks while the outline forms, the front blocks while details do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from cachedit.schedules import every
from cachedit.strategy import Context, FeatureStrategy, Site, Stack


@dataclass(frozen=True)
class DeltaCache(FeatureStrategy):
    """Reuse what a range of blocks adds, the range that matters less at this stage (arXiv 2406.01125).

    Front blocks draw outlines, which form in the early steps, and rear blocks details, which form late. So between
    computed steps the early stage reuses what the rear blocks add and runs the front ones, the late stage the reverse.
    At the switch the other range's residual must be there, so both are kept at every computed step.

    The paper's interval, number of blocks and step of the switch are options; how it sets the switch for each model is
    not known to us, and half of the run is ours. The authors of TaylorSeer compare with a variant for FLUX, all single
    blocks at every stage: ``blocks=["single_transformer_blocks"], share=1.0, interval=3``.

    share:    share of the blocks in either range, more than 0 and up to 1 (paper: 21 of 28).
    interval: one step in ``interval`` is computed (paper: 2).
    switch:   share of the steps that belong to the early stage; 0 always reuses the front, 1 always the rear.
    """

    share: float = 0.75
    interval: int = 2
    switch: float = 0.5

    paper: ClassVar[str] = "arXiv 2406.01125"
    needs_schedule: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range.
        """
        every(1, self.interval)
        for name, allowed in (("share", "above 0 and up to 1"), ("switch", "from 0 to 1")):
            value: Any = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value <= 1 or (name == "share" and value == 0):
                raise ValueError(f"DeltaCache {name}={value!r}; allowed: a share {allowed}")

    @property
    def front(self) -> Stack:
        """The leading blocks."""
        return Stack(0, float(self.share))

    @property
    def rear(self) -> Stack:
        """The last blocks."""
        return Stack(-float(self.share), None)

    @property
    def sites(self) -> tuple[Site, ...]:
        """Both ranges."""
        return self.front, self.rear

    def should_compute(self, ctx: Context) -> bool:
        """One step in ``interval``; a later expert begins anew."""
        return (ctx.step - ctx.computed_steps[0]) % self.interval == 0

    def reuses(self, ctx: Context, site: Site) -> bool:
        """The rear in the early stage, then the front."""
        assert ctx.schedule.num_steps is not None
        early = ctx.step < self.switch * ctx.schedule.num_steps
        return site == (self.rear if early else self.front)
