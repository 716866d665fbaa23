"""Puts together what the benchmarks of ``gpu.sh`` wrote: one file of results, one table on the screen.

python benchmarks/gpu_report.py FOLDER
"""

from __future__ import annotations

import json
import re
import sys
from datetime import date
from pathlib import Path

import end_to_end
import kernel_times

from cachedit.files import write_text

RESULTS = Path(__file__).parent / "results"


def main(folder: Path, results: Path = RESULTS) -> None:
    """Read the parts, write the results, print the tables."""
    kernels = json.loads((folder / "kernels.json").read_text())
    steps = [row for part in sorted(folder.glob("steps*.json")) for row in json.loads(part.read_text())["rows"]]
    whole = {"conditions": kernels["conditions"], "kernels": kernels["rows"], "steps": steps}
    gpu = re.sub(r"[^a-z0-9]+", "-", kernels["conditions"]["device"].lower()).strip("-")
    target = results / f"{gpu}-{date.today().isoformat()}.json"
    write_text(target, json.dumps(whole, indent=1) + "\n")
    print(f"\n{target}\n\n{kernel_times.table(kernels['rows'])}\n\n{end_to_end.table(steps)}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
