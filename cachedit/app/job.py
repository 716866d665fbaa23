"""Work in a thread of its own, which tells how far it is and stops when it is asked to."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)


class Cancelled(Exception):
    """Whoever asked for the work wants it no more."""


EXPECTED = (Cancelled, ValueError, TypeError, OSError)  # what the user can mend; the message says how


@dataclass(frozen=True)
class Status:
    """How far some work is.

    Attributes:
        text: what is done now.
        done, total: in units of the work; a total of 0 is not known.
        strip: one mark per step so far, of a cached run.
        part: what there is of the result so far, for work that shows it while it goes on.
    """

    text: str
    done: int = 0
    total: int = 0
    strip: str = ""
    part: Any = None


class Job:
    """One piece of work.

    Args:
        work: does it; is given the job, to tell its status and to ask whether it is still wanted.
    """

    def __init__(self, work: Callable[[Job], Any]) -> None:
        self._work = work
        self._wanted = True
        self._status: Status | None = None
        self._mail: deque[Any] = deque()
        self._outcome: tuple[Any, BaseException | None] | None = None
        self._changed = threading.Condition()

    def updates(self) -> Iterator[Status]:
        """Start the work and give its status whenever it is new; one that nobody took in time is left out.

        Who stops asking has cancelled the work.
        """
        threading.Thread(target=self._run, daemon=True).start()
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._status is not None or self._outcome is not None)
                    status, self._status = self._status, None
                    ended = self._outcome is not None
                if status is not None:
                    yield status
                elif ended:
                    return
        finally:
            self.cancel()

    @property
    def running(self) -> bool:
        """True until the work has ended, however it ends."""
        return self._outcome is None

    @property
    def result(self) -> Any:
        """What the work returned, once it has ended.

        Raises:
            Cancelled: it was not wanted any more.
            Exception: whatever it raised.
        """
        assert self._outcome is not None
        result, error = self._outcome
        if error is not None:
            raise error
        return result

    def cancel(self) -> None:
        """Say that the work is not wanted any more; it ends when it next asks."""
        with self._changed:
            self._wanted = False
            self._status = Status("Cancelling ...")
            self._changed.notify_all()

    def send(self, wish: Any) -> None:
        """Leave a wish with the work, such as another prompt; it takes notice when it next looks."""
        self._mail.append(wish)

    def mail(self) -> Iterator[Any]:
        """The wishes that came since the work last looked."""
        while self._mail:
            yield self._mail.popleft()

    def check(self) -> None:
        """Raise Cancelled if the work is not wanted any more."""
        if not self._wanted:
            raise Cancelled

    def tell(self, text: str, done: int = 0, total: int = 0, strip: str = "", part: Any = None) -> None:
        """Tell how far the work is; see ``Status``. Raises Cancelled if it is not wanted any more."""
        with self._changed:
            self.check()
            self._status = Status(text, done, total, strip, part)
            self._changed.notify_all()

    def _run(self) -> None:
        result, error = None, None
        try:
            result = self._work(self)
        except BaseException as raised:  # a thread has nobody else to tell
            if not isinstance(raised, EXPECTED):
                log.error("a run of the app failed", exc_info=raised)
            error = raised.with_traceback(None)  # its frames hold what the work was about to use
        with self._changed:
            self._outcome = result, error
            self._changed.notify_all()
