"""``cachedit calibrate``: a model measured once, and the profile of it."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cachedit.cli.parser import Parser, add_inputs, positive, print_json, set_threads

if TYPE_CHECKING:
    from cachedit.profile import Profile
    from cachedit.strategy import Strategy


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Describe the command to the parser."""
    text = "measure a model once and store the profile that strategies read"
    parser = commands.add_parser("calibrate", help=text, description=text, allow_abbrev=False)
    parser.set_defaults(run=run)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("model", nargs="?", metavar="MODEL", help="diffusers pipeline: a folder or a hub id")
    model.add_argument("--sample", metavar="NAME", help='calibrate a sample of cachedit instead ("image")')
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="the profile to write (default: NAME.json of your folder of profiles)"
    )
    parser.add_argument(
        "--name", help="to ask for the profile by (default: the sample's name, else the last part of MODEL)"
    )
    parser.add_argument("--strategy", default="magcache", metavar="NAME", help="default: %(default)s")
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="recommended option to store; repeatable"
    )
    parser.add_argument("--steps", type=positive, default=50, help="inference steps (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on where an interrupted calibration stopped")
    parser.add_argument("--json", action="store_true", help="print what the profile holds as JSON")
    add_inputs(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the arguments are those that ``add`` describes."""
    from cachedit import strategies  # noqa: F401  (fills the registry)
    from cachedit.evaluate.demo import parse_options
    from cachedit.evaluate.loading import load_pipeline, load_prompts
    from cachedit.evaluate.progress import is_main
    from cachedit.evaluate.writing import check_replaceable, check_target, name_of, own_target
    from cachedit.samples import sample_path
    from cachedit.strategy import Strategy

    strategy = Strategy.find(arguments.strategy, parse_options(arguments.option))
    model = str(sample_path(arguments.sample)) if arguments.sample else arguments.model
    arguments.name = arguments.name or arguments.sample or name_of(model)
    target = Path(arguments.output) if arguments.output else own_target(arguments.name)
    check_target(target, "-o")
    checkpoint = Path(f"{target}.checkpoint")
    set_threads(arguments.threads, small=arguments.sample is not None)
    prompts = load_prompts(
        arguments.prompts, arguments.prompt, arguments.num_prompts, sample=arguments.sample is not None
    )
    pipe = load_pipeline(model, arguments.device, arguments.dtype)
    if arguments.output is None:
        check_replaceable(target, pipe, _arrays(strategy))
    try:
        profile = _measured(pipe, strategy, prompts, arguments, checkpoint)
    except KeyboardInterrupt:
        if is_main():
            way = f"Go on where it stopped: {_begun(arguments.command)} --resume"
            print(f"cachedit: interrupted. {way if checkpoint.exists() else 'Nothing was kept'}", file=sys.stderr)
        return 130
    if is_main():
        profile.save(target)
        _report(profile, target, arguments)
    return 0


def _measured(
    pipe: Any, strategy: Strategy, prompts: list[str], arguments: argparse.Namespace, checkpoint: Path
) -> Profile:
    """What is measured on the pipeline, all of it under one bar."""
    from cachedit.calibration import calibrate
    from cachedit.evaluate.demo import call_options
    from cachedit.evaluate.progress import progress_bar

    with progress_bar() as progress:
        return calibrate(
            pipe,
            strategy,
            prompts=prompts,
            num_inference_steps=arguments.steps,
            seed=arguments.seed,
            progress=progress,
            call_options=call_options(arguments),
            name=arguments.name,
            command=_begun(arguments.command),
            checkpoint=checkpoint,
            resume=arguments.resume,
        )


def _arrays(strategy: Strategy) -> set[str]:
    """The arrays that a calibration for a strategy makes: what it reads, and what is measured along with that."""
    from cachedit.calibration.measure import Measure

    read: tuple[str, ...] = getattr(strategy, "profile_arrays", ())
    return {made for array in read for made in getattr(Measure.registry.get(array), "makes", [array])}


def _begun(command: str) -> str:
    """The command that began what this one may resume; it alone says where the numbers of a profile come from."""
    return shlex.join(word for word in shlex.split(command) if word != "--resume")


def _report(profile: Profile, target: Path, arguments: argparse.Namespace) -> None:
    """Print what was written, and how it is used."""
    from cachedit.cli.description import FRONTIER, describe

    if arguments.json:
        print_json({"file": str(target), **describe(profile)})
        return
    sizes = {name: len(next(iter(rows.values()))) for name, rows in profile.arrays.items()}
    arrays = ", ".join(f"{name} ({size} {profile.axes.get(name, ['step'])[0]}s)" for name, size in sizes.items())
    branches = dict.fromkeys(key for name, rows in profile.arrays.items() if name != FRONTIER for key in rows)
    found = f', profile="{target}"' if arguments.output else ""
    print(f"profile: {target}")
    print(f"  model:    {profile.model['class'] if profile.model else 'any'}")
    print(f"  arrays:   {arrays}")
    print(f"  branches: {', '.join(branches)}")
    print(f"  from:     {profile.provenance['prompts']} prompts x {arguments.steps} steps, seed {arguments.seed}")
    print(f'  use it:   cachedit.wrap(pipe, "{arguments.strategy}"{found})')
