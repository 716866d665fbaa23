"""How far a calibration has come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[int, int, str], None]


class Tally:
    """Counts the steps of all runs of a calibration.

    Args:
        tell: called as ``tell(done, total, text)`` whenever something is done; None tells nobody.
        total: steps that all runs will take, as far as it is known before.
    """

    def __init__(self, tell: Progress | None = None, total: int = 0) -> None:
        self.done, self.total, self._tell, self._text = 0, total, tell, ""

    def add(self, steps: int, text: str = "") -> None:
        """So many more are done; ``text`` says of what, where that has changed."""
        self.done, self._text = self.done + steps, text or self._text
        if steps:
            self._say()

    def begin(self, text: str) -> None:
        """Say what runs now, before the first of its steps is done."""
        self._text = text
        self._say()

    @contextmanager
    def expecting(self, steps: int) -> Iterator[None]:
        """A stretch of work that counts in the total with so many, and is corrected to what it took."""
        before = self.done
        yield
        surplus = before + steps - self.done
        if surplus:
            self.total -= surplus
            self._say()

    def _say(self) -> None:
        if self._tell is not None:
            self._tell(self.done, max(self.total, self.done), self._text)
