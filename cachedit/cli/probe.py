"""``cachedit probe``: whether a language model bears a cache, and the profile that tells auto so."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cachedit.cli.parser import Parser, positive, print_json, set_threads

if TYPE_CHECKING:
    from cachedit.evaluate.language import LanguageModel
    from cachedit.text.probe import Probe

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Natalia sold clips to 48 friends in April, and half as many in May. How many did she sell in all?",
    "Write a function that tells whether a word reads the same backwards.",
    "Explain to a child why the sky is blue.",
)
"""Prompts for a model when none are given."""


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Describe the command to the parser."""
    text = "find out how a language model attends and which cache it bears, and store that for auto"
    parser = commands.add_parser("probe", help=text, description=text, allow_abbrev=False)
    parser.set_defaults(run=run)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("model", nargs="?", metavar="MODEL", help="model of transformers: a folder or a hub id")
    model.add_argument("--sample", metavar="NAME", help='a sample of cachedit instead ("text")')
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="the profile to write (default: NAME.json of your folder of profiles)"
    )
    parser.add_argument(
        "--name", help="to ask for the profile by (default: NAME-text of the sample, or of the last part of MODEL)"
    )
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompts", metavar="FILE", help="text file, one prompt per line (default: four questions)")
    prompts.add_argument("--prompt", nargs="+", action="extend", metavar="TEXT", help="prompts given here")
    parser.add_argument("--num-prompts", type=positive, metavar="N", help="use the first N (default: all)")
    parser.add_argument("--gen-length", type=positive, metavar="N", help="tokens of an answer (default: 64)")
    parser.add_argument("--steps", type=positive, help="of a decoding (default: one for each token)")
    parser.add_argument("--block-length", type=positive, metavar="N", help="default: the model's, else 32")
    parser.add_argument("--attention", choices=("full", "prefix", "block"), help="default: found out")
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="default: float32 on a cpu, else bfloat16"
    )
    parser.add_argument(
        "--threads", type=positive, metavar="N", help="CPU threads (default: 1 for the sample, else torch's)"
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run code that lies beside the weights of the model"
    )
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the arguments are those that ``add`` describes."""
    from cachedit.evaluate.language import load_language_model
    from cachedit.evaluate.writing import check_replaceable, check_target, name_of, own_target
    from cachedit.samples import sample_path
    from cachedit.text.fingerprint import fingerprint
    from cachedit.text.probe import ARRAYS

    name = arguments.name or f"{arguments.sample or name_of(arguments.model)}-text"
    target = Path(arguments.output) if arguments.output else own_target(name)
    check_target(target, "-o")
    set_threads(arguments.threads, small=arguments.sample is not None)
    prompts = _prompts(arguments)
    model = str(sample_path(arguments.sample)) if arguments.sample else arguments.model
    language = load_language_model(
        model, arguments.device, arguments.dtype, trust_remote_code=arguments.trust_remote_code
    )
    if arguments.output is None:
        check_replaceable(target, fingerprint(language.model), "", {*ARRAYS})
    try:
        found = _probe(language, prompts, arguments)
    except KeyboardInterrupt:
        print("cachedit: interrupted. Nothing was kept", file=sys.stderr)
        return 130
    found.to_profile(name, arguments.command).save(target)
    if arguments.json:
        print_json({"file": str(target), **found.to_dict()})
        return 0
    given = f', profile="{target}"' if arguments.output else ""
    print(f"{found}\n\nprofile: {target}")
    print(f'  use it: cachedit.generate(model, input_ids{given}) or cachedit.wrap(model, "auto"{given})')
    return 0


def _prompts(arguments: argparse.Namespace) -> list[str]:
    from cachedit.evaluate.loading import load_prompts

    given = arguments.prompt
    if not (given or arguments.prompts or arguments.sample):
        given = [*QUESTIONS]
    return load_prompts(arguments.prompts, given, arguments.num_prompts, arguments.sample)


def _probe(language: LanguageModel, prompts: list[str], arguments: argparse.Namespace) -> Probe:
    from cachedit.evaluate.progress import progress_bar
    from cachedit.samples import call_options
    from cachedit.text import probe

    asked: dict[str, Any] = {
        name: getattr(arguments, name) for name in ("gen_length", "steps", "block_length", "attention")
    }
    options = call_options(arguments.sample) if arguments.sample else {}
    options |= {name: value for name, value in asked.items() if value is not None}
    mask = language.options().get("mask_token_id")
    if mask is not None:
        options["mask_token_id"] = mask
    ids, seen = language.encode_all(prompts)
    with progress_bar() as progress:
        return probe(language.model, ids, attention_mask=seen, progress=progress, **options)
