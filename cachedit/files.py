"""Files that are complete or absent, never half written."""

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
    return write_bytes(path, text.encode("utf-8"))


def write_bytes(path: str | Path, data: bytes) -> Path:
    """Write a file in one step, as ``write_text`` does."""
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp makes it private; a result is an ordinary file
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
