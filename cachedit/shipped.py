"""Finding the profile of a model: by name, by file, or by the fingerprint of its denoiser."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from torch import nn

from cachedit.errors import ProfileError
from cachedit.profile import Profile
from cachedit.strategy import canonical


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
    folders = [resources.files("cachedit.calibration") / "profiles", resources.files("cachedit.samples") / "profiles"]
    files = [file for folder in folders if folder.is_dir() for file in folder.iterdir() if file.name.endswith(".json")]
    profiles = [Profile.from_json(file.read_text(encoding="utf-8"), file.name) for file in files]
    return {profile.name: profile for profile in sorted(profiles, key=lambda p: p.name)}


def resolve(
    profile: Profile | str | Path | None,
    fingerprint: Mapping[str, Any],
    model_name: str,
    strategy: str = "the strategy",
    arrays: Sequence[str] = ("magnitude_ratio",),
) -> Profile:
    """The profile to use: the one given, the shipped one of that name, or the shipped one that fits the model.

    Args:
        profile: what the user passed.
        fingerprint: of the first denoiser.
        model_name: ``_name_or_path`` of the pipeline or module, to choose between models of one fingerprint.
        strategy: name of the class that needs the profile, for errors.
        arrays: what it must hold.

    Raises:
        ProfileError: nothing fits, or more than one does and the name does not decide.
    """
    if isinstance(profile, Profile):
        chosen = profile
    elif profile is not None and not os.path.exists(profile) and canonical(str(profile)) in _by_name():
        chosen = _by_name()[canonical(str(profile))]
    elif profile is not None:
        chosen = Profile.load(profile)
    else:
        return _match(fingerprint, model_name, strategy, arrays)
    chosen.check_fits(fingerprint)
    chosen.check_arrays(arrays, strategy)
    return chosen


def _by_name() -> dict[str, Profile]:
    return {canonical(name): profile for name, profile in shipped().items()}


def _match(fingerprint: Mapping[str, Any], model_name: str, strategy: str, arrays: Sequence[str]) -> Profile:
    every = {name: profile for name, profile in shipped().items() if set(arrays) <= set(profile.arrays)}
    fitting = [profile for profile in every.values() if profile.model and not profile.differences(fingerprint)]
    named = [profile for profile in fitting if profile.model and _names(model_name, profile.model["names"])]
    if len(named) == 1:
        return named[0]
    if len(fitting) == 1 and _unmistakable(fitting[0], every.values()):
        return fitting[0]
    shape = ", ".join(f"{key} {value}" for key, value in fingerprint.items() if key != "class" and value is not None)
    if fitting:
        raise ProfileError(
            f"{len(fitting)} shipped profiles fit {fingerprint['class']} ({shape}), and its name {model_name!r} does "
            f"not decide. Choose: profile={' or '.join(repr(p.name) for p in fitting)}, or calibrate your own."
        )
    raise ProfileError(
        f"{strategy} needs a profile for {fingerprint['class']} ({shape}), and none that is shipped fits. "
        f"Shipped: {', '.join(every) or 'none'}. "
        "Make one: cachedit calibrate MODEL --steps 50 -o my.json, then pass profile='my.json'."
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
