"""A model, a strategy and a file: what the commands share that measure a model."""

from __future__ import annotations

import argparse
import functools
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cachedit.cli.parser import Parser, add_inputs, positive, set_threads

if TYPE_CHECKING:
    from cachedit.calibration.checkpoint import Checkpoint
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
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option of the strategy, recommended by the profile; repeatable",
    )
    parser.add_argument("--resume", action="store_true", help="go on where an interrupted calibration stopped")
    add_inputs(parser)


class Measuring:
    """One calibration from the command line.

    Args:
        arguments: as ``add_measuring`` describes them.
        strategy: to be calibrated for.

    Attributes:
        model: a folder or a hub id.
        name: of the profile.
        prompts: all that were given.
        target: file of the profile.
    """

    def __init__(self, arguments: argparse.Namespace, strategy: Strategy) -> None:
        from cachedit.evaluate.loading import load_prompts
        from cachedit.evaluate.writing import check_target, name_of, own_target
        from cachedit.samples import sample_path

        self.arguments, self.strategy = arguments, strategy
        self.model = str(sample_path(arguments.sample)) if arguments.sample else arguments.model
        self.name = arguments.name or arguments.sample or name_of(self.model)
        self.target = Path(arguments.output) if arguments.output else own_target(self.name)
        check_target(self.target, "-o")
        set_threads(arguments.threads, small=arguments.sample is not None)
        self.prompts = load_prompts(arguments.prompts, arguments.prompt, arguments.num_prompts, sample=arguments.sample)

    @functools.cached_property
    def pipe(self) -> Any:
        """The pipeline, loaded when it is asked for."""
        from cachedit.evaluate.loading import load_pipeline

        return load_pipeline(self.model, self.arguments.device, self.arguments.dtype)

    def profile(self) -> Profile:
        """Measure, and write the profile.

        Raises:
            ValueError: what is asked for cannot be measured, or the file holds what would be lost.
        """
        from cachedit.evaluate.progress import is_main
        from cachedit.evaluate.writing import check_replaceable

        if self._has_frontier:
            check_frontier(self._lengths, len(self.prompts))
        elif self.arguments.frontier_steps:
            self.check_of_auto("--frontier-steps")
        if self.arguments.output is None:
            called = str(getattr(self.pipe.config, "_name_or_path", "") or "")
            check_replaceable(self.target, _fingerprint(self.pipe), called, _arrays(self.strategy))
        profile = self._with_frontier(self._half()) if self._has_frontier else self._calibrated(self.prompts)
        if is_main():
            profile.save(self.target)
            self._first_half.remove()
        return profile

    def check_of_auto(self, flag: str) -> None:
        """Raise ValueError if a flag is given that only auto has, and another strategy."""
        if not self._has_frontier:
            raise ValueError(f"{flag} is of auto; allowed: with --strategy auto, not with {self.strategy.name}")

    @property
    def way_on(self) -> str:
        """What to do after an interruption."""
        if any(path.exists() for path in (self._checkpoint, self._first_half.path, self._sweep)):
            return f"Go on where it stopped: {self._begun} --resume"
        return "Nothing was kept"

    @property
    def _has_frontier(self) -> bool:
        from cachedit.strategies.auto import Auto

        return isinstance(self.strategy, Auto)

    @property
    def _lengths(self) -> list[int]:
        """Lengths of the runs of the frontier."""
        return self.arguments.frontier_steps or [self.arguments.steps]

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

    @functools.cached_property
    def _first_half(self) -> Checkpoint:
        """Keeps what was calibrated until the frontier is there: the file gets a whole profile or none."""
        from cachedit.calibration.checkpoint import Checkpoint
        from cachedit.evaluate.demo import call_options

        of = {
            "model": self.model,
            "strategy": repr(self.strategy),
            "prompts": self.prompts,
            "seed": self.arguments.seed,
            "steps": self.arguments.steps,
            "call options": call_options(self.arguments),
        }
        return Checkpoint(f"{self.target}.calibrated", of)

    def _half(self) -> Profile:
        """The calibration alone, without the frontier, perhaps from before an interruption."""
        from cachedit.calibration.ranks import Ranks
        from cachedit.evaluate.sweep import halves
        from cachedit.profile import Profile

        ranks = Ranks.here()

        def kept() -> str | None:
            if not ranks.is_main:
                return None
            self._first_half.open(self.arguments.resume)
            found = self._first_half.load("profile")
            return None if found is None else str(found["json"])

        known = ranks.exchange(kept)[0]  # the other machines have no file
        if known is not None:
            return Profile.from_json(known)
        profile = self._calibrated(halves(self.prompts)[0])
        if ranks.is_main:
            self._first_half.save("profile", {"json": profile.to_json()})
        return profile

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
        from cachedit.evaluate.sweep import halves, measure_frontier

        with progress_bar() as progress:
            return measure_frontier(
                self.pipe,
                profile,
                halves(self.prompts)[1],
                self._lengths,
                seed=self.arguments.seed + len(self.prompts),
                call_options=call_options(self.arguments),
                progress=progress,
                checkpoint=self._sweep,
                resume=self.arguments.resume,
            )


def check_frontier(lengths: Sequence[int], prompts: int) -> None:
    """Raise ValueError unless a frontier can be measured with runs of these lengths on so many prompts."""
    from cachedit.strategy import FEW_STEPS

    if min(lengths) <= FEW_STEPS:
        raise ValueError(
            f"the frontier is to be measured with {min(lengths)} steps; allowed: {FEW_STEPS + 1} or more, as shorter "
            "runs reuse nothing. Give more --steps or other --frontier-steps."
        )
    if prompts < 2:
        raise ValueError(
            f"got {prompts} prompt; allowed: 2 or more, as the frontier is measured on every second one. Give more."
        )


def _fingerprint(pipe: Any) -> dict[str, Any]:
    from cachedit.feature.attachment import find_denoisers
    from cachedit.feature.families import block_lists
    from cachedit.shipped import fingerprint

    denoisers = list(find_denoisers(pipe).values())
    return fingerprint(denoisers[0], block_lists(denoisers[0]), len(denoisers))


def _arrays(strategy: Any) -> set[str]:
    """The arrays that a calibration for a strategy makes: what it reads, and what is measured along with that."""
    from cachedit.calibration.measure import Measure
    from cachedit.frontier import OF_FRONTIER
    from cachedit.strategies.auto import Auto

    read = (*getattr(strategy, "profile_arrays", ()), *getattr(strategy, "also_calibrated", ()))
    made = {array for name in read for array in getattr(Measure.registry.get(name), "makes", [name])}
    return made | ({*OF_FRONTIER} if isinstance(strategy, Auto) else set())
