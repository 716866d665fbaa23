"""The support table of the README, from runs of every transformer and UNet of the installed diffusers.

    python benchmarks/support.py [--output docs/support.md]

From a checkout, for the tiny models lie in ``tests``; ``tests/test_denoisers.py`` checks what the table says.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
from trials.support import cases, page, verdicts

from cachedit.files import write_text

PAGE = Path(__file__).parents[1] / "docs" / "support.md"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all of them and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=PAGE, metavar="FILE")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    write_text(options.output, page({name: verdicts(case) for name, case in cases().items()}))
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
