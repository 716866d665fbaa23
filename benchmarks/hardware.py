"""Where a benchmark ran, and on what."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch


def device_of(name: str) -> torch.device:
    """The device of that name; ends the benchmark where there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        sys.exit("No CUDA device was found. Allowed here: --device cpu, which takes small sizes.")
    return torch.device(name)


def conditions(device: torch.device) -> dict[str, Any]:
    """Hardware and versions, everything that the numbers depend on."""
    found: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "python": platform.python_version(),
    }
    if device.type == "cuda":
        found["cuda"] = torch.version.cuda
    for package in ("torch", "triton", "diffusers", "cachedit"):
        missing = importlib.util.find_spec(package) is None
        found[package] = "not installed" if missing else _version(package)
    asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True)
    found["commit"] = commit.stdout.strip() or "unknown"
    return found


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of a source checkout"
