"""What can be asked of auto: a speed or a quality."""

from __future__ import annotations

import argparse
from typing import Any

from cachedit.cli.parser import Parser, positive

TARGETS: dict[str, tuple[Any, str, str]] = {
    "target_speedup": (float, "X", "a call that takes 1/X of the time, where the profile was measured"),
    "max_nfe": (positive, "N", "at most N computed steps"),
    "min_psnr": (float, "DB", "mean PSNR against the uncached pictures, as the profile expects it"),
    "min_ssim": (float, "S", "mean SSIM, likewise"),
    "max_lpips": (float, "D", "mean LPIPS, likewise, where it was measured"),
    "max_st_lpips": (float, "D", "mean st-lpips, likewise"),
}
"""Option of auto -> type, metavar and help of its flag."""


def add_targets(parser: Parser, required: bool = False) -> None:
    """One flag for every target of auto; only one of them may be given."""
    group = parser.add_argument_group("asked of auto, one of").add_mutually_exclusive_group(required=required)
    for option, (kind, metavar, text) in TARGETS.items():
        group.add_argument(flag(option), type=kind, metavar=metavar, help=text)


def target_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The target that was given, as an option of auto; empty without one."""
    return {option: getattr(arguments, option) for option in TARGETS if getattr(arguments, option) is not None}


def flag(option: str) -> str:
    """How an option is written on the command line."""
    return f"--{option.replace('_', '-')}"
