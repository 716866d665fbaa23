"""Result files that are complete or absent, never half written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_text(path: str | Path, text: str) -> Path:
    """Write a UTF-8 file in one step: whoever reads it sees the old one or the new one.

    Args:
        path: the file; its folder must exist.
        text: its contents.

    Returns:
        The path.
    """
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)  # mkstemp makes it private; a result is an ordinary file
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path


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
