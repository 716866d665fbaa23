"""FORA: reuse what the attention and feed-forward modules give between every N-th step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cachedit.schedules import every
from cachedit.strategy import Context, FeatureStrategy, Module, Site


@dataclass(frozen=True)
class FORA(FeatureStrategy):
    """Compute one step in ``interval`` and reuse the outputs of all modules in between (arXiv 2407.01425).

    A module's output is kept before its gate, so gates, norms and what the model adds to the stream stay fresh.

    The paper has class- and text-conditioned DiTs with attention and feed-forward modules; ours also caches
    cross-attention and attention along time where a model has them.

    interval: steps 0, N, 2 N, ... are computed; 1 never reuses (paper: 3 for quality, up to 7 for speed).
    """

    interval: int = 3

    paper: ClassVar[str] = "arXiv 2407.01425"

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range.
        """
        every(1, self.interval)

    @property
    def sites(self) -> tuple[Site, ...]:
        """Every kind of module; a model has those that it has."""
        return Module("attn"), Module("temporal"), Module("cross"), Module("mlp")

    def should_compute(self, ctx: Context) -> bool:
        """One step in ``interval``; a later expert begins anew."""
        return (ctx.step - ctx.computed_steps[0]) % self.interval == 0
