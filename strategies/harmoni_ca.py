"""HarmoniCa: a router, trained once, says which modules of which step are computed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from cachedit.profile import Profile
from cachedit.strategy import Axes, Context, FeatureStrategy, Module, Schedule, Site


@dataclass(frozen=True)
class HarmoniCa(FeatureStrategy):
    """Reuse the modules that a trained router leaves out (arXiv 2410.01723).

    The router holds one number in (0, 1) per step and module; a module is computed at a step where that number is
    above ``threshold`` and gives what it last computed otherwise. It is trained by step-wise denoising: the student,
    whose modules give ``(1 - s) * kept + s * fresh``, follows its own trajectory and is drawn to what the teacher gives
    on it, at a price of ``beta`` per computed module; the steps weigh as much as caching at them alone changes the
    final latent (the paper's image error proxy). A router is valid for the steps that it was trained on, and no others.

    Ours, not the paper's: cross-attention modules have a gate of their own; the step weights are taken once, before the
    training, by leaving out all modules at one step at a time.

    threshold:     a module is computed above it.
    beta:          price of a computed module in the training loss; a higher one reuses more.
    iterations:    updates of the router in training, one per denoiser call.
    learning_rate: of AdamW in training.
    """

    threshold: float = 0.1
    beta: float = 1e-4
    iterations: int = 2000
    learning_rate: float = 0.05

    paper: ClassVar[str] = "arXiv 2410.01723"
    profile_arrays: ClassVar[Axes] = {"router": ("step", "module")}
    needs_schedule: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range.
        """
        if not 0 < self.threshold < 1:
            raise ValueError(f"HarmoniCa threshold={self.threshold!r}; allowed: a number between 0 and 1")
        if self.beta < 0 or self.learning_rate <= 0:
            raise ValueError(
                f"HarmoniCa beta={self.beta!r}, learning_rate={self.learning_rate!r}; allowed: 0 or more, above 0"
            )
        if type(self.iterations) is not int or self.iterations < 1:
            raise ValueError(f"HarmoniCa iterations={self.iterations!r}; allowed: a positive integer")

    @property
    def sites(self) -> tuple[Site, ...]:
        """Every module before its gate."""
        return (Module("attn"), Module("temporal"), Module("cross"), Module("mlp"))

    def check_run(self, schedule: Schedule, profile: Profile | None) -> None:
        """Refuse steps that the router was not trained on."""
        assert profile is not None
        profile.check_same_schedule(schedule, "HarmoniCa")

    def should_compute(self, ctx: Context) -> bool | str:
        """True if the router leaves out no module of this step."""
        assert ctx.profile is not None
        kinds = ctx.profile.arrays["router"].values()
        return "the router leaves out no module" if all(not self._left_out(rows[ctx.step]) for rows in kinds) else False

    def reuses(self, ctx: Context, site: Site) -> bool | Collection[int]:
        """The modules of a kind that the router leaves out at this step."""
        assert isinstance(site, Module)
        assert ctx.profile is not None
        rows = ctx.profile.arrays["router"].get(site.kind)
        return self._left_out(rows[ctx.step]) if rows is not None else False

    def _left_out(self, row: list[float]) -> list[int]:
        return [unit for unit, gate in enumerate(row) if gate <= self.threshold]
