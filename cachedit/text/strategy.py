"""What a text cache is asked: which tokens of the sequence are computed at a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from cachedit.profile import Profile
from cachedit.registry import Strategy
from cachedit.text.options import COMMON, TextOptions

if TYPE_CHECKING:
    from cachedit.text.layouts import Layout
    from cachedit.text.listening import LayerView
    from cachedit.text.state import DecodeState


@dataclass(frozen=True)
class StepPlan:
    """What a step computes.

    Attributes:
        compute: tokens whose keys and values are computed [B, S]. Tokens whose id has changed since they were computed,
            and those whose logits are wanted, are computed whether they are in it or not.
    """

    compute: torch.Tensor


@dataclass(frozen=True)
class LayerPlan:
    """What a layer computes of a row.

    Attributes:
        compute: tokens that are computed [S].
        checked: tokens whose values are computed and compared with the kept ones [S].
        count: of the checked ones, so many whose values have turned most are computed too.
    """

    compute: torch.Tensor
    checked: torch.Tensor
    count: int


@dataclass(frozen=True)
class TextStrategy(Strategy, abstract=True):
    """A cache of keys and values of a diffusion language model. Subclass it as a frozen dataclass.

    Everything a plan may look at is in the state; rows of a batch are planned independently of each other.
    """

    engine: ClassVar[str] = "cachedit.text.attachment"
    common_options: ClassVar[tuple[str, ...]] = COMMON
    caches: ClassVar[bool] = True  # False: no keys and values are kept at all
    block_causal: ClassVar[bool] = False  # True: right only where no token sees a later block
    needs_entropy: ClassVar[bool] = False
    reads_profile: ClassVar[bool] = False  # True: ``configured`` takes one
    listens: ClassVar[bool] = False  # True: ``reads`` is asked in every layer
    grows: ClassVar[bool] = False  # True: ``grows_after`` is asked in every layer; takes ``listens``
    by_layer: ClassVar[bool] = False  # True: ``layer_plan`` is asked in every layer instead of ``plan``

    @classmethod
    def trials(cls) -> Sequence[TextStrategy]:
        """Settings that a probe of a model tries out; none, unless a subclass names some."""
        return ()

    def configured(
        self, layout: Layout, options: TextOptions, profile: Profile | str | Path | None
    ) -> tuple[TextStrategy, TextOptions]:
        """What is really put on a model: this strategy, unless a subclass chooses by what is known of the model.

        Raises:
            TypeError: a profile is given, and the strategy reads none.
        """
        if profile is not None:
            raise TypeError(f"{type(self).__name__} reads no profile; drop profile={str(profile)[:80]!r}")
        return self, options

    def candidates(self, state: DecodeState) -> torch.Tensor:
        """Masked tokens that this step may commit [B, S], some in every row that has any; those of the block."""
        return state.masked & state.in_block

    def reads(self, view: LayerView) -> torch.Tensor | None:
        """Slots that the queries of a layer read, bool [N, 1 or Hk, W]; None for all of them.

        What is worth remembering of the layer goes into ``view.state.notes``.
        """
        return None

    def grows_after(self, view: LayerView) -> bool:
        """Whether all layers behind this one compute every token; asked after ``reads``, one row at a time."""
        return False

    def layer_plan(self, state: DecodeState, row: int, layer: int) -> LayerPlan:
        """What a layer computes of a row.

        Raises:
            NotImplementedError: the strategy does not plan by layer.
        """
        raise NotImplementedError(type(self).__name__)

    @property
    def needs_foresight(self) -> bool:
        """True if the plan asks which tokens this step will commit, so that a rule must know before the model does."""
        return False

    def plan(self, state: DecodeState) -> StepPlan:
        """What this step computes; everything, unless a subclass knows better."""
        return StepPlan(state.window)
