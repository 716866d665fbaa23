"""``cachedit profile``: look at profiles, check them, tell them apart, and list what there is."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from cachedit.cli.parser import Parser, print_json


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Describe the command to the parser."""
    text = "look at profiles, check them, compare them, list what there is"
    parser = commands.add_parser("profile", help=text, description=text, allow_abbrev=False)
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    profile = "a file, hub:org/name, or a name (cachedit profile list)"
    show = _add(actions, "show", _show, "print what a profile holds")
    show.add_argument("profile", metavar="PROFILE", help=profile)
    show.add_argument("--plot", metavar="FILE.svg", help="draw the measured frontier")
    validate = _add(actions, "validate", _validate, "check a file; exit code 0: a whole profile, 2: not")
    validate.add_argument("file", metavar="FILE", help="the file to check")
    diff = _add(actions, "diff", _diff, "compare two profiles; exit code 0: equal, 1: not")
    diff.add_argument("a", metavar="A", help=profile)
    diff.add_argument("b", metavar="B", help=profile)
    _add(actions, "list", _list, "list your profiles and those that are shipped")


def _add(
    actions: argparse._SubParsersAction[Parser], name: str, run: Callable[[argparse.Namespace], int], text: str
) -> Parser:
    parser = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _show(arguments: argparse.Namespace) -> int:
    from cachedit.cli.description import describe, plot_frontier, print_description
    from cachedit.evaluate.progress import console
    from cachedit.evaluate.writing import check_target
    from cachedit.shipped import find_profile

    profile = find_profile(arguments.profile)
    if arguments.plot:
        check_target(arguments.plot, "--plot")
        plot_frontier(profile, arguments.plot)
    described = describe(profile)
    if arguments.json:
        print_json(described)
    else:
        print_description(console(), described)
        if arguments.plot:
            print(f"\nplot: {arguments.plot}")
    return 0


def _validate(arguments: argparse.Namespace) -> int:
    from cachedit.errors import ProfileError
    from cachedit.profile import Profile

    try:
        Profile.load(arguments.file)
    except ProfileError as error:
        if arguments.json:
            print_json({"file": arguments.file, "valid": False, "error": str(error)})
        raise
    if arguments.json:
        print_json({"file": arguments.file, "valid": True, "error": None})
    else:
        print(f"{arguments.file}: a whole profile")
    return 0


def _diff(arguments: argparse.Namespace) -> int:
    from cachedit.cli.difference import compare_profiles, told
    from cachedit.shipped import find_profile

    found = compare_profiles(find_profile(arguments.a), find_profile(arguments.b))
    if arguments.json:
        print_json(found)
        return int(not found["equal"])
    for name, (a, b) in found["metadata"].items():
        print(f"{name}: {_text(a)} | {_text(b)}")
    for name, difference in found["arrays"].items():
        print(told(name, difference))
    return int(not found["equal"])


def _text(value: Any) -> str:
    return "-" if value in (None, "") else str(value)


def _list(arguments: argparse.Namespace) -> int:
    from rich.table import Table
    from rich.text import Text

    from cachedit import user_profiles
    from cachedit.evaluate.progress import console
    from cachedit.shipped import shipped

    stored = user_profiles.stored()
    rows = [_row(entry.name, entry.profile, "yours", entry.error) for entry in stored]
    rows += [_row(name, profile, "shipped") for name, profile in shipped().items()]
    if arguments.json:
        print_json({"folder": str(user_profiles.folder()), "profiles": rows})
        return 0
    table = Table("name", "model", "arrays", "from", show_edge=False, pad_edge=False)
    for row in rows:
        cells = ("?", "damaged") if row["error"] else (row["model"] or "any", ", ".join(row["arrays"]))
        table.add_row(*(Text(cell) for cell in (row["name"], *cells, row["from"])))
    console().print(table)
    print(f"\nyours: {user_profiles.folder()}")
    for entry in stored:
        if entry.error:
            print(f"damaged: {entry.error}")
    return 0


def _row(name: str, profile: Any, origin: str, error: str = "") -> dict[str, Any]:
    return {
        "name": name,
        "model": profile.model["class"] if profile is not None and profile.model else None,
        "arrays": list(profile.arrays) if profile is not None else [],
        "from": origin,
        "error": error or None,
    }
