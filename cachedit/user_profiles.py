"""The user's own profiles: the folder where ``cachedit calibrate`` keeps them, and what is in it now."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from cachedit.errors import ProfileError
from cachedit.profile import Profile


@dataclass(frozen=True)
class Stored:
    """One file of the folder, as it was when it was read.

    Attributes:
        path: the file; its name without ".json" is what the profile is asked for by.
        stamp: time of its last change in nanoseconds, and its size.
        profile: what it holds; None where it cannot be read.
        error: why it cannot.
    """

    path: Path
    stamp: tuple[int, int]
    profile: Profile | None = None
    error: str = ""

    @property
    def name(self) -> str:
        """What the profile is asked for by."""
        return self.path.stem

    def read(self) -> Profile:
        """The profile.

        Raises:
            ProfileError: the file cannot be read.
        """
        if self.profile is None:
            raise ProfileError(self.error)
        return self.profile


_read: dict[Path, Stored] = {}  # the files that were there at the last look, so that a wrap reads only what is new


def folder() -> Path:
    """Where the user's profiles lie: ``profiles`` in CACHEDIT_HOME, by default ``cachedit`` in the platform's cache.

    The platforms' rules stand here because platformdirs, which knows them too, comes with none of our dependencies.
    """
    home = os.environ.get("CACHEDIT_HOME")
    if home:
        return Path(os.path.expanduser(home), "profiles")
    if sys.platform == "win32":
        caches = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        caches = "~/Library/Caches"
    else:
        caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(caches), "cachedit", "profiles")  # a user without a home keeps the "~", and no files


def stored() -> list[Stored]:
    """The files of the folder by name, damaged ones included; only those that changed since the last look are read."""
    try:
        paths = sorted(path for path in folder().iterdir() if path.suffix == ".json")
    except OSError:  # no such folder, or none that may be read: no profiles
        paths = []
    for path in paths:
        stamp, known = _stamp(path), _read.get(path)
        if known is None or known.stamp != stamp:
            _read[path] = _load(path, stamp)
    for path in set(_read).difference(paths):
        _read.pop(path, None)
    return [_read[path] for path in paths]


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:  # a link to nowhere; reading it will say so
        return 0, 0
    return found.st_mtime_ns, found.st_size


def _load(path: Path, stamp: tuple[int, int]) -> Stored:
    try:
        return Stored(path, stamp, Profile.load(path))
    except ProfileError as error:
        return Stored(path, stamp, error=str(error))
