"""``cachedit demo``: caches beside the bare pipeline."""

from __future__ import annotations

import argparse

from cachedit.cli.parser import Parser, add_inputs, positive, set_threads
from cachedit.cli.targets import add_targets


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Describe the command to the parser."""
    text = "compare caches with the bare pipeline on a few prompts: table, page, JSON"
    parser = commands.add_parser("demo", help=text, description=text, allow_abbrev=False)
    parser.set_defaults(run=run)
    parser.add_argument("--model", metavar="PATH_OR_ID", help="diffusers pipeline (default: the sample of cachedit)")
    parser.add_argument("--strategy", nargs="+", action="extend", metavar="NAME", help="default: magcache")
    parser.add_argument("--profile", help="file, name or hub:org/name (default: the one that is found for the model)")
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="option of cachedit.wrap; repeatable"
    )
    add_targets(parser)
    parser.add_argument("--steps", type=positive, default=28, help="inference steps (default: %(default)s)")
    parser.add_argument("--repeats", type=positive, default=1, help="measured runs per prompt (default: %(default)s)")
    parser.add_argument("--out", default="cachedit-demo", metavar="DIR", help="of the page (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write conditions and rows as JSON")
    parser.add_argument("--picture", metavar="FILE", help="draw pictures and step strips into one PNG")
    add_inputs(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the arguments are those that ``add`` describes."""
    from cachedit.evaluate.demo import run_demo

    set_threads(arguments.threads, small=arguments.model is None)
    return run_demo(arguments)
