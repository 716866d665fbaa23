"""``cachedit report``: caches measured against the bare pipeline, with everything kept."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from cachedit.cli.parser import Parser, add_inputs, add_metrics, positive, print_json, set_threads

STEPS = 28  # of pictures
OF_PICTURES = ("--guidance", "--height", "--width", "--metric")


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Describe the command to the parser."""
    text = "measure caches against the bare pipeline and write a report: page, Markdown, JSON, pictures"
    parser = commands.add_parser("report", help=text, description=text, allow_abbrev=False)
    parser.set_defaults(run=run)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument(
        "model", nargs="?", metavar="MODEL", help="diffusers pipeline or diffusion language model: a folder or a hub id"
    )
    model.add_argument("--sample", metavar="NAME", help='a sample of cachedit instead ("image", "video", "text")')
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
        help="inference steps (default: 28; for text one for each token of the answer; rolling caches have their own)",
    )
    parser.add_argument("--seeds", type=positive, default=1, metavar="N", help="per prompt, from --seed (default: 1)")
    parser.add_argument("--repeats", type=positive, default=1, help="measured runs of each (default: %(default)s)")
    add_metrics(parser)
    parser.add_argument(
        "--call",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="of the pipeline's call, such as num_frames=49, or of cachedit.generate, such as gen_length=256",
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run code that lies beside the weights of a language model"
    )
    parser.add_argument("--resume", action="store_true", help="go on where an interrupted report stopped")
    parser.add_argument("--json", action="store_true", help="print what report.json holds")
    add_inputs(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the arguments are those that ``add`` describes."""
    from cachedit.evaluate.configuration import parse_configuration
    from cachedit.evaluate.language import is_language_model
    from cachedit.evaluate.loading import load_prompts
    from cachedit.evaluate.progress import is_main
    from cachedit.evaluate.report import UNFINISHED
    from cachedit.samples import sample_path

    configurations = [parse_configuration(text) for text in dict.fromkeys(arguments.strategies)]
    model = str(sample_path(arguments.sample)) if arguments.sample else arguments.model
    prompts = load_prompts(arguments.prompts, arguments.prompt, arguments.num_prompts, arguments.sample)
    set_threads(arguments.threads, small=arguments.sample is not None)
    begun = shlex.join(word for word in shlex.split(arguments.command) if word != "--resume")
    named = f"the sample {arguments.sample!r} that comes with cachedit" if arguments.sample else model
    of_all: dict[str, Any] = {
        "folder": arguments.output,
        "seeds": range(arguments.seed, arguments.seed + arguments.seeds),
        "repeats": arguments.repeats,
        "resume": arguments.resume,
        "conditions": {"command": begun, "model": named},
    }
    measured = _of_text if is_language_model(model) else _of_pictures
    try:
        report = measured(arguments, model, configurations, prompts, of_all)
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

        report.print(console())
        print(f"\nreport: {page}")
    return 0


def _of_pictures(
    arguments: argparse.Namespace, model: str, configurations: list[Any], prompts: list[str], of_all: dict[str, Any]
) -> Any:
    from cachedit.evaluate.configuration import parse_options
    from cachedit.evaluate.demo import call_options
    from cachedit.evaluate.loading import load_pipeline
    from cachedit.evaluate.panel import load
    from cachedit.evaluate.progress import progress_bar
    from cachedit.evaluate.report import measure
    from cachedit.samples import call_options as sample_options

    if arguments.trust_remote_code:
        raise ValueError(f"--trust-remote-code is of language models; allowed: leave it out, as {model} is none")
    metrics = load(arguments.metric)
    options = sample_options(arguments.sample) if arguments.sample else {}
    options |= call_options(arguments) | parse_options(arguments.call, "--call")
    pipe = load_pipeline(model, arguments.device, arguments.dtype)
    steps = arguments.steps or STEPS
    with progress_bar() as progress:
        return measure(
            pipe, configurations, prompts, steps, call_options=options, metrics=metrics, progress=progress, **of_all
        )


def _of_text(
    arguments: argparse.Namespace, model: str, configurations: list[Any], prompts: list[str], of_all: dict[str, Any]
) -> Any:
    from cachedit.evaluate.configuration import parse_options
    from cachedit.evaluate.language import load_language_model
    from cachedit.evaluate.progress import progress_bar
    from cachedit.evaluate.text_report import measure_text
    from cachedit.evaluate.text_sample import score
    from cachedit.samples import call_options

    given = [flag for flag in OF_PICTURES if getattr(arguments, flag.strip("-"))]
    if given:
        raise ValueError(f"{', '.join(given)} is of pictures; allowed: leave it out, as {model} writes text")
    if not (arguments.sample or arguments.prompt or arguments.prompts):
        raise ValueError(f"got no prompts for {model}; allowed: some with --prompt TEXT ... or --prompts FILE")
    options = (call_options(arguments.sample) if arguments.sample else {}) | parse_options(arguments.call, "--call")
    if arguments.steps:
        options["steps"] = arguments.steps
    scorer = score if arguments.sample else None
    language = load_language_model(
        model, arguments.device, arguments.dtype, trust_remote_code=arguments.trust_remote_code
    )
    with progress_bar() as progress:
        return measure_text(
            language, configurations, prompts, call_options=options, scorer=scorer, progress=progress, **of_all
        )
