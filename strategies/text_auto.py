"""Auto for language models: exact where the attention allows it, else what a probe has found."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from cachedit.errors import ProfileError
from cachedit.profile import Profile
from cachedit.registry import Strategy
from cachedit.strategies.block_exact import BlockExact
from cachedit.strategies.dkv_cache import DkvCache
from cachedit.strategies.no_cache import NoCache
from cachedit.text.fingerprint import fingerprint
from cachedit.text.layouts import Layout
from cachedit.text.options import TextOptions
from cachedit.text.probe import ARRAYS, attended
from cachedit.text.strategy import TextStrategy

MAKE_ONE = "cachedit probe MODEL"


@dataclass(frozen=True)
class TextAuto(TextStrategy, abstract=True):
    """The strategy for a language model that is known to give what no cache gives (ours); what "auto" means for one.

    A profile that is given decides. Else, where no token sees a later block, blocks are kept exactly. Else a profile of
    this very model decides, which ``cachedit probe`` has made. Without one the prompt is kept where it does not see the
    answer, which is exact too; else nothing, and a warning says so.
    """

    name: ClassVar[str] = "auto"
    reads_profile: ClassVar[bool] = True

    def configured(
        self, layout: Layout, options: TextOptions, profile: Profile | str | Path | None
    ) -> tuple[TextStrategy, TextOptions]:
        """The chosen strategy, and the options with what the model tells of its attention.

        Raises:
            ProfileError: a profile is of another model, or says nothing of text.
            UnsupportedModelError: the attention of the model is neither full nor block-causal.
            ValueError: the model has blocks of another length.
        """
        from cachedit.shipped import find_profile, fitting_profile  # which looks strategies up while it loads

        options = attended(layout.model, options)
        if profile is None and options.attention == "block":
            return BlockExact(), options
        prints = fingerprint(layout.model)
        if profile is None:
            found = fitting_profile(prints, "", self.name, ARRAYS)
            if found is not None and found.provenance.get("attention", options.attention) != options.attention:
                found = None  # it was probed with tokens that see other ones
        else:
            found = find_profile(profile)
            _check_of_model(found, prints)
        if found is not None:
            return _recommended(found), options
        if options.attention == "prefix":
            return DkvCache("prefill"), options
        warnings.warn(
            f"cachedit: auto knows of no probe of this {prints['class']} with full attention, so it keeps nothing. "
            f"Make one: {MAKE_ONE}",
            UserWarning,
            stacklevel=2,
        )
        return NoCache(), options


def _check_of_model(profile: Profile, prints: dict[str, object]) -> None:
    """Raise ProfileError unless the profile comes from a probe of a model with this fingerprint."""
    name = profile.name or "without a name"
    if not set(ARRAYS) <= set(profile.arrays):
        raise ProfileError(
            f"profile {name} holds {', '.join(profile.arrays)}; allowed for a language model: one that a probe has "
            f"made. Make one: {MAKE_ONE}"
        )
    differences = profile.differences(prints)
    if differences:
        raise ProfileError(
            f"profile {name} was made for another model: {'; '.join(differences)}. Make one for this model: {MAKE_ONE}"
        )


def _recommended(profile: Profile) -> TextStrategy:
    """What the profile recommends."""
    try:
        found = Strategy.find(profile.strategy, profile.defaults)
    except (TypeError, ValueError) as error:
        raise ProfileError(
            f"profile {profile.name or 'without a name'} recommends what this version of cachedit does not know: "
            f"{error} Probe again: {MAKE_ONE}"
        ) from error
    if not isinstance(found, TextStrategy):
        raise ProfileError(
            f"profile {profile.name or 'without a name'} recommends {found.name}, which is no strategy for text. "
            f"Probe again: {MAKE_ONE}"
        )
    return found
