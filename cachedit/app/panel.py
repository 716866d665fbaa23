"""A start button, a cancel button and a status line, and the work that they start, follow and cancel."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gradio as gr

from cachedit.app import markup
from cachedit.app.desk import Desk
from cachedit.app.job import EXPECTED, Cancelled, Job, Status

Values = dict[Any, Any]
"""Component -> its value, or for what is shown its new one."""
AT_ONCE = 20  # runs that may wait or work; who comes then waits in the queue of the page


class Panel:
    """The lower end of a form: where its run is started, followed and cancelled.

    Args:
        desk: where the work is done.
        verb: on the start button.
        name: of the tab, for the ids of the elements.
    """

    def __init__(self, desk: Desk, verb: str, name: str) -> None:
        self._desk = desk
        with gr.Row(elem_classes="ce-buttons"):
            self.start = gr.Button(verb, variant="primary", elem_id=f"{name}-start", min_width=120)
            self.cancel = gr.Button("Cancel", interactive=False, elem_id=f"{name}-cancel", min_width=120)
        self.status = gr.HTML(markup.message("Ready."), elem_id=f"{name}-status", elem_classes="ce-live")

    def connect(
        self,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        plan: Callable[[Values, str], Callable[[Job], Any]],
        show: Callable[[Any], Values],
    ) -> None:
        """Wire the buttons.

        Args:
            inputs: components that are read when the run starts.
            outputs: components that ``show`` may change.
            plan: takes the values of the inputs and the session, and returns the work; errors in it are told.
            show: what a result looks like, and what the work tells of it before.
        """

        def begin(values: Values, request: gr.Request) -> Iterator[Values]:
            yield from self._followed(str(request.session_hash), lambda session: plan(values, session), show)

        def cancel(request: gr.Request) -> None:
            self._desk.cancel(str(request.session_hash))  # the run says so: only it knows what it said last

        self.start.click(
            begin,
            {*inputs},
            [self.start, self.cancel, self.status, *outputs],
            show_progress="hidden",
            concurrency_limit=AT_ONCE,
            concurrency_id="runs",  # of all tabs: Gradio has 40 threads, and some must be left to cancel with
            api_visibility="private",
        )
        self.cancel.click(cancel, None, None, queue=False, show_progress="hidden", api_visibility="private")

    def _followed(
        self, session: str, plan: Callable[[str], Callable[[Job], Any]], show: Callable[[Any], Values]
    ) -> Iterator[Values]:
        """Updates of the page from the start to the end of a run."""
        yield {self.start: gr.update(interactive=False), self.cancel: gr.update(interactive=True)}
        idle = {self.start: gr.update(interactive=True), self.cancel: gr.update(interactive=False)}
        begun = time.monotonic()
        try:
            job = self._desk.begin(session, plan(session))
            try:
                for status in job.updates():
                    so_far = {} if status.part is None else show(status.part)
                    yield {self.status: markup.progress(status, _left(status, begun))} | so_far
                shown = show(job.result)
            finally:
                self._desk.close(session, job)
        except Cancelled:
            yield idle | {self.status: markup.message("Cancelled.")}
        except Exception as error:  # whatever it is, the visitor is to read it
            yield idle | {self.status: markup.error(_told(error))}
        else:
            seconds = time.monotonic() - begun
            yield idle | {self.status: markup.message(f"Done in {seconds:.1f} s.")} | shown


def _left(status: Status, begun: float) -> float | None:
    """Seconds that are left if all goes on as it did so far; None if it is too early to say."""
    gone = time.monotonic() - begun
    if gone < 2 or not status.done or not status.total:
        return None
    return gone / status.done * (status.total - status.done)


def _told(error: Exception) -> str:
    """An error in one line; one that is no advice of the library bears its type."""
    text = " ".join(str(error).split())[:600]
    if type(error).__name__ == "OutOfMemoryError":
        return f"The memory of the device is not enough ({text[:160]}). Allowed: a smaller size, or a smaller model."
    return text if isinstance(error, EXPECTED) and text else f"{type(error).__name__}: {text}"
