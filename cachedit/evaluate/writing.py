"""Where results may be written."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cachedit import user_profiles
from cachedit.errors import ProfileError
from cachedit.profile import Profile


def check_target(path: str | Path, option: str) -> None:
    """Refuse, before a long run, a file that could not be written after it.

    Raises:
        ValueError: its folder does not exist or may not be written to, or it is a folder itself.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder; allowed: the name of a file in an existing folder.")
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: the folder {path.parent} does not exist. Make it: mkdir -p {path.parent}")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ValueError(
            f"{option} {path}: the folder {path.parent} may not be written to. Choose another: {option} FILE"
        )


def name_of(model: str) -> str:
    """What a profile of this model is called where nobody named it: the last part of its folder or hub id."""
    folder = Path(model).expanduser()
    last = Path(os.path.abspath(folder)).name if folder.is_dir() else model.rstrip("/").rsplit("/", 1)[-1]
    return re.sub(r"[^\w.-]+", "-", last).strip("-.").lower() or "model"


def own_target(name: str) -> Path:
    """The file of the user's folder for a profile of this name. The folder is made.

    Raises:
        ValueError: the name is none for a file, or there is no home folder.
        OSError: the folder cannot be made.
    """
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ValueError(f"got --name {name}; allowed: letters, digits, '.', '-' and '_', as it is the name of a file.")
    folder = user_profiles.folder()
    if not folder.is_absolute():
        raise ValueError(f"{folder} is no place for profiles. Set CACHEDIT_HOME to a folder, or name a file: -o FILE")
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name}.json"


def check_replaceable(path: Path, fingerprint: Mapping[str, Any], name: str, arrays: set[str]) -> None:
    """Refuse to replace a stored profile by one of another model, or by one that says less.

    Args:
        path: where the profile of a model is to be written.
        fingerprint: of the model.
        name: its folder or hub id; "" if it has none.
        arrays: what the new profile will hold.

    Raises:
        ValueError: what is there would be lost.
    """
    if not path.exists():
        return
    choices = f"Keep it and choose another name: --name NAME. Replace it: -o {path}"
    try:
        old = Profile.load(path)
    except ProfileError as error:
        raise ValueError(f"a file is there that is no whole profile: {error}. {choices}") from error
    differences = old.differences(fingerprint)
    called = name.rstrip("/").rsplit("/", 1)[-1]
    names = old.model["names"] if old.model else []
    if called and names and called not in names:
        differences.append(f"it is called {called!r}, the profile's {' or '.join(names)}")
    if differences:
        raise ValueError(f"{path} is a profile of another model ({'; '.join(differences)}). {choices}")
    lost = sorted(set(old.arrays) - arrays)
    if lost:
        raise ValueError(f"{path} holds {', '.join(lost)}, which this calibration does not measure. {choices}")
