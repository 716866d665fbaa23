"""Pictures and videos that were made elsewhere: two folders of them, compared by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cachedit.evaluate.comparison import Comparison, Row
from cachedit.evaluate.panel import STANDARD, Metric, Panel
from cachedit.evaluate.picture_files import PICTURES, VIDEOS, read
from cachedit.evaluate.shot import Shot
from cachedit.evaluate.taking import judge

LISTED = 12  # names in an error
Progress = Callable[[int, int, str], None]


def compare_folders(
    reference: str | Path,
    other: str | Path,
    *,
    metrics: tuple[Metric, ...] = (),
    progress: Progress | None = None,
) -> Comparison:
    """Measure how far the pictures of one folder are from those of the same name in another.

    Names count without their endings and with the folders that they lie in, so "a/1.png" belongs to "a/1.jpg".

    Args:
        reference: the folder that is right.
        other: the one that is measured.
        metrics: more of them than ``panel.STANDARD``.
        progress: called as ``progress(done, total, text)``, in files.

    Returns:
        Two rows without times. The pictures stay in their files.

    Raises:
        ValueError: a folder holds none, the folders do not hold the same names, or two files differ in size or length.
        OSError: a file cannot be read.
    """
    folders = (Path(reference), Path(other))
    found = [_named(folder) for folder in folders]
    _check_names(folders, found)
    panel = Panel((*STANDARD, *metrics))
    names = sorted(found[0])
    shots: list[list[Shot]] = [[], []]
    odd = []
    for place, name in enumerate(names):
        if progress is not None:
            progress(place, len(names), name)
        pair = [Shot(name, 0, file=files[name]) for files in found]
        for shot in pair:
            assert shot.file is not None
            shot.pictures = read(shot.file)
            shot.video = len(shot.pictures) > 1
        if pair[0].look().shape != pair[1].look().shape:
            odd.append(f"{name} ({_size(pair[0])} and {_size(pair[1])})")
            continue
        judge(pair[1], pair[0], panel)
        pair[0].quality = panel.judge(pair[0].look(), None, name, pair[0].video)
        for shot, row in zip(pair, shots, strict=True):
            shot.pictures = None
            row.append(shot)
    if odd:
        raise ValueError(
            f"{len(odd)} of {len(names)} differ in size or length: {_listed(odd)}. Allowed: pairs of one size. Make "
            "both with the same settings."
        )
    if progress is not None:
        progress(len(names), len(names), "measured")
    base = Row.of_baseline(shots[0], None, panel.chosen)
    base.strategy = str(reference)
    rows = [base, Row.of_cache(str(other), shots[1], base, panel.chosen)]
    return Comparison(_conditions(folders, shots[0]), rows, panel.chosen, panel.unavailable)


def _named(folder: Path) -> dict[str, Path]:
    """The pictures and videos of a folder by name."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; allowed: a folder with pictures or videos.")
    found: dict[str, Path] = {}
    for file in sorted(folder.rglob("*")):
        if file.suffix.lower() in (*PICTURES, *VIDEOS) and file.is_file():
            name = file.relative_to(folder).with_suffix("").as_posix()
            if name in found:
                raise ValueError(f"{folder} holds {found[name].name} and {file.name}; allowed: one file of a name.")
            found[name] = file
    if not found:
        raise ValueError(f"{folder} holds no pictures or videos; allowed: {', '.join((*PICTURES, *VIDEOS))}.")
    return found


def _check_names(folders: tuple[Path, Path], found: list[dict[str, Path]]) -> None:
    """Refuse folders that do not hold the same names."""
    odd = []
    for here, there, folder in ((found[0], found[1], folders[0]), (found[1], found[0], folders[1])):
        alone = sorted(set(here) - set(there))
        if alone:
            odd.append(f"only in {folder}: {_listed(alone)}")
    if odd:
        raise ValueError(
            f"the folders do not hold the same names; {'; '.join(odd)}. Allowed: two files of a name. Remove the odd "
            "ones, or name them alike."
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"{', '.join(names[:LISTED])}{more}"


def _size(shot: Shot) -> str:
    count, _, height, width = shot.look().shape
    return f"{width}x{height}" + (f", {count} frames" if count > 1 else "")


def _conditions(folders: tuple[Path, Path], shots: list[Shot]) -> dict[str, Any]:
    from cachedit import __version__

    return {
        "reference": str(folders[0]),
        "compared": str(folders[1]),
        "num_files": len(shots),
        "protocol": "files of one name, as they are stored; nothing is known of how they were made",
        "cachedit": __version__,
        "torch": torch.__version__,
    }
