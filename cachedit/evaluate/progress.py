"""The terminal: one console for results, and one bar, or lines in a log, per long run."""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

FILE_WIDTH = 160  # columns where the output is no terminal: a table in a log must not be cut
STEADY = 1800.0  # seconds over which the time left is judged: a step of a video model takes minutes
PATIENCE = 30.0  # seconds without a line in a log
Progress = Callable[[int, int, str], None]


def is_main() -> bool:
    """True in the one process of ``accelerate launch`` or torchrun that prints and writes, and in a lone one."""
    return int(os.environ.get("RANK", "0")) == 0


def console() -> Console:
    """The console that results are printed to."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else FILE_WIDTH, highlight=False)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar on stderr, moved by calling what is yielded with (done, total, what runs now). Gone afterwards.

    Where stderr is no terminal, a line is printed now and then; of several processes only the main one shows anything.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bar

    errors = Console(stderr=True)
    if not is_main():
        yield lambda done, total, text: None
    elif not errors.is_terminal:
        yield Lines(lambda line: print(line, file=sys.stderr, flush=True))
    else:
        times = (TimeElapsedColumn(), TimeRemainingColumn())
        columns = (BarColumn(), MofNCompleteColumn(), *times, TextColumn("{task.description}", markup=False))
        with Bar(*columns, console=errors, transient=True, speed_estimate_period=STEADY) as bar:
            task = bar.add_task("", total=None)
            yield lambda done, total, text: bar.update(task, completed=done, total=total, description=text)


class Lines:
    """Progress for a log: one line for every tenth of the work, and one when half a minute brought none.

    Args:
        show: takes a line.
        clock: seconds.
    """

    def __init__(self, show: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._show, self._clock = show, clock
        self._begun: tuple[float, int] | None = None  # when the first report came, and what was done by then
        self._shown, self._tenth = clock(), 0

    def __call__(self, done: int, total: int, text: str) -> None:
        """Report that ``done`` of ``total`` is done, and what runs now."""
        now = self._clock()
        self._begun = self._begun or (now, done)
        tenth = done * 10 // max(total, 1)
        if tenth > self._tenth or now - self._shown >= PATIENCE:
            self._shown, self._tenth = now, max(tenth, self._tenth)
            self._show(f"{done}/{total} ({100 * done // max(total, 1)} %), {self._left(now, done, total)}: {text}")

    def _left(self, now: float, done: int, total: int) -> str:
        assert self._begun is not None
        since, before = self._begun
        if done == before:
            return "time left unknown"
        return f"{datetime.timedelta(seconds=round((now - since) / (done - before) * (total - done)))} left"
