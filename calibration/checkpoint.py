"""What a calibration, or another long piece of work, has done so far, kept until it is finished."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from cachedit.files import write_text

RECORD = "calibration.json"
LONGEST = 100  # characters of a value in an error


class Checkpoint:
    """A folder with one file per finished unit of work; each is complete or absent, whatever ends the process.

    It is there as soon as a unit is finished.

    Args:
        path: the folder; the one above it must exist.
        of: what is calibrated, as JSON; the units of one calibration are of no use to another.
        work: what the errors call it.
    """

    def __init__(self, path: str | Path, of: Mapping[str, Any], work: str = "calibration") -> None:
        self.path, self.of, self.work = Path(path), json.loads(json.dumps(of)), work

    def open(self, resume: bool) -> None:
        """Begin, or go on where an interrupted calibration ended.

        Args:
            resume: go on if there is something; otherwise finished units are not thrown away but refused.

        Raises:
            ValueError: what lies there is no checkpoint, is of another calibration, or is not to be resumed.
        """
        if not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir())):
            return
        found, units = self._record(), len([*self.path.glob("*.pt")])
        if not units:
            self.remove()  # it ended before its first unit did
        elif not resume:
            raise ValueError(
                f"{self.path} holds {units} finished units of an interrupted {self.work}; allowed: resume=True "
                "(--resume) to go on with them, or another folder. Delete this one to start anew."
            )
        elif found != self.of:
            differing = [key for key in {**found, **self.of} if found.get(key) != self.of.get(key)]
            told = "; ".join(f"{key} {_short(found.get(key))}, now {_short(self.of.get(key))}" for key in differing)
            raise ValueError(
                f"{self.path} is of another {self.work}, which had {told}. Allowed: to resume with the same. "
                "Go on as it was begun, or delete the folder to start anew."
            )

    def load(self, name: str) -> dict[str, Any] | None:
        """What was saved under a name; None if nothing was."""
        file = self.path / f"{name}.pt"
        if not file.exists():
            return None
        found: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        return found

    def save(self, name: str, data: dict[str, Any]) -> None:
        """Write plain data and tensors in one step, in the place of what was saved under the name."""
        if not (self.path / RECORD).exists():
            self.path.mkdir(exist_ok=True)
            write_text(self.path / RECORD, json.dumps(self.of, indent=1) + "\n")
        part = self.path / f"{name}.part"
        torch.save(data, part)
        part.replace(part.with_suffix(".pt"))

    def remove(self) -> None:
        """Nothing is left to go on with."""
        if self.path.exists():
            shutil.rmtree(self.path)

    def _record(self) -> dict[str, Any]:
        try:
            found = json.loads((self.path / RECORD).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{self.path} is no checkpoint of a {self.work}, as {RECORD} in it cannot be read ({error}); allowed: "
                f"a folder that a {self.work} has made, or a path where nothing is. Choose another path."
            ) from error
        return found if isinstance(found, dict) else {}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
