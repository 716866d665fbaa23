"""The ``cachedit`` command. Heavy imports wait until a command runs, so that ``--help`` answers at once."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from cachedit import __version__


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


class Parser(argparse.ArgumentParser):
    """Tells an error in one line."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and where the options are described, and exit with code 2."""
        self.exit(2, f"{self.prog}: {message}. Options: {self.prog} --help\n")


def build_parser() -> Parser:
    """The parser of all commands; ``run`` in the result is the command."""
    parser = Parser(prog="cachedit", description="Feature caching for diffusion models.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"cachedit {__version__}")
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_strategies(commands)
    _add_calibrate(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction[Parser]) -> None:
    text = "compare caches with the bare pipeline on a few prompts: table, page, JSON"
    parser = commands.add_parser("demo", help=text, description=text, allow_abbrev=False)
    parser.set_defaults(run=_demo)
    parser.add_argument("--model", metavar="PATH_OR_ID", help="diffusers pipeline (default: the sample of cachedit)")
    parser.add_argument("--strategy", nargs="+", action="extend", metavar="NAME", help="default: magcache")
    parser.add_argument("--profile", help="file or name of a profile (default: the shipped one of the model)")
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="option of cachedit.wrap; repeatable"
    )
    parser.add_argument("--steps", type=_positive, default=28, help="inference steps (default: %(default)s)")
    parser.add_argument("--repeats", type=_positive, default=1, help="measured runs per prompt (default: %(default)s)")
    parser.add_argument("--out", default="cachedit-demo", metavar="DIR", help="of the page (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write conditions and rows as JSON")
    parser.add_argument("--picture", metavar="FILE", help="draw pictures and step strips into one PNG")
    _add_inputs(parser)


def _add_strategies(commands: argparse._SubParsersAction[Parser]) -> None:
    text = "list the strategies"
    parser = commands.add_parser("strategies", help=text, description=text, allow_abbrev=False)
    parser.set_defaults(run=_strategies)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON instead of a table")
    form.add_argument("--markdown", action="store_true", help="print the table of the README")


def _add_calibrate(commands: argparse._SubParsersAction[Parser]) -> None:
    text = "measure a model once and store the profile that strategies read"
    parser = commands.add_parser("calibrate", help=text, description=text, allow_abbrev=False)
    parser.set_defaults(run=_calibrate)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("model", nargs="?", metavar="MODEL", help="diffusers pipeline: a folder or a hub id")
    model.add_argument("--sample", metavar="NAME", help='calibrate a sample of cachedit instead ("image")')
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the profile to write")
    parser.add_argument("--name", help="to ask for the profile by (default: the sample's name, else none)")
    parser.add_argument("--strategy", default="magcache", metavar="NAME", help="default: %(default)s")
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="recommended option to store; repeatable"
    )
    parser.add_argument("--steps", type=_positive, default=50, help="inference steps (default: %(default)s)")
    _add_inputs(parser)


def _add_inputs(parser: Parser) -> None:
    """What a run of a pipeline takes, for every command that runs one."""
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompts", metavar="FILE", help="text file, one prompt per line")
    prompts.add_argument(
        "--prompt", nargs="+", action="extend", metavar="TEXT", help="default: the prompts of the sample"
    )
    parser.add_argument("--num-prompts", type=_positive, metavar="N", help="use the first N prompts")
    parser.add_argument("--seed", type=int, default=0, help="of the first prompt (default: %(default)s)")
    parser.add_argument("--guidance", type=float, metavar="G", help="guidance_scale (default: the pipeline's)")
    parser.add_argument("--height", type=_positive, help="pixels (default: the pipeline's)")
    parser.add_argument("--width", type=_positive, help="pixels (default: the pipeline's)")
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="default: float32 on a cpu, else bfloat16"
    )
    parser.add_argument(
        "--threads", type=_positive, metavar="N", help="CPU threads (default: 1 for the sample, else torch's)"
    )


def _demo(arguments: argparse.Namespace) -> int:
    from cachedit.evaluate.demo import run_demo

    _set_threads(arguments.threads, small=arguments.model is None)
    return run_demo(arguments)


def _strategies(arguments: argparse.Namespace) -> int:
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
        print(json.dumps(rows, indent=1, ensure_ascii=False))
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


def _calibrate(arguments: argparse.Namespace) -> int:
    from cachedit import strategies  # noqa: F401  (fills the registry)
    from cachedit.calibration import calibrate
    from cachedit.evaluate.demo import call_options, parse_options
    from cachedit.evaluate.loading import load_pipeline, load_prompts
    from cachedit.evaluate.progress import progress_bar
    from cachedit.evaluate.writing import check_target
    from cachedit.samples import sample_path
    from cachedit.strategy import Strategy

    strategy = Strategy.find(arguments.strategy, parse_options(arguments.option))
    check_target(arguments.output, "-o")
    _set_threads(arguments.threads, small=arguments.sample is not None)
    prompts = load_prompts(arguments.prompts, arguments.prompt, arguments.num_prompts)
    model = str(sample_path(arguments.sample)) if arguments.sample else arguments.model
    pipe = load_pipeline(model, arguments.device, arguments.dtype)
    with progress_bar() as progress:
        profile = calibrate(
            pipe,
            strategy,
            prompts=prompts,
            num_inference_steps=arguments.steps,
            seed=arguments.seed,
            progress=progress,
            call_options=call_options(arguments),
            name=arguments.name or arguments.sample or "",
            command=arguments.command,
            checkpoint=f"{arguments.output}.training",
        )
    profile.save(arguments.output)
    sizes = {name: len(next(iter(rows.values()))) for name, rows in profile.arrays.items()}
    arrays = ", ".join(f"{name} ({size} {profile.axes.get(name, ['step'])[0]}s)" for name, size in sizes.items())
    print(f"profile: {arguments.output}")
    print(f"  model:    {profile.model['class'] if profile.model else 'any'}")
    print(f"  arrays:   {arrays}")
    print(f"  branches: {', '.join(profile.branches)}")
    print(f"  from:     {len(prompts)} prompts x {arguments.steps} steps, seed {arguments.seed}")
    print(f'  use it:   cachedit.wrap(pipe, "{arguments.strategy}", profile="{arguments.output}")')
    return 0


def _set_threads(count: int | None, small: bool) -> None:
    """Set torch's threads; a small model gets one, since more spend their time waiting for each other."""
    if count is None and not small:
        return
    import torch

    torch.set_num_threads(count or 1)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, allowed: 1 or more")
    return value


if __name__ == "__main__":
    sys.exit(main())
