"""The parser of the command line, and what several commands share."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """Tells an error in one line."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and where the options are described, and exit with code 2."""
        self.exit(2, f"{self.prog}: {message}. Options: {self.prog} --help\n")


def add_inputs(parser: Parser) -> None:
    """What a run of a pipeline takes, for every command that runs one."""
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompts", metavar="FILE", help="text file, one prompt per line (default: a shipped set)")
    prompts.add_argument("--prompt", nargs="+", action="extend", metavar="TEXT", help="prompts given here")
    parser.add_argument(
        "--num-prompts", type=positive, metavar="N", help="use the first N (default: all yours, or 6 of the set)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first prompt (default: %(default)s)")
    parser.add_argument("--guidance", type=float, metavar="G", help="guidance_scale (default: the pipeline's)")
    parser.add_argument("--height", type=positive, help="pixels (default: the pipeline's)")
    parser.add_argument("--width", type=positive, help="pixels (default: the pipeline's)")
    parser.add_argument("--device", help="default: cuda if there is one, else cpu; one per process")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="default: float32 on a cpu, else bfloat16"
    )
    parser.add_argument(
        "--threads", type=positive, metavar="N", help="CPU threads (default: 1 for the sample, else torch's)"
    )


def add_metrics(parser: Parser) -> None:
    """Metrics of other packages, for every command that measures quality."""
    parser.add_argument(
        "--metric",
        action="append",
        default=[],
        metavar="NAME",
        help="of another package, beside the usual; repeatable",
    )


def positive(text: str) -> int:
    """A whole number of 1 or more, as the type of an argument."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, allowed: 1 or more")
    return value


def set_threads(count: int | None, small: bool) -> None:
    """Set torch's threads; a small model gets one, since more spend their time waiting for each other."""
    if count is None and not small:
        return
    import torch

    torch.set_num_threads(count or 1)


def print_json(data: Any) -> None:
    """Print data as JSON."""
    json.dump(data, sys.stdout, indent=1, ensure_ascii=False, allow_nan=False)
    print()
