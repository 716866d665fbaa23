"""Under which conditions a number was measured."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

PROTOCOL = "whole calls, baseline and caches in turn for each prompt, one uncounted run each first, medians"


def describe(
    pipe: Any,
    prompts: Sequence[str],
    steps: int,
    seed: int,
    repeats: int,
    call_options: dict[str, Any],
    shape: tuple[int, ...] | None = None,
) -> dict[str, Any]:
    """Everything that a reader needs to judge a row or to measure it again, ready for JSON.

    Args:
        pipe: the pipeline that was run.
        prompts: of all runs.
        steps: number of inference steps.
        seed: of the first prompt; prompt i has ``seed + i``.
        repeats: measured runs per prompt.
        call_options: further arguments of the call.
        shape: of one prompt's pictures, ``(N, 3, H, W)``; None leaves their size out.
    """
    from cachedit.feature.attachment import find_denoisers

    denoiser = next(iter(find_denoisers(pipe).values()))
    conditions = {
        "model": getattr(pipe.config, "_name_or_path", "") or type(pipe).__name__,
        "pipeline": type(pipe).__name__,
        "denoiser": type(denoiser).__name__,
        "steps": steps,
        "sampler": type(getattr(pipe, "scheduler", None)).__name__,
        "call_options": plain(call_options),
        "num_prompts": len(prompts),
        "prompts": list(prompts),
        "seeds": [seed + i for i in range(len(prompts))],
        "repeats": repeats,
        "protocol": PROTOCOL,
        **surroundings(denoiser),
    }
    if shape is not None:
        frames, _, height, width = shape
        conditions["size"] = f"{width}x{height}" + (f", {frames} frames" if frames > 1 else "")
    return conditions


def surroundings(model: nn.Module) -> dict[str, Any]:
    """What a model runs on, and with which versions."""
    from cachedit import __version__

    parameter = next(model.parameters())
    return {
        "device": device_name(parameter.device),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "cachedit": __version__,
        "torch": torch.__version__,
        "diffusers": importlib.metadata.version("diffusers"),
        "transformers": importlib.metadata.version("transformers"),
        "python": platform.python_version(),
    }


def plain(options: dict[str, Any]) -> dict[str, Any]:
    """Options as JSON; what has no form there is written out."""
    kinds = (bool, int, float, str)
    return {key: value if value is None or isinstance(value, kinds) else str(value) for key, value in options.items()}


def device_name(device: torch.device) -> str:
    """The device and what it is: "cuda:0, NVIDIA H200", "cpu, Intel(R) Xeon(R) ..."."""
    if device.type == "cuda":
        return f"{device}, {torch.cuda.get_device_name(device)}"
    return f"{device}, {_processor()}" if device.type == "cpu" else str(device)


def _processor() -> str:
    """The processor's name where the system tells it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
