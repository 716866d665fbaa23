"""A model, a strategy and a file: what the commands share that measure a model."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cachedit.cli.parser import Parser, add_inputs, positive, set_threads

if TYPE_CHECKING:
    from cachedit.profile import Profile
    from cachedit.strategy import Strategy


def add_measuring(parser: Parser) -> None:
    """The model, where its profile goes, and how it is measured."""
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("model", nargs="?", metavar="MODEL", help="diffusers pipeline: a folder or a hub id")
    model.add_argument("--sample", metavar="NAME", help='a sample of cachedit instead ("image")')
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="the profile to write (default: NAME.json of your folder of profiles)"
    )
    parser.add_argument(
        "--name", help="to ask for the profile by (default: the sample's name, else the last part of MODEL)"
    )
    parser.add_argument("--steps", type=positive, default=50, help="inference steps (default: %(default)s)")
    parser.add_argument(
        "--frontier-steps",
        type=positive,
        nargs="+",
        metavar="N",
        help="of auto: lengths of the runs whose speed and quality are measured (default: --steps)",
    )
    parser.add_argument("--resume", action="store_true", help="go on where an interrupted calibration stopped")
    add_inputs(parser)


class Measuring:
    """One calibration from the command line.

    Args:
        arguments: as ``add_measuring`` describes them.
        strategy: to be calibrated for.

    Attributes:
        pipe: the pipeline.
        prompts: all that were given.
        target: file of the profile.
    """

    def __init__(self, arguments: argparse.Namespace, strategy: Strategy) -> None:
        from cachedit.evaluate.loading import load_pipeline, load_prompts
        from cachedit.evaluate.writing import check_replaceable, check_target, name_of, own_target
        from cachedit.samples import sample_path

        self.arguments, self.strategy = arguments, strategy
        self.model = str(sample_path(arguments.sample)) if arguments.sample else arguments.model
        self.name = arguments.name or arguments.sample or name_of(self.model)
        self.target = Path(arguments.output) if arguments.output else own_target(self.name)
        check_target(self.target, "-o")
        set_threads(arguments.threads, small=arguments.sample is not None)
        self.prompts = load_prompts(
            arguments.prompts, arguments.prompt, arguments.num_prompts, sample=arguments.sample is not None
        )
        if self._has_frontier and len(self.prompts) < 2:
            raise ValueError("got 1 prompt; allowed: 2 or more, as the frontier is measured on every second one")
        self.pipe = load_pipeline(self.model, arguments.device, arguments.dtype)
        if arguments.output is None:
            check_replaceable(self.target, self.pipe, _arrays(strategy))

    def profile(self) -> Profile:
        """Measure, and write the profile."""
        from cachedit.evaluate.progress import is_main
        from cachedit.profile import Profile

        if self.arguments.resume and self._sweep.exists():
            profile = Profile.load(self.target)
        else:
            profile = self._calibrated(self.prompts[::2] if self._has_frontier else self.prompts)
        if is_main():
            profile.save(self.target)
        if self._has_frontier:
            profile = self._with_frontier(profile)
            if is_main():
                profile.save(self.target)
        return profile

    @property
    def way_on(self) -> str:
        """What to do after an interruption."""
        if self._checkpoint.exists() or self._sweep.exists():
            return f"Go on where it stopped: {self._begun} --resume"
        return "Nothing was kept"

    @property
    def _has_frontier(self) -> bool:
        from cachedit.strategies.auto import Auto

        return isinstance(self.strategy, Auto)

    @property
    def _checkpoint(self) -> Path:
        return Path(f"{self.target}.checkpoint")

    @property
    def _sweep(self) -> Path:
        return Path(f"{self.target}.frontier")

    @property
    def _begun(self) -> str:
        """The command that began what this one may resume; it alone says where the numbers of a profile come from."""
        return shlex.join(word for word in shlex.split(self.arguments.command) if word != "--resume")

    def _calibrated(self, prompts: list[str]) -> Profile:
        from cachedit.calibration import calibrate
        from cachedit.evaluate.demo import call_options
        from cachedit.evaluate.progress import progress_bar

        with progress_bar() as progress:
            return calibrate(
                self.pipe,
                self.strategy,
                prompts=prompts,
                num_inference_steps=self.arguments.steps,
                seed=self.arguments.seed,
                progress=progress,
                call_options=call_options(self.arguments),
                name=self.name,
                command=self._begun,
                checkpoint=self._checkpoint,
                resume=self.arguments.resume,
            )

    def _with_frontier(self, profile: Profile) -> Profile:
        from cachedit.evaluate.demo import call_options
        from cachedit.evaluate.progress import progress_bar
        from cachedit.evaluate.sweep import measure_frontier

        with progress_bar() as progress:
            return measure_frontier(
                self.pipe,
                profile,
                self.prompts[1::2],
                self.arguments.frontier_steps or [self.arguments.steps],
                seed=self.arguments.seed + len(self.prompts),
                call_options=call_options(self.arguments),
                progress=progress,
                checkpoint=self._sweep,
                resume=self.arguments.resume,
            )


def _arrays(strategy: Any) -> set[str]:
    """The arrays that a calibration for a strategy makes: what it reads, and what is measured along with that."""
    from cachedit.calibration.measure import Measure

    read = (*getattr(strategy, "profile_arrays", ()), *getattr(strategy, "also_calibrated", ()))
    return {made for array in read for made in getattr(Measure.registry.get(array), "makes", [array])}
