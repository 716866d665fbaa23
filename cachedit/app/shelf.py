"""The pipelines that are kept, and whose turn it is to use one."""

from __future__ import annotations

import gc
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cachedit.app.interrupt import interruptible
from cachedit.app.job import Job
from cachedit.wrap import unwrap

LOOK = 0.2  # seconds after which who waits looks whether it is still wanted


class Shelf:
    """Pipelines by the name of their model. One job uses one of them at a time.

    Jobs take turns also on different models: they share the machine's memory, and a time that was measured while
    something else ran is not worth showing.

    Args:
        load: makes the pipeline of a model.
        capacity: most pipelines that are kept; the one that was used longest ago goes before another is loaded.
    """

    def __init__(self, load: Callable[[str], Any], capacity: int) -> None:
        self._load, self._capacity = load, capacity
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self._line: list[Job] = []
        self._moved = threading.Condition()

    @property
    def models(self) -> list[str]:
        """The models that are kept, the one that was used longest ago first."""
        return [*self._kept]

    @contextmanager
    def borrowed(self, model: str, job: Job) -> Iterator[Any]:
        """The pipeline of a model, bare, for this job alone; it stops in the middle of a step if the job is cancelled.

        Afterwards, however it ends, the pipeline is bare again and holds nothing of the run.

        Raises:
            Cancelled: while it waits, or while it works.
            ValueError: the model cannot be loaded.
        """
        self._wait(job)
        try:
            pipe = self._taken(model, job)
            with interruptible(pipe, job.check):
                try:
                    yield pipe
                except BaseException as error:
                    traceback.clear_frames(error.__traceback__)  # they hold what the run was about to use
                    raise
                finally:
                    unwrap(pipe)
        finally:
            _release()
            with self._moved:
                self._line.remove(job)
                self._moved.notify_all()

    def _wait(self, job: Job) -> None:
        with self._moved:
            self._line.append(job)
            try:
                told = 0
                while (before := self._line.index(job)) > 0:
                    if before != told:
                        told = before
                        job.tell(f"waiting for {before} other run{'s' if before > 1 else ''}")
                    self._moved.wait(LOOK)
                    job.check()
            except BaseException:
                self._line.remove(job)
                raise

    def _taken(self, model: str, job: Job) -> Any:
        if model not in self._kept:
            job.tell("loading the model")
            while len(self._kept) >= self._capacity:
                self._kept.popitem(last=False)
                _release()
            self._kept[model] = self._load(model)
        self._kept.move_to_end(model)
        return self._kept[model]


def _release() -> None:
    """Give memory back that nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
