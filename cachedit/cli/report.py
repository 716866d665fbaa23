"""``cachedit report``: caches measured against the bare pipeline, with everything kept."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from cachedit.cli.parser import Parser, add_inputs, add_metrics, positive, print_json, set_threads


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Describe the command to the parser."""
    text = "measure caches against the bare pipeline and write a report: page, Markdown, JSON, pictures"
    parser = commands.add_parser("report", help=text, description=text, allow_abbrev=False)
    parser.set_defaults(run=run)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("model", nargs="?", metavar="MODEL", help="diffusers pipeline: a folder or a hub id")
    model.add_argument("--sample", metavar="NAME", help='a sample of cachedit instead ("image", "video")')
    parser.add_argument(
        "--strategies",
        nargs="+",
        action="extend",
        required=True,
        metavar="NAME[:KEY=VALUE,...]",
        help="what is measured, for example: hyca magcache:threshold=0.12,max_skip_steps=3 auto:target_speedup=2",
    )
    parser.add_argument("-o", "--output", default="report", metavar="DIR", help="default: %(default)s")
    parser.add_argument(
        "--steps",
        type=positive,
        default=28,
        help="inference steps (default: %(default)s; rolling caches have their own)",
    )
    parser.add_argument("--seeds", type=positive, default=1, metavar="N", help="per prompt, from --seed (default: 1)")
    parser.add_argument("--repeats", type=positive, default=1, help="measured runs of each (default: %(default)s)")
    add_metrics(parser)
    parser.add_argument(
        "--call", action="append", default=[], metavar="KEY=VALUE", help="of the pipeline's call, such as num_frames=49"
    )
    parser.add_argument("--resume", action="store_true", help="go on where an interrupted report stopped")
    parser.add_argument("--json", action="store_true", help="print what report.json holds")
    add_inputs(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the arguments are those that ``add`` describes."""
    from cachedit.evaluate.configuration import parse_configuration, parse_options
    from cachedit.evaluate.demo import call_options
    from cachedit.evaluate.loading import load_pipeline, load_prompts
    from cachedit.evaluate.panel import load
    from cachedit.evaluate.progress import is_main, progress_bar
    from cachedit.evaluate.report import UNFINISHED, measure
    from cachedit.samples import call_options as sample_options
    from cachedit.samples import sample_path

    configurations = [parse_configuration(text) for text in dict.fromkeys(arguments.strategies)]
    metrics = load(arguments.metric)
    options = sample_options(arguments.sample) if arguments.sample else {}
    options |= call_options(arguments) | parse_options(arguments.call, "--call")
    prompts = load_prompts(arguments.prompts, arguments.prompt, arguments.num_prompts, sample=arguments.sample)
    set_threads(arguments.threads, small=arguments.sample is not None)
    model = str(sample_path(arguments.sample)) if arguments.sample else arguments.model
    pipe = load_pipeline(model, arguments.device, arguments.dtype)
    named = f"the sample {arguments.sample!r} that comes with cachedit" if arguments.sample else model
    begun = shlex.join(word for word in shlex.split(arguments.command) if word != "--resume")
    try:
        with progress_bar() as progress:
            report = measure(
                pipe,
                configurations,
                prompts,
                arguments.steps,
                folder=arguments.output,
                seeds=range(arguments.seed, arguments.seed + arguments.seeds),
                repeats=arguments.repeats,
                call_options=options,
                metrics=metrics,
                progress=progress,
                resume=arguments.resume,
                conditions={"command": begun, "model": named},
            )
    except KeyboardInterrupt:
        if is_main():
            kept = (Path(arguments.output) / UNFINISHED).exists()
            way_on = f"Go on where it stopped: {begun} --resume" if kept else "Nothing was kept"
            print(f"cachedit: interrupted. {way_on}", file=sys.stderr)
        return 130
    page = report.write()
    if is_main() and arguments.json:
        print_json(report.to_dict())
    elif is_main():
        from cachedit.evaluate.progress import console
        from cachedit.evaluate.table import print_comparison

        print_comparison(console(), report.comparison)
        print(f"\nreport: {page}")
    return 0
