"""ProfilingDiT: reuse the blocks that serve the background, always compute those that serve the foreground."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from cachedit.profile import Profile
from cachedit.schedules import every, shrinking
from cachedit.strategy import Axes, Context, FeatureStrategy, Site, Stack

DEFAULTS: dict[str, Any] = {"share": 0.65, "warmup": 6, "interval": 0, "largest": 0.24, "smallest": 0.06}


@dataclass(frozen=True)
class ProfilingDiT(FeatureStrategy):
    """Between computed steps, skip every run of background blocks and add its last delta (arXiv 2504.03140).

    Neighbouring background blocks form a run, whose delta is what leaves it minus what enters it. Foreground blocks are
    computed at every step. After the warm-up the gaps between the steps that compute all blocks shrink linearly.
    Options left at None take the profile's recommendation, else the value named below.

    The paper calls a block background if its attention seldom rests on the foreground, which takes a segmentation model
    to tell. Ours: background are the ``share`` of the blocks whose deltas drift least between computed steps, a cheap
    substitute that looks at the features alone; gaps are shares of the run, equal to the paper's at 50 steps.

    background: indices of the background blocks, in execution order over all lists; None: by ``share``.
    share:      of the blocks, that is background (0.65; paper: 38 of HunyuanVideo's 60 blocks, 28 of Wan's 40).
    warmup:     this step and all before it are computed (6, as in the paper).
    interval:   steps from one computed step to the next (the released code: 6); 0 lets the gaps shrink (0).
    largest:    first gap, as a share of the run (0.24, which is 12 of 50 steps).
    smallest:   what the gaps shrink to, as a share of the run (0.06).
    """

    background: tuple[int, ...] | None = None
    share: float | None = None
    warmup: int | None = None
    interval: int | None = None
    largest: float | None = None
    smallest: float | None = None

    paper: ClassVar[str] = "arXiv 2504.03140"
    profile_arrays: ClassVar[Axes] = {"block_drift": ("block",)}
    needs_schedule: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range.
        """
        blocks = self.background
        given = isinstance(blocks, tuple) and all(type(block) is int and block >= 0 for block in blocks)
        if blocks is not None and not (given and blocks and len(set(blocks)) == len(blocks)):
            raise ValueError(f"ProfilingDiT background={blocks!r}; allowed: a tuple of block indices, each once")
        for name in ("warmup", "interval"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 0):
                raise ValueError(f"ProfilingDiT {name}={value!r}; allowed: an integer, 0 or more, or None")
        for name in ("share", "largest", "smallest"):
            value = getattr(self, name)
            if value is not None and (type(value) not in (int, float) or not 0 < value <= 1):
                raise ValueError(f"ProfilingDiT {name}={value!r}; allowed: a share above 0, up to 1, or None")
        if self.largest is not None and self.smallest is not None and self.largest < self.smallest:
            raise ValueError(f"ProfilingDiT largest={self.largest!r}; allowed: smallest={self.smallest!r} or more")

    @property
    def needed_arrays(self) -> Axes:
        """None where the background is given."""
        return self.profile_arrays if self.background is None else {}

    @property
    def sites(self) -> tuple[Site, ...]:
        """One per run of background blocks; the whole stack while these are not known."""
        runs: list[Stack] = []
        for block in sorted(self.background or ()):
            start = runs.pop().start if runs and runs[-1].stop == block else block
            runs.append(Stack(start, block + 1))
        return tuple(runs) or (Stack(),)

    def configured(self, profile: Profile | None) -> ProfilingDiT:
        """Open options from the profile's recommendation, else the defaults; the background from the drifts."""
        recommended = DEFAULTS | ({} if profile is None else dict(profile.defaults))
        open_fields = [f.name for f in fields(self) if getattr(self, f.name) is None and f.name in DEFAULTS]
        chosen = replace(self, **{name: recommended[name] for name in open_fields})
        if chosen.background is not None or profile is None:
            return chosen
        assert chosen.share is not None
        drift = [max(branches) for branches in zip(*profile.arrays["block_drift"].values(), strict=True)]
        calmest = sorted(range(len(drift)), key=drift.__getitem__)
        return replace(chosen, background=tuple(sorted(calmest[: max(1, round(chosen.share * len(drift)))])))

    def should_compute(self, ctx: Context) -> bool | str:
        """By the schedule; a later expert begins anew."""
        assert self.warmup is not None
        position = ctx.step - ctx.computed_steps[0]
        if position <= self.warmup:
            return "warm-up"
        return position in self.computed(ctx.expert_steps or ctx.schedule.num_steps or 0)

    def computed(self, steps: int) -> tuple[int, ...]:
        """The steps that compute all blocks, in a run of so many."""
        assert self.warmup is not None
        if self.interval:
            return every(steps, self.interval, self.warmup + 1)
        assert self.largest is not None
        assert self.smallest is not None
        return _shrinking(steps, self.warmup, self.largest, self.smallest)


@functools.lru_cache
def _shrinking(steps: int, warmup: int, largest: float, smallest: float) -> tuple[int, ...]:
    """Gaps are even at 50 steps, as in the paper's list, and as coarse a share of the run at other numbers of steps."""
    multiple = max(1, round(steps / 25))
    least = max(multiple, smallest * steps)
    return shrinking(steps, warmup, max(least, largest * steps), least, multiple)
