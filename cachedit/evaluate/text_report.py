"""A report on a language model: caches measured against no cache, and three documents about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cachedit.calibration.checkpoint import Checkpoint
from cachedit.calibration.tally import Progress
from cachedit.evaluate.configuration import Configuration
from cachedit.evaluate.language import LanguageModel
from cachedit.evaluate.report import FORMAT, PAGE, VERSION, begin, described, write_documents
from cachedit.evaluate.text_comparison import TextComparison
from cachedit.evaluate.text_experiment import Scorer, TextExperiment
from cachedit.evaluate.text_markdown import render_markdown
from cachedit.evaluate.text_page import render
from cachedit.evaluate.text_table import print_text_comparison

if TYPE_CHECKING:
    from rich.console import Console


@dataclass
class TextReport:
    """What was measured, ready to be written.

    Attributes:
        comparison: conditions, rows and answers.
        folder: where it is written.
        title: of the documents.
        is_main: False in the processes that only helped; they write nothing.
    """

    comparison: TextComparison
    folder: Path
    title: str = "cachedit report"
    is_main: bool = True
    checkpoint: Checkpoint | None = field(default=None, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """JSON form; docs/report.md describes it."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "kind": "text",
            "conditions": self.comparison.conditions,
            "metrics": {},
            "rows": [row.to_dict() for row in self.comparison.rows],
        }

    def write(self) -> Path:
        """Write report.json, report.md and report.html, each in one step.

        Returns:
            The page.

        Raises:
            OSError: something cannot be written.
        """
        if self.is_main:
            write_documents(
                self.folder,
                render_markdown(self.comparison, self.title),
                render(self.comparison, self.title),
                self.to_dict(),
                self.checkpoint,
            )
        return self.folder / PAGE

    def print(self, console: Console) -> None:
        """Print it on the terminal."""
        print_text_comparison(console, self.comparison)


def measure_text(
    language: LanguageModel,
    configurations: Sequence[Configuration],
    prompts: Sequence[str],
    *,
    folder: str | Path,
    seeds: Sequence[int] = (0,),
    repeats: int = 1,
    call_options: dict[str, Any] | None = None,
    scorer: Scorer | None = None,
    progress: Progress | None = None,
    resume: bool = False,
    cancelled: Callable[[], bool] | None = None,
    conditions: dict[str, Any] | None = None,
) -> TextReport:
    """Measure caches of a language model against decoding without one. Call ``write`` on the result.

    Under ``accelerate launch`` or torchrun every process calls this with a model of its own and the same arguments;
    they share the prompts and seeds, and each gets the whole report.

    Args:
        language: the model.
        configurations: the caches, each with its own row.
        prompts: at least one.
        folder: of the report; made if it is not there.
        seeds: prompt ``i`` draws its tokens from the noise of ``seed + i`` for each of these.
        repeats: measured calls of each prompt and seed; the medians are reported.
        call_options: further arguments of ``cachedit.generate`` (``gen_length``, ``block_length``, ``threshold`` ...).
        scorer: judges the answers; None: they are only compared with the baseline's.
        progress: called by the main process as ``progress(done, total, text)``, in calls.
        resume: go on with the calls of an interrupted report, if there are any.
        cancelled: asked after every step; True ends everything with ``Cancelled``.
        conditions: more of them, shown first, such as the command that was given.

    Raises:
        ValueError: nothing to compare, the folder holds a finished report, or calls of another one, or without
            ``resume`` any.
        UnsupportedModelError, TypeError, ValueError: as ``cachedit.generate``.
        Cancelled: as asked.
    """
    folder = Path(folder)
    experiment = TextExperiment(
        language,
        configurations,
        prompts,
        seeds=seeds,
        repeats=repeats,
        call_options=call_options,
        scorer=scorer,
        cancelled=cancelled,
    )
    identity = {**experiment.conditions, "configurations": [described(one) for one in configurations]}
    experiment.work = work = begin(folder, identity, resume, progress, lambda processes: experiment.expected_calls)
    comparison = experiment.run()
    comparison.conditions = {**(conditions or {}), **comparison.conditions, **(conditions or {})}
    return TextReport(comparison, folder, is_main=work.ranks.is_main, checkpoint=work.checkpoint)
