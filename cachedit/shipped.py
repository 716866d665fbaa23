"""Finding the profile of a model: by name, by file, from the hub, or by the fingerprint of its denoiser."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from cachedit import hub, user_profiles
from cachedit.errors import ProfileError
from cachedit.profile import Profile
from cachedit.strategy import Axes, canonical

T = TypeVar("T")
MAGNITUDE: Axes = {"magnitude_ratio": ("step",)}


def fingerprint(denoiser: nn.Module, stack: Sequence[str], experts: int = 1) -> dict[str, Any]:
    """What tells models of one class apart: depth, width, channels, guidance embedding, number of experts."""
    config = getattr(denoiser, "config", {})
    heads, head_dim = config.get("num_attention_heads"), config.get("attention_head_dim")
    return {
        "class": type(denoiser).__name__,
        "blocks": {name: len(denoiser.get_submodule(name)) for name in stack},  # type: ignore[arg-type]
        "width": heads * head_dim if isinstance(heads, int) and isinstance(head_dim, int) else None,
        "in_channels": config.get("in_channels"),
        "out_channels": config.get("out_channels") or config.get("in_channels"),
        "guidance_embeds": config.get("guidance_embeds"),
        "experts": experts,
    }


def shipped() -> dict[str, Profile]:
    """Name -> profile of everything that comes with the library, samples included."""
    return dict(_shipped())


@functools.cache
def _shipped() -> dict[str, Profile]:
    folders = [resources.files("cachedit.calibration") / "profiles", resources.files("cachedit.samples") / "profiles"]
    files = [file for folder in folders if folder.is_dir() for file in folder.iterdir() if file.name.endswith(".json")]
    profiles = [Profile.from_json(file.read_text(encoding="utf-8"), file.name) for file in files]
    return {profile.name: profile for profile in sorted(profiles, key=lambda p: p.name)}


def resolve(
    profile: Profile | str | Path | None,
    fingerprint: Mapping[str, Any],
    model_name: str,
    strategy: str = "the strategy",
    arrays: Axes = MAGNITUDE,
) -> Profile:
    """The profile to use: the one that is asked for, else one of the user's that fits the model, else a shipped one.

    Args:
        profile: what the user passed.
        fingerprint: of the first denoiser.
        model_name: ``_name_or_path`` of the pipeline or module, to choose between models of one fingerprint.
        strategy: name of the class that needs the profile, for errors.
        arrays: what it must hold, and over which axes.

    Raises:
        ProfileError: nothing fits, or more than one does and the name does not decide.
    """
    if profile is None:
        found = fitting_profile(fingerprint, model_name, strategy, [*arrays])
        if found is None:
            raise _nothing_fits(fingerprint, strategy, [*arrays])
        chosen = found
    else:
        chosen = find_profile(profile)
        chosen.check_fits(fingerprint)
    chosen.check_arrays(arrays, strategy)
    return chosen


def find_profile(profile: Profile | str | Path) -> Profile:
    """The profile that is asked for.

    Args:
        profile: itself, a file, ``hub:org/name`` (see ``cachedit.hub``), or a name in any spelling; a profile of the
            user comes before a shipped one of the same name.

    Raises:
        ProfileError: there is none, or it cannot be read.
    """
    if isinstance(profile, Profile):
        return profile
    asked = str(profile)
    if asked.startswith(hub.PREFIX):
        return Profile.load(hub.download(asked))
    if os.path.isfile(profile):
        return Profile.load(profile)
    own = user_profiles.stored()
    entry = _spelled(asked, {entry.name: entry for entry in own})
    if entry is not None:
        return entry.read()
    supplied = _spelled(asked, shipped())
    if supplied is not None:
        return supplied
    if os.path.dirname(asked) or asked.endswith(".json") or os.path.exists(profile):
        return Profile.load(profile)  # which says what is wrong with the file
    names = dict.fromkeys([*(entry.name for entry in own), *shipped()])
    raise ProfileError(
        f"no profile is called {asked!r}. Allowed: a file, hub:org/name, or one of {', '.join(names)}. "
        "List: cachedit profile list"
    )


def _spelled(asked: str, named: Mapping[str, T]) -> T | None:
    """What is called so, or so in another spelling."""
    return named.get(asked) or {canonical(name): found for name, found in named.items()}.get(canonical(asked))


def fitting_profile(
    fingerprint: Mapping[str, Any], model_name: str, strategy: str, arrays: Sequence[str]
) -> Profile | None:
    """The profile that fits the model; None if there is none.

    The name of a model tells more than its fingerprint, and the user's come first. Takes the arguments of ``resolve``.

    Raises:
        ProfileError: more than one fits and the name does not decide.
    """
    every = _shipped_for(strategy, arrays)
    fitting = [profile for profile in every.values() if profile.model and not profile.differences(fingerprint)]
    named = [profile for profile in fitting if profile.model and _names(model_name, profile.model["names"])]
    own = _own(fingerprint, model_name, strategy, arrays, elsewhere=len(named) == 1)
    if own is not None:
        return own
    if len(named) == 1:
        return named[0]
    if len(fitting) == 1 and _unmistakable(fitting[0], every.values()):
        return fitting[0]
    if fitting:
        raise ProfileError(
            f"{len(fitting)} shipped profiles fit {_shape(fingerprint)}, and its name {model_name!r} does "
            f"not decide. Choose: profile={' or '.join(repr(p.name) for p in fitting)}, or calibrate your own."
        )
    return None


def _nothing_fits(fingerprint: Mapping[str, Any], strategy: str, arrays: Sequence[str]) -> ProfileError:
    return ProfileError(
        f"{strategy} needs a profile for {_shape(fingerprint)}, and none fits that holds {', '.join(arrays)}. "
        f"Shipped: {', '.join(_shipped_for(strategy, arrays)) or 'none'}. Yours in {user_profiles.folder()}: "
        f"{', '.join(entry.name for entry in user_profiles.stored()) or 'none'}. "
        f"Make one, which will be found there: cachedit calibrate MODEL --strategy {strategy} --steps 50"
    )


def _shape(fingerprint: Mapping[str, Any]) -> str:
    shape = ", ".join(f"{key} {value}" for key, value in fingerprint.items() if key != "class" and value is not None)
    return f"{fingerprint['class']} ({shape})"


def _shipped_for(strategy: str, arrays: Sequence[str]) -> dict[str, Profile]:
    """Those that hold what a strategy reads."""
    return _preferred({name: p for name, p in shipped().items() if set(arrays) <= set(p.arrays)}, strategy)


def _preferred(profiles: Mapping[str, Profile], strategy: str) -> dict[str, Profile]:
    """Without those of a model that another profile of the same model serves better: one made for this strategy."""
    made_for = [profile.model for profile in profiles.values() if canonical(profile.strategy) == canonical(strategy)]
    return {
        name: profile
        for name, profile in profiles.items()
        if canonical(profile.strategy) == canonical(strategy) or profile.model not in made_for
    }


def _own(
    fingerprint: Mapping[str, Any], model_name: str, strategy: str, arrays: Sequence[str], elsewhere: bool
) -> Profile | None:
    """The newest of the user's profiles that fit, those first that were made for the strategy.

    ``elsewhere``: a shipped profile bears the name of the model, so those that the user made for other names, such as
    another model of the same shape, do not count.
    """
    fitting: list[tuple[user_profiles.Stored, list[str]]] = []
    for entry in user_profiles.stored():
        profile = entry.profile
        if profile is None:
            _warn_once(entry)
        elif set(arrays) <= set(profile.arrays) and profile.model and not profile.differences(fingerprint):
            fitting.append((entry, profile.model["names"]))
    named = [(entry, names) for entry, names in fitting if not names or _names(model_name, names)]
    left = named or ([] if elsewhere else fitting)
    if not left:
        return None
    if not named and len({tuple(names) for _, names in left}) > 1:
        raise ProfileError(
            f"{len(left)} of your profiles fit {fingerprint['class']}, and its name {model_name!r} does not decide. "
            f"Choose: profile={' or '.join(repr(entry.name) for entry, _ in left)}."
        )
    made_for = [
        entry for entry, _ in left if entry.profile and canonical(entry.profile.strategy) == canonical(strategy)
    ]
    return max(made_for or [entry for entry, _ in left], key=lambda entry: entry.stamp).profile


_warned: set[tuple[Path, tuple[int, int]]] = set()


def _warn_once(entry: user_profiles.Stored) -> None:
    if (entry.path, entry.stamp) not in _warned:
        _warned.add((entry.path, entry.stamp))
        warnings.warn(
            f"skipped a profile of yours that cannot be read: {entry.error}. Repair or delete {entry.path}",
            stacklevel=2,
        )


def _names(model_name: str, names: Sequence[str]) -> bool:
    """True if ``model_name`` is one of the hub ids, or a folder called like one."""
    last = canonical(model_name.rstrip("/").rsplit("/", 1)[-1])
    return bool(last) and any(last == canonical(name.rsplit("/", 1)[-1]) for name in names)


def _unmistakable(profile: Profile, others: Iterable[Profile]) -> bool:
    """True if no other shipped profile has the same fingerprint, so that the fingerprint alone decides."""
    assert profile.model is not None
    mine = (profile.model["class"], profile.model["fingerprint"])
    return sum(1 for p in others if p.model and (p.model["class"], p.model["fingerprint"]) == mine) == 1
