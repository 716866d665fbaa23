"""Where results may be written."""

from __future__ import annotations

from pathlib import Path


def check_target(path: str | Path, option: str) -> None:
    """Refuse, before a long run, a file that could not be written after it.

    Raises:
        ValueError: its folder does not exist, or it is a folder itself.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder; allowed: the name of a file in an existing folder.")
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: the folder {path.parent} does not exist. Make it: mkdir -p {path.parent}")
