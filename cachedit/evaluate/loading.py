"""A pipeline and prompts from what the command line names."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from cachedit.samples import prompts as sample_prompts

DEFAULT_COUNT = 6  # of shipped prompts: keeps a demo of the sample well below a minute and a half on two cores
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_pipeline(
    model: str, device: str | None = None, dtype: str | None = None, *, trust_remote_code: bool = False
) -> Any:
    """A diffusers pipeline, ready to be called without progress bars of its own.

    Args:
        model: a folder that ``save_pretrained`` wrote, or a hub id.
        device: where it runs, see ``device_for``.
        dtype: name of its floating type; None: float32 on the CPU, bfloat16 elsewhere.
        trust_remote_code: True lets code run that lies beside the weights.

    Raises:
        ValueError: it cannot be loaded, or not there, with the reason.
    """
    from diffusers import DiffusionPipeline

    folder = Path(model).expanduser()
    named_folder = folder.exists() or model.count("/") != 1 or model.startswith((".", "~", "/"))
    if named_folder and not (folder / "model_index.json").is_file():
        found = "has no model_index.json" if folder.is_dir() else "is not a folder" if folder.exists() else "is missing"
        raise ValueError(
            f"model {model} {found}. Allowed: a folder that pipe.save_pretrained wrote, or a hub id such as owner/name."
        )
    place = device_for(device)
    kind = DTYPES[dtype] if dtype else torch.float32 if place.type == "cpu" else torch.bfloat16
    try:
        with quiet():
            pipe = DiffusionPipeline.from_pretrained(
                str(folder) if named_folder else model, torch_dtype=kind, trust_remote_code=trust_remote_code
            )
    except Exception as error:  # the loaders of diffusers, transformers, safetensors and the hub raise all kinds
        raise ValueError(
            f"cannot load model {model}: {type(error).__name__}: {' '.join(str(error).split())[:240]}. Allowed: a "
            "folder that pipe.save_pretrained wrote, or a hub id that is cached here or can be downloaded."
        ) from error
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(place)


def device_for(device: str | None) -> torch.device:
    """Where this process runs its model.

    Args:
        device: what was asked for; None: the accelerator if there is one. Without an index, each process of a machine
            takes the one of its own number.

    Raises:
        ValueError: torch knows no such device, or has none here.
    """
    from cachedit.calibration.ranks import device_of_rank

    try:
        place = torch.device(device or device_of_rank() or ("cuda" if torch.cuda.is_available() else "cpu"))
        if place.type != "cpu" and place.index is None and "LOCAL_RANK" in os.environ:
            place = torch.device(place.type, int(os.environ["LOCAL_RANK"]))
        torch.empty(1, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:160]
        raise ValueError(
            f"--device {device} cannot be used ({reason}). Allowed: cpu, or cuda where there is one."
        ) from error
    return place


def load_prompts(
    file: str | None, prompts: list[str] | None, count: int | None, sample: str | None = "image"
) -> list[str]:
    """The prompts to run.

    Args:
        file: a text file with one prompt per line; empty lines are skipped.
        prompts: given one by one.
        count: use the first ``count``; None: all that were given, or six of the shipped ones.
        sample: with neither file nor prompts, those of the sample model of this name; None: the shipped set for any
            image or video model.

    Raises:
        ValueError: there are none, or fewer than ``count``.
        OSError: the file cannot be read.
    """
    if file is not None:
        chosen = _lines(Path(file).read_text(encoding="utf-8"))
    elif prompts:
        chosen = prompts
    else:
        chosen = shipped_prompts() if sample is None else sample_prompts(sample)
        count = DEFAULT_COUNT if count is None else count
    if not chosen:
        raise ValueError(f"{file} holds no prompts. Allowed: one prompt per line.")
    if count is not None and count > len(chosen):
        raise ValueError(f"--num-prompts is {count} and there are {len(chosen)} prompts. Allowed: 1 to {len(chosen)}.")
    return chosen[:count]


def shipped_prompts() -> list[str]:
    """Sixteen prompts for image and video models: people, animals, places, text, styles and movement, mixed."""
    return _lines((resources.files("cachedit.evaluate") / "prompts.txt").read_text(encoding="utf-8"))


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


@contextmanager
def quiet() -> Iterator[None]:
    """Loading without progress bars and hints, so that what cachedit prints stays readable."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    levels = [(log, log.get_verbosity()) for log in (diffusers_logging, transformers_logging)]
    for log, _ in levels:
        log.set_verbosity_error()
        log.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            # "Use dtype instead of torch_dtype", which diffusers 0.35 does not take.
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        for log, level in levels:
            log.set_verbosity(level)
            log.enable_progress_bar()
