"""``cachedit calibrate``: a model measured once, and the profile of it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cachedit.cli.measuring import Measuring, add_measuring
from cachedit.cli.parser import Parser, print_json

if TYPE_CHECKING:
    from cachedit.profile import Profile


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Describe the command to the parser."""
    text = "measure a model once and store the profile that strategies read"
    parser = commands.add_parser("calibrate", help=text, description=text, allow_abbrev=False)
    parser.set_defaults(run=run)
    parser.add_argument("--strategy", default="magcache", metavar="NAME", help="default: %(default)s")
    parser.add_argument("--plot", metavar="FILE.svg", help="of auto: draw the measured frontier")
    parser.add_argument("--json", action="store_true", help="print what the profile holds as JSON")
    add_measuring(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the arguments are those that ``add`` describes."""
    from cachedit import strategies  # noqa: F401  (fills the registry)
    from cachedit.evaluate.demo import parse_options
    from cachedit.evaluate.progress import is_main
    from cachedit.evaluate.writing import check_target
    from cachedit.strategy import Strategy

    measuring = Measuring(arguments, Strategy.find(arguments.strategy, parse_options(arguments.option)))
    if arguments.plot:
        measuring.check_of_auto("--plot")
        check_target(arguments.plot, "--plot")
    try:
        profile = measuring.profile()
    except KeyboardInterrupt:
        if is_main():
            print(f"cachedit: interrupted. {measuring.way_on}", file=sys.stderr)
        return 130
    if is_main():
        _report(profile, measuring.target, arguments)
    return 0


def _report(profile: Profile, target: Path, arguments: argparse.Namespace) -> None:
    """Print what was written, and how it is used."""
    from cachedit.cli.description import FRONTIER, describe, named, plot_frontier, print_frontier
    from cachedit.evaluate.progress import console

    if arguments.plot:
        plot_frontier(profile, arguments.plot)
    if arguments.json:
        print_json({"file": str(target), **describe(profile)})
        return
    sizes = {name: len(next(iter(rows.values()))) for name, rows in profile.arrays.items()}
    arrays = ", ".join(f"{name} ({size} {profile.axes.get(name, ['step'])[0]}s)" for name, size in sizes.items())
    found = f', profile="{target}"' if arguments.output else ""
    print(f"profile: {target}")
    print(f"  model:    {profile.model['class'] if profile.model else 'any'}")
    print(f"  arrays:   {arrays}")
    print(f"  branches: {', '.join(profile.branches)}")
    print(f"  from:     {profile.provenance['prompts']} prompts x {arguments.steps} steps, seed {arguments.seed}")
    print(f'  use it:   cachedit.wrap(pipe, "{arguments.strategy}"{found})')
    if FRONTIER in profile.arrays:
        print_frontier(console(), named(profile.arrays[FRONTIER]))
    if arguments.plot:
        print(f"\nplot: {arguments.plot}")
