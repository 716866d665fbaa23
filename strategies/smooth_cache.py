"""SmoothCache: reuse each kind of module for as long as it is known to stay alike."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from cachedit.profile import Profile
from cachedit.schedules import furthest
from cachedit.strategy import Axes, Context, FeatureStrategy, Module, Schedule, Site


@dataclass(frozen=True)
class SmoothCache(FeatureStrategy):
    """Reuse attention and feed-forward outputs while their measured change is small (arXiv 2411.10510).

    Of every kind of module the relative L1 change over k steps, averaged over layers and prompts, is measured once.
    After a computed step the kind is reused for the next k steps, k the largest up to ``max_skip_steps`` whose change
    is below ``alpha``; then it is computed again. So each kind has its own schedule. Every module keeps its output, the
    value before its gate: many times the memory of a cache of the whole stack.

    Ours, not the paper's: the schedules are solved anew for the noise levels of a run, so one profile serves any number
    of steps; of several branches the one that changes most counts; and a later expert begins anew. As in the released
    code, the last step is computed.

    Options left at None take the profile's recommendation, else the first value named below.

    alpha:          change from which on a module is computed (0.18; paper: 0.08 to 0.35, a higher one is faster).
    max_skip_steps: most reused steps in a row (3).
    """

    alpha: float | None = None
    max_skip_steps: int | None = None

    paper: ClassVar[str] = "arXiv 2411.10510"
    profile_arrays: ClassVar[Axes] = {"module_error": ("step", "gap")}
    needs_schedule: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range.
        """
        alpha, most = self.alpha, self.max_skip_steps
        if alpha is not None and (type(alpha) not in (int, float) or not 0 <= alpha < math.inf):
            raise ValueError(f"SmoothCache alpha={alpha!r}; allowed: a number, 0 or more, such as 0.18")
        if most is not None and (type(most) is not int or most < 1):
            raise ValueError(f"SmoothCache max_skip_steps={most!r}; allowed: an integer, 1 or more")

    @property
    def sites(self) -> tuple[Site, ...]:
        """Every kind of module."""
        return Module("attn"), Module("temporal"), Module("cross"), Module("mlp")

    def configured(self, profile: Profile | None) -> SmoothCache:
        """Open options from the profile's recommendation, else the defaults of the field."""
        known: dict[str, Any] = {"alpha": 0.18, "max_skip_steps": 3} | (profile.defaults if profile is not None else {})
        return replace(
            self, **{name: known[name] for name in ("alpha", "max_skip_steps") if getattr(self, name) is None}
        )

    def check_run(self, schedule: Schedule, profile: Profile | None) -> None:
        """Solve for the noise levels of the run, which fails where they lie outside of the measured ones."""
        assert profile is not None
        profile.errors("module_error", schedule)

    def should_compute(self, ctx: Context) -> bool | str:
        """Only when every kind has its turn."""
        assert ctx.profile is not None
        return all(ctx.step in self.computed(ctx, kind) for kind in ctx.profile.arrays["module_error"])

    def reuses(self, ctx: Context, site: Site) -> bool:
        """A kind that does not have its turn; one that was not measured is always computed."""
        assert ctx.profile is not None
        assert isinstance(site, Module)
        known = site.kind in ctx.profile.arrays["module_error"]
        return known and ctx.step not in self.computed(ctx, site.kind)

    def computed(self, ctx: Context, kind: str) -> frozenset[int]:
        """Steps of the current expert at which modules of a kind are computed."""
        assert ctx.profile is not None
        profile, schedule, start, steps = ctx.profile, ctx.schedule, ctx.expert_start, ctx.expert_steps
        stop = None if steps is None else start + steps

        def solve() -> frozenset[int]:
            assert self.alpha is not None
            assert self.max_skip_steps is not None
            rows = profile.errors("module_error", schedule)[kind][start:stop]
            return frozenset(
                start + step for step in furthest([r[: self.max_skip_steps + 1] for r in rows], self.alpha)
            )

        return profile.once((self, kind, schedule, start, stop), solve)
