"""What the records of all engines have in common."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any


class Record:
    """Base of the dataclasses that tell what happened; each says what it adds to its fields, and its table.

    Attributes:
        status: "running", "finished" or "aborted".
    """

    status: str

    @property
    def aborted(self) -> bool:
        """True if it ended before its last step."""
        return self.status == "aborted"

    def summary(self) -> dict[str, Any]:
        """What follows from the fields, for ``to_json``."""
        raise NotImplementedError

    def lines(self) -> Iterable[tuple[str, str]]:
        """Name and text of every line of the small table that ``str`` gives."""
        raise NotImplementedError

    def to_json(self) -> str:
        """The whole of it as a JSON object."""
        fields: Any = self
        return json.dumps({**asdict(fields), **self.summary()}, ensure_ascii=False)

    def __str__(self) -> str:
        """A small table: what was configured, and what came of it."""
        return "\n".join(f"{name:17s} {value}" for name, value in self.lines())
