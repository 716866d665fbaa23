"""``cachedit tune``: a model measured once if need be, the schedule for a target, and a program that uses it."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cachedit.cli.measuring import Measuring, add_measuring
from cachedit.cli.parser import Parser, positive, print_json
from cachedit.cli.targets import add_targets, target_of
from cachedit.run import Run

if TYPE_CHECKING:
    from cachedit.evaluate.comparison import Shot
    from cachedit.profile import Profile
    from cachedit.strategy import Strategy


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Describe the command to the parser."""
    text = "choose the schedule for a speed or a quality, try it, and write a program that uses it"
    told = f"{text}. The model is measured if no profile of it knows what speed costs."
    parser = commands.add_parser("tune", help=text, description=told, allow_abbrev=False)
    parser.set_defaults(run=run)
    add_targets(parser, required=True)
    parser.add_argument("--run-steps", type=positive, metavar="N", help="length of the run (default: --steps)")
    parser.add_argument("--snippet", metavar="FILE", help="the program to write (default: NAME-tuned.py)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--profile", help="file, name or hub:org/name (default: the one that is found for the model, else a new one)"
    )
    source.add_argument("--recalibrate", action="store_true", help="measure anew, as -o and --resume do too")
    parser.add_argument("--json", action="store_true", help="print all of it as JSON")
    add_measuring(parser)


class Source(NamedTuple):
    """A profile, what ``cachedit.wrap`` takes for it, and how it was come by."""

    profile: Profile
    reference: str
    origin: str


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the arguments are those that ``add`` describes."""
    from cachedit.evaluate.demo import parse_options
    from cachedit.evaluate.progress import is_main
    from cachedit.evaluate.writing import check_target
    from cachedit.files import write_text
    from cachedit.strategies.auto import Auto
    from cachedit.strategy import Strategy

    options = parse_options(arguments.option)
    asked = options | target_of(arguments)
    tuned = Strategy.find("auto", asked)  # an impossible target is refused before anything is loaded
    measuring = Measuring(arguments, Auto(**options))
    snippet = Path(arguments.snippet or f"{measuring.name}-tuned.py")
    check_target(snippet, "--snippet")
    try:
        source = _source(measuring)
    except KeyboardInterrupt:
        if is_main():
            print(f"cachedit: interrupted. {measuring.way_on}", file=sys.stderr)
        return 130
    if not is_main():
        return 0
    trial = _tried(measuring, source.profile, tuned)
    text = program(measuring, source.reference, asked, snippet.with_suffix(".png").name)
    write_text(snippet, text)
    if arguments.json:
        print_json(_described(measuring, source, trial, snippet, text))
    else:
        _report(source, trial, snippet)
    return 0


def _source(measuring: Measuring) -> Source:
    """The profile that is named, else the one that is found and has a frontier, else a new one."""
    from cachedit.calibration.ranks import Ranks
    from cachedit.errors import ProfileError
    from cachedit.shipped import find_profile

    arguments = measuring.arguments
    anew = [flag for flag, given in (("-o", arguments.output), ("--resume", arguments.resume)) if given]
    if arguments.profile:
        if anew:
            raise ValueError(f"--profile {arguments.profile} is taken as it is; allowed: without {' and '.join(anew)}")
        path = os.path.abspath(arguments.profile) if os.path.isfile(arguments.profile) else arguments.profile
        return Source(find_profile(arguments.profile), path, "named")
    if not anew and not arguments.recalibrate:
        ranks = Ranks.here()
        try:
            return ranks.exchange(lambda: _found(measuring) if ranks.is_main else None)[0]  # type: ignore[return-value]
        except ProfileError as error:
            if ranks.is_main:
                reason = " ".join(str(error).partition(". ")[0].split())
                told = f"the model is measured, as no profile is found (--profile names one): {reason}"
                print(f"cachedit: {told}", file=sys.stderr)
    return Source(measuring.profile(), os.path.abspath(measuring.target), "measured now")


def _found(measuring: Measuring) -> Source:
    """The profile with a frontier that is found for the model.

    Raises:
        ProfileError: there is none, or more than one fits.
    """
    from cachedit import user_profiles
    from cachedit.feature.attachment import find_denoisers
    from cachedit.feature.families import block_lists
    from cachedit.frontier import OF_FRONTIER
    from cachedit.shipped import fingerprint, resolve
    from cachedit.solver import ARRAYS

    denoisers = list(find_denoisers(measuring.pipe).values())
    prints = fingerprint(denoisers[0], block_lists(denoisers[0]), len(denoisers))
    called = str(getattr(measuring.pipe.config, "_name_or_path", "") or "")
    profile = resolve(None, prints, called, "Auto", {**ARRAYS, **OF_FRONTIER})
    own = next((entry.path for entry in user_profiles.stored() if entry.profile is profile), None)
    return Source(profile, str(own or profile.name), "found among yours" if own else "shipped")


def _tried(measuring: Measuring, profile: Profile, tuned: Strategy) -> Shot:
    """One prompt under auto."""
    from cachedit.evaluate.compare import Configuration, take
    from cachedit.evaluate.comparison import Shot
    from cachedit.evaluate.demo import call_options

    arguments = measuring.arguments
    shot = Shot(measuring.prompts[0], arguments.seed)
    measuring.pipe.set_progress_bar_config(disable=not sys.stderr.isatty(), leave=False)
    steps = arguments.run_steps or arguments.steps
    take(measuring.pipe, Configuration(tuned, profile=profile), shot, steps, call_options(arguments))
    return shot


def _described(measuring: Measuring, source: Source, trial: Shot, snippet: Path, text: str) -> dict[str, Any]:
    """All of it as plain data."""
    assert isinstance(trial.run, Run)
    return {
        "model": measuring.model,
        "profile": {"use": source.reference, "name": source.profile.name, "origin": source.origin},
        "target": target_of(measuring.arguments),
        "prompt": trial.prompt,
        "seed": trial.seed,
        "expected": trial.run.expected,
        "seconds": trial.latencies[-1],
        "run": json.loads(trial.run.to_json()),
        "snippet": {"file": str(snippet), "text": text},
    }


def _report(source: Source, trial: Shot, snippet: Path) -> None:
    """Print what was chosen, what was expected of it, and what it took."""
    from cachedit.evaluate.progress import console
    from cachedit.evaluate.table import duration, expectation, marked, size

    run = trial.run
    assert isinstance(run, Run)
    gain = "" if run.speedup is None else f", the denoiser {run.speedup:.2f}x faster"
    rows = {
        "profile": f"{source.reference} ({source.origin})",
        "chosen": f"{run.strip()}  {run.nfe} of {run.num_steps} steps computed",
        "expected": expectation(run.expected),
        "taken": f"{duration(trial.latencies[-1])} for the whole call{gain}, {size(run.cache_bytes_peak)} of cache",
        "snippet": str(snippet),
    }
    out = console()
    for name, text in rows.items():
        out.print(marked(out, f"{name + ':':10s}{text}"), soft_wrap=True)


def program(measuring: Measuring, profile: str, options: Mapping[str, Any], picture: str) -> str:
    """A program that loads the pipeline, wraps it, and runs one prompt.

    Args:
        measuring: says what is loaded and how it is called.
        profile: what ``cachedit.wrap`` takes for it.
        options: of auto.
        picture: file to save the result to; a video gets the suffix of one.
    """
    import torch

    from cachedit.evaluate.demo import call_options

    arguments, pipe = measuring.arguments, measuring.pipe
    folder = Path(measuring.model).expanduser()
    dtype = "" if pipe.dtype == torch.float32 else f", torch_dtype={pipe.dtype}"  # by default it is float32
    model = _literal(os.path.abspath(folder) if folder.is_dir() else measuring.model)
    imports = ["import torch", "from diffusers import DiffusionPipeline"]
    save = f"result.images[0].save({_literal(picture)})"
    if "num_frames" in inspect.signature(pipe.__call__).parameters:
        imports.append("from diffusers.utils import export_to_video")
        save = f"export_to_video(result.frames[0], {_literal(str(Path(picture).with_suffix('.mp4')))})"
    imports += ["", "import cachedit"]
    if arguments.sample:
        imports.append("from cachedit.samples import sample_path")
        model = f"sample_path({_literal(arguments.sample)})"
    call = {
        "prompt": _literal(measuring.prompts[0]),
        "num_inference_steps": str(arguments.run_steps or arguments.steps),
        "generator": f"torch.Generator().manual_seed({arguments.seed})",
        **{name: _literal(value) for name, value in call_options(arguments).items()},
    }
    wrapped = "".join(f", {name}={_literal(value)}" for name, value in options.items())
    return "\n".join(
        [
            f"# Made by: {' '.join(arguments.command.split())}",
            *imports,
            "",
            f"pipe = DiffusionPipeline.from_pretrained({model}{dtype})",
            f'pipe.to("{pipe.device.type}")',
            f'cachedit.wrap(pipe, "auto", profile={_literal(profile)}{wrapped})',
            "result = pipe(",
            *(f"    {name}={value}," for name, value in call.items()),
            ")",
            save,
            "print(cachedit.last_run(pipe))",
            "",
        ]
    )


def _literal(value: Any) -> str:
    """A value as it is written in a program; texts in double quotes."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
