"""``cachedit strategies``: what there is."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from typing import Any

from cachedit.cli.parser import Parser, print_json


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Describe the command to the parser."""
    text = "list the strategies"
    parser = commands.add_parser("strategies", help=text, description=text, allow_abbrev=False)
    parser.set_defaults(run=run)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON instead of a table")
    form.add_argument("--markdown", action="store_true", help="print the table of the README")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the arguments are those that ``add`` describes."""
    from cachedit import strategies  # noqa: F401  (fills the registry)
    from cachedit.strategy import FeatureStrategy, Strategy

    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "class": cls.__name__,
            "paper": cls.paper,
            "summary": (cls.__doc__ or "").strip().partition("\n")[0],
            "needs_profile": bool(cls().needed_arrays) if issubclass(cls, FeatureStrategy) else False,
        }
        for name, cls in sorted(Strategy.registry.items())
    ]
    if arguments.json:
        print_json(rows)
        return 0
    if arguments.markdown:
        print("\n".join(_markdown(rows)))
        return 0
    from rich.table import Table
    from rich.text import Text

    from cachedit.evaluate.progress import console

    table = Table("name", "class", "paper", "needs profile", "summary", show_edge=False, pad_edge=False)
    for row in rows:
        profile = "yes" if row["needs_profile"] else "no"
        cells = (row["name"], row["class"], row["paper"] or "-", profile, row["summary"])
        table.add_row(*(Text(str(cell)) for cell in cells))
    console().print(table)
    return 0


def _markdown(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The table of the README: one line per strategy, with links to the papers."""
    yield "| name | paper | what it does | profile |"
    yield "|---|---|---|---|"
    for row in rows:
        number = row["paper"].removeprefix("arXiv ")
        paper = f"[{number}](https://arxiv.org/abs/{number})" if number != row["paper"] else row["paper"] or "-"
        summary = re.sub(r" \([^()]*\)\.$", "", row["summary"]).rstrip(".")
        yield f"| `{row['class'].lower()}` | {paper} | {summary} | {'yes' if row['needs_profile'] else ''} |"
