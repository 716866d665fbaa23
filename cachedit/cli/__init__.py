"""The ``cachedit`` command, one file per command. Heavy imports wait until one runs, so ``--help`` answers at once."""

from __future__ import annotations

import shlex
import sys

from cachedit import __version__
from cachedit.cli import app, calibrate, compare, demo, probe, profile, report, strategies, tune
from cachedit.cli.parser import Parser

COMMANDS = (demo, app, strategies, calibrate, probe, profile, tune, report, compare)


def main(argv: list[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: the arguments; None takes the process's.

    Returns:
        The exit code: 0, 2 for what the user can mend (told in one line on stderr), 130 when interrupted.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = build_parser().parse_args(words)
    arguments.command = shlex.join(["cachedit", *words])
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character is no reason to fail
    try:
        return arguments.run(arguments)
    except KeyboardInterrupt:
        print("cachedit: interrupted", file=sys.stderr)
        return 130
    except (ValueError, TypeError, OSError) as error:
        if arguments.traceback:
            raise
        print(f"cachedit: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def build_parser() -> Parser:
    """The parser of all commands; ``run`` in the result is the command."""
    parser = Parser(prog="cachedit", description="Feature caching for diffusion models.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"cachedit {__version__}")
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return parser
