"""``cachedit compare``: two folders of pictures or videos, by name."""

from __future__ import annotations

import argparse
import json

from cachedit.cli.parser import Parser, add_metrics, print_json


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Describe the command to the parser."""
    text = "measure the pictures or videos of one folder against those of the same name in another"
    parser = commands.add_parser("compare", help=text, description=text, allow_abbrev=False)
    parser.set_defaults(run=run)
    parser.add_argument("reference", metavar="A", help="folder that is right")
    parser.add_argument("other", metavar="B", help="folder that is measured")
    parser.add_argument("--page", metavar="FILE", help="write a page with pictures and differences, the worst first")
    parser.add_argument("--output", "-o", metavar="FILE", help="write the numbers as JSON")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_metrics(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the arguments are those that ``add`` describes."""
    from cachedit.evaluate.comparison import told
    from cachedit.evaluate.folders import compare_folders
    from cachedit.evaluate.page import render
    from cachedit.evaluate.panel import load
    from cachedit.evaluate.progress import console, progress_bar
    from cachedit.evaluate.table import print_comparison
    from cachedit.evaluate.writing import check_target
    from cachedit.files import write_text

    for option, target in (("--page", arguments.page), ("-o", arguments.output)):
        if target:
            check_target(target, option)
    metrics = load(arguments.metric)
    with progress_bar() as progress:
        comparison = compare_folders(arguments.reference, arguments.other, metrics=metrics, progress=progress)
    comparison.conditions = {"command": arguments.command, **comparison.conditions}
    if arguments.output:
        text = json.dumps(comparison.to_dict(), indent=1, ensure_ascii=False, allow_nan=False)
        write_text(arguments.output, f"{text}\n")
    if arguments.page:
        write_text(arguments.page, render(comparison, "cachedit compare"))
    if arguments.json:
        print_json(comparison.to_dict())
        return 0
    print_comparison(console(), comparison)
    row = comparison.cached[0]
    for index in comparison.worst_first():
        shot = row.shots[index]
        print(f"{shot.prompt}: {told(shot.quality, comparison.metrics, shot.identical)}")
    for target in (arguments.page, arguments.output):
        if target:
            print(f"written: {target}")
    return 0
