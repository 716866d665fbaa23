"""A report: caches measured against the bare pipeline with pictures kept as files, and three documents about it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cachedit.calibration.checkpoint import Checkpoint
from cachedit.calibration.ranks import Ranks
from cachedit.calibration.tally import Progress, Tally
from cachedit.calibration.work import Work
from cachedit.evaluate.comparison import BASELINE, Comparison
from cachedit.evaluate.configuration import Configuration
from cachedit.evaluate.experiment import Cancelled, Experiment
from cachedit.evaluate.markdown import render_markdown
from cachedit.evaluate.page import render
from cachedit.evaluate.panel import STANDARD, Metric, Panel
from cachedit.evaluate.picture_files import slug, write
from cachedit.evaluate.shot import Shot
from cachedit.evaluate.table import print_comparison
from cachedit.files import write_text
from cachedit.profile import Profile

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Cancelled", "Report", "measure"]

FORMAT, VERSION = "cachedit-report", 1
DATA, MARKDOWN, PAGE = "report.json", "report.md", "report.html"
PICTURES = "pictures"  # folder with one folder per configuration
UNFINISHED = "unfinished"  # folder with the runs of a report that is not written yet


@dataclass
class Report:
    """What was measured, ready to be written.

    Attributes:
        comparison: conditions, rows and pictures.
        folder: where the pictures lie.
        title: of the documents.
        is_main: False in the processes that only helped; they write nothing.
    """

    comparison: Comparison
    folder: Path
    title: str = "cachedit report"
    is_main: bool = True
    checkpoint: Checkpoint | None = field(default=None, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """JSON form. ``text`` is null here; ``text_report`` says there what language models wrote."""
        comparison = self.comparison
        data = comparison.to_dict(self.folder)
        rows = [
            {**row, "text": None, "prompts": [{**prompt, "text": None} for prompt in row["prompts"]]}
            for row in data["rows"]
        ]
        return {
            "format": FORMAT,
            "version": VERSION,
            "kind": "video" if comparison.baseline.shots[0].video else "image",
            "conditions": data["conditions"],
            "metrics": {metric.name: self._described(metric) for metric in comparison.metrics},
            "rows": rows,
        }

    def write(self, folder: str | Path | None = None) -> Path:
        """Write report.json, report.md and report.html, each in one step.

        Args:
            folder: the one that the report was measured in, which is also the default.

        Returns:
            The page.

        Raises:
            ValueError: another folder, in which the pictures are not.
            OSError: something cannot be written.
        """
        if folder is not None and Path(folder).resolve() != self.folder.resolve():
            raise ValueError(f"got {folder}; allowed: {self.folder}, where the pictures of this report lie.")
        if self.is_main:
            write_documents(
                self.folder,
                render_markdown(self.comparison, self.folder, self.title),
                render(self.comparison, self.title),
                self.to_dict(),
                self.checkpoint,
            )
        return self.folder / PAGE

    def print(self, console: Console) -> None:
        """Print it on the terminal."""
        print_comparison(console, self.comparison)

    def _described(self, metric: Metric) -> dict[str, Any]:
        return {
            "title": metric.title,
            "better": metric.better,
            "needs_reference": metric.needs_reference,
            "unavailable": self.comparison.unavailable.get(metric.name),
        }


def measure(
    pipe: Any,
    configurations: Sequence[Configuration],
    prompts: Sequence[str],
    steps: int,
    *,
    folder: str | Path,
    seeds: Sequence[int] = (0,),
    repeats: int = 1,
    call_options: dict[str, Any] | None = None,
    metrics: Sequence[Metric] = (),
    progress: Progress | None = None,
    resume: bool = False,
    cancelled: Callable[[], bool] | None = None,
    conditions: dict[str, Any] | None = None,
) -> Report:
    """Measure caches against the bare pipeline, and keep all pictures. Call ``write`` on the result.

    Under ``accelerate launch`` or torchrun every process calls this with a pipeline of its own and the same arguments;
    they share the prompts and seeds, and each gets the whole report. All must see the folder.

    Args:
        pipe: a diffusers pipeline that takes ``prompt`` and ``num_inference_steps``. Left without a cache.
        configurations: the caches, each with its own row.
        prompts: at least one.
        steps: ``num_inference_steps``.
        folder: of the report; made if it is not there.
        seeds: prompt ``i`` is drawn from the noise of ``seed + i`` for each of these.
        repeats: measured runs of each prompt and seed; the medians are reported.
        call_options: further arguments of the pipeline's call (``guidance_scale``, ``height`` ...).
        metrics: more of them than ``panel.STANDARD``, see ``panel.load``.
        progress: called by the main process as ``progress(done, total, text)``, in steps of all runs.
        resume: go on with the runs of an interrupted report, if there are any.
        cancelled: asked after every step; True ends everything with ``Cancelled``.
        conditions: more of them, shown first, such as the command that was given.

    Raises:
        ValueError: nothing to compare, the pipeline is not driven by prompts, the folder holds a finished report, or
            runs of another one, or without ``resume`` any.
        ProfileError, UnsupportedModelError, TypeError: as ``cachedit.wrap``, before the first run.
        Cancelled: as asked.
    """
    folder = Path(folder)
    _check_names(configurations)
    experiment = Experiment(
        pipe,
        configurations,
        prompts,
        steps,
        seeds=seeds,
        repeats=repeats,
        call_options=call_options,
        panel=Panel((*STANDARD, *metrics)),
        cancelled=cancelled,
    )
    counting = steps * len(experiment.configurations)
    experiment.work = work = begin(
        folder,
        _identity(experiment),
        resume,
        progress,
        lambda processes: experiment.expected_steps(processes) + counting,
    )
    experiment.keep = lambda shot, name: _keep(folder, shot, name, experiment.cells)
    comparison = experiment.run()
    experiment.count(comparison)
    _place(comparison, folder)
    comparison.conditions = {**(conditions or {}), **comparison.conditions, **(conditions or {})}
    return Report(comparison, folder, is_main=work.ranks.is_main, checkpoint=work.checkpoint)


def begin(
    folder: Path, identity: dict[str, Any], resume: bool, progress: Progress | None, total: Callable[[int], int]
) -> Work:
    """What deals a report's runs to the processes and keeps them, in a folder that is made or gone on with.

    Args:
        folder: of the report.
        identity: what two reports must have in common for one to go on with the other's runs.
        resume: go on with the runs of an interrupted report, if there are any.
        progress: called by the main process.
        total: how many the progress counts to, from the number of processes.

    Raises:
        ValueError: the folder holds a finished report, or runs of another one, or without ``resume`` any.
    """
    ranks = Ranks.here()
    kept = Checkpoint(folder / UNFINISHED, identity, "report") if ranks.is_main else None
    ranks.exchange(lambda: _open(folder, kept, resume))
    return Work(ranks, kept, Tally(progress if ranks.is_main else None, total(ranks.count)))


def write_documents(
    folder: Path, markdown: str, page: str, data: dict[str, Any], checkpoint: Checkpoint | None
) -> None:
    """Write the three documents of a report, each in one step, and drop the runs that were kept for it."""
    write_text(folder / MARKDOWN, markdown)
    write_text(folder / PAGE, page)
    # The data comes last: where it is, the report is whole.
    write_text(folder / DATA, json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    if checkpoint is not None:
        checkpoint.remove()


def _open(folder: Path, kept: Checkpoint | None, resume: bool) -> None:
    """Make the folder, or go on with what lies there."""
    if (folder / DATA).exists():
        raise ValueError(f"{folder} holds a finished report; allowed: another folder. Delete this one to redo it.")
    folder.mkdir(parents=True, exist_ok=True)
    if kept is not None:
        kept.open(resume)


def _keep(folder: Path, shot: Shot, name: str, cells: Sequence[tuple[str, int]]) -> Path:
    """Write the pictures of a shot, "pictures/NAME/003-seed7.png"."""
    assert shot.pictures is not None
    place = list(dict.fromkeys(prompt for prompt, _ in cells)).index(shot.prompt)
    target = folder / PICTURES / slug(name)
    target.mkdir(parents=True, exist_ok=True)
    return write(target / f"{place + 1:03d}-seed{shot.seed}.png", shot.pictures)


def _place(comparison: Comparison, folder: Path) -> None:
    """Say where the pictures lie now; a folder that is gone on with may have moved."""
    for shot in (shot for row in comparison.rows for shot in row.shots):
        assert shot.file is not None
        shot.file = folder / PICTURES / shot.file.parent.name / shot.file.name


def _check_names(configurations: Sequence[Configuration]) -> None:
    """Refuse names that would share a folder, perhaps only where capitals make no difference."""
    folders: dict[str, str] = {BASELINE: BASELINE}
    for configuration in configurations:
        other = folders.setdefault(slug(configuration.name).lower(), configuration.name)
        if other != configuration.name:
            raise ValueError(
                f"the configurations {other!r} and {configuration.name!r} would keep their pictures in one folder; "
                "allowed: names that differ in letters or digits. Give one a label."
            )


def _identity(experiment: Experiment) -> dict[str, Any]:
    """What two reports must have in common for one to go on with the other's runs."""
    return {
        **experiment.conditions,
        "configurations": [described(found) for found in experiment.configurations[1:] if found is not None],
        "metrics": [metric.name for metric in experiment.panel.chosen],
    }


def described(configuration: Configuration) -> str:
    """A configuration with all that its runs depend on."""
    profile = configuration.profile
    text = profile.to_json() if isinstance(profile, Profile) else str(profile)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"{configuration.name}: {configuration.strategy!r}, {configuration.options}, profile {digest}"
