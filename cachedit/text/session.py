"""What is known of a language model that is decoded with a cache, and the record of its last run."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from cachedit.errors import UnsupportedModelError
from cachedit.profile import Profile
from cachedit.text.layouts import Layout, layout_of
from cachedit.text.options import Attention, TextOptions
from cachedit.text.record import TextRun
from cachedit.text.strategy import TextStrategy

ATTRIBUTE = "_cachedit_text"
_last_runs: weakref.WeakKeyDictionary[Any, TextRun] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Setting:
    """A model, how it is called, and the strategy for it."""

    model: nn.Module
    layout: Layout
    strategy: TextStrategy
    options: TextOptions

    @classmethod
    def of(
        cls,
        model: Any,
        strategy: TextStrategy,
        options: TextOptions,
        profile: Profile | str | Path | None = None,
    ) -> Setting:
        """The setting of a model.

        Raises:
            UnsupportedModelError: no text cache knows the model.
            ProfileError: the profile does not fit the model.
            TypeError: the strategy reads no profile.
        """
        layout = layout_of(model)
        return cls(model, layout, *strategy.configured(layout, options, profile))

    @property
    def shift(self) -> int:
        """The logits at a token are for the token so many places later."""
        return self.layout.shift if self.options.shift is None else self.options.shift

    def attention(self, otherwise: Attention = "full") -> Attention:
        """Which tokens see each other, see ``TextOptions``.

        Raises:
            UnsupportedModelError: the strategy is right only for the other one.
        """
        found = self.options.attention or self.layout.attention or otherwise
        if self.strategy.block_causal and found != "block":
            raise UnsupportedModelError(
                f"{type(self.strategy).__name__} is exact only where no token sees a later block, and "
                f"{type(self.model).__name__} has {found} attention as far as is known. Allowed: a strategy for full "
                "attention, or attention='block' if the model was trained with block-causal attention."
            )
        return found

    def mask_token_id(self) -> int:
        """Id of the mask token.

        Raises:
            ValueError: neither the options nor the configuration of the model tell.
        """
        found = self.options.mask_token_id
        if found is None:
            found = getattr(getattr(self.model, "config", None), "mask_token_id", None)
        if found is None:
            raise ValueError(
                f"mask_token_id is not known, and the configuration of {type(self.model).__name__} has none. Pass "
                "mask_token_id=, such as tokenizer.mask_token_id."
            )
        return int(found)


def remember(target: Any, run: TextRun) -> None:
    """Keep the record of a run on ``target``."""
    _last_runs[target] = run


def latest(target: Any) -> TextRun | None:
    """Record of the last run on ``target``; None before the first."""
    try:
        return _last_runs.get(target)
    except TypeError:  # not weakly referable: nothing was ever run on it
        return None
