"""What all visitors share, and what belongs to one of them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from cachedit.app.job import Job
from cachedit.app.settings import Settings
from cachedit.app.shelf import Shelf

TEXT = "language model "  # before the name of a model on the shelf


class Desk:
    """The shelf of pipelines, and the one job that every session may have.

    Args:
        settings: of the app.

    Attributes:
        shelf: where pipelines are borrowed.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.shelf = Shelf(self._load, settings.kept)
        self._jobs: dict[str, Job] = {}

    def begin(self, session: str, work: Callable[[Job], Any]) -> Job:
        """A job for a session, not started yet.

        Raises:
            ValueError: one of its jobs is under way.
        """
        if session in self._jobs and self._jobs[session].running:
            raise ValueError("a run of yours is under way. Wait for its end, or cancel it.")
        self._jobs[session] = Job(work)
        return self._jobs[session]

    def cancel(self, session: str) -> None:
        """Cancel what a session has under way; nothing may be."""
        job = self._jobs.pop(session, None)
        if job is not None:
            job.cancel()

    def send(self, session: str, wish: Any) -> None:
        """Leave a wish with what a session has under way.

        Raises:
            ValueError: nothing is.
        """
        job = self._jobs.get(session)
        if job is None or not job.running:
            raise ValueError("nothing is under way that could change. Start it first.")
        job.send(wish)

    def close(self, session: str, job: Job) -> None:
        """Forget a job of a session, with what it returned; it is cancelled if it still runs."""
        job.cancel()
        if self._jobs.get(session) is job:
            del self._jobs[session]

    def language_model(self, model: str, job: Job) -> AbstractContextManager[Any]:
        """A language model, "" for the sample, as ``shelf.borrowed`` gives a pipeline."""
        return self.shelf.borrowed(f"{TEXT}{model}", job)

    def folder(self, session: str, name: str) -> Path:
        """A new folder of a session, inside of the app's: ``name``, or ``name-2`` if that is there.

        Raises:
            ValueError: the name is none for a folder.
        """
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise ValueError(f"got the name {name!r}; allowed: letters, digits, '.', '-' and '_', as it names a file.")
        own = self.settings.folder / hashlib.sha256(session.encode()).hexdigest()[:12]
        own.mkdir(parents=True, exist_ok=True)
        count = 1
        while True:
            folder = own / (name if count == 1 else f"{name}-{count}")
            try:
                folder.mkdir()
            except FileExistsError:
                count += 1
            else:
                return folder

    def _load(self, model: str) -> Any:
        from cachedit.evaluate.language import load_language_model
        from cachedit.evaluate.loading import load_pipeline
        from cachedit.samples import sample_path

        settings = self.settings
        load, sample = (load_language_model, "text") if model.startswith(TEXT) else (load_pipeline, "image")
        return load(
            model.removeprefix(TEXT) or str(sample_path(sample)),
            settings.device,
            settings.dtype,
            trust_remote_code=settings.trust_remote_code,
        )
