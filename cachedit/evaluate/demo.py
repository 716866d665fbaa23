"""``cachedit demo``: baseline against caches on a few prompts, on the terminal, as a page and as JSON."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from cachedit.cli.targets import flag, target_of
from cachedit.evaluate.compare import compare
from cachedit.evaluate.configuration import Configuration, parse_options
from cachedit.evaluate.loading import load_pipeline, load_prompts
from cachedit.evaluate.page import render
from cachedit.evaluate.poster import draw
from cachedit.evaluate.progress import console, progress_bar
from cachedit.evaluate.table import print_comparison
from cachedit.evaluate.writing import check_target
from cachedit.files import write_text


def run_demo(arguments: argparse.Namespace) -> int:
    """Run the command.

    Args:
        arguments: as ``cachedit.cli`` parses them.

    Returns:
        0.

    Raises:
        ValueError, TypeError, OSError: an input that cannot be used; the message is for the user.
    """
    configurations = _configurations(
        arguments.strategy or ["magcache"], parse_options(arguments.option), target_of(arguments), arguments.profile
    )
    prompts = load_prompts(
        arguments.prompts, arguments.prompt, arguments.num_prompts, sample="image" if arguments.model is None else None
    )
    for name in ("json", "picture"):
        if getattr(arguments, name):
            check_target(getattr(arguments, name), f"--{name}")
    folder = Path(arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    pipe = load_pipeline(_model(arguments.model), arguments.device, arguments.dtype)
    with progress_bar() as progress:
        comparison = compare(
            pipe,
            configurations,
            prompts,
            arguments.steps,
            seed=arguments.seed,
            repeats=arguments.repeats,
            call_options=call_options(arguments),
            progress=progress,
        )
    named = arguments.model or "the sample model that comes with cachedit"
    comparison.conditions |= {"model": named, "command": arguments.command}
    print_comparison(console(), comparison)
    page = write_text(folder / "index.html", render(comparison))
    print(f"\npage: {page}")
    if arguments.picture:
        draw(comparison).save(arguments.picture, optimize=True)
        print(f"picture: {arguments.picture}")
    if arguments.json:
        text = json.dumps(comparison.to_dict(), indent=1, ensure_ascii=False, allow_nan=False)
        print(f"json: {write_text(arguments.json, text + chr(10))}")
    return 0


def call_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Arguments of the pipeline's call that were given on the command line."""
    named = {"guidance_scale": arguments.guidance, "height": arguments.height, "width": arguments.width}
    return {name: value for name, value in named.items() if value is not None}


def _configurations(
    names: list[str], options: dict[str, Any], target: dict[str, Any], profile: str | None
) -> list[Configuration]:
    """One configuration per strategy; an unknown name or option is refused before a model is loaded.

    Args:
        names: as they were given.
        options: of every strategy, and of ``cachedit.wrap``.
        target: an option more for auto, the only strategy that has it.
        profile: for the strategies that read one.
    """
    from cachedit.feature.options import split_options
    from cachedit.strategies.auto import Auto
    from cachedit.strategy import Strategy

    own, _ = split_options(options)
    configurations, asked = [], False
    for name in dict.fromkeys(names):
        found = Strategy.find(name, own)
        asked |= isinstance(found, Auto)
        added = target if isinstance(found, Auto) else {}
        Strategy.find(found, added)
        reads_profile = bool(getattr(found, "profile_arrays", ()))
        configurations.append(Configuration(name, {**options, **added}, profile if reads_profile else None))
    if target and not asked:
        option, value = next(iter(target.items()))
        raise ValueError(
            f"{flag(option)} {value} is asked of auto, which is not compared; allowed: with --strategy auto, perhaps "
            f"beside {', '.join(names)}."
        )
    return configurations


def _model(model: str | None) -> str:
    if model is not None:
        return model
    from cachedit.samples import sample_path

    return str(sample_path("image"))
