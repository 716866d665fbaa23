"""The processes that ``accelerate launch`` or torchrun starts together, as their environment describes them."""

from __future__ import annotations

import os

import torch


def is_main() -> bool:
    """True in the one process that prints and writes; also where there is only one."""
    return int(os.environ.get("RANK", "0")) == 0


def own_device(device: str | None) -> torch.device:
    """Where this process runs its model.

    Args:
        device: what the user asked for; None: the accelerator if there is one. Without an index, each process of a
            machine takes the one of its own number.

    Raises:
        ValueError: torch knows no such device, or has none here.
    """
    try:
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if place.type != "cpu" and place.index is None and "LOCAL_RANK" in os.environ:
            place = torch.device(place.type, int(os.environ["LOCAL_RANK"]))
        torch.empty(1, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:160]
        raise ValueError(
            f"--device {device} cannot be used: {reason} Allowed: cpu, or cuda where there is one."
        ) from error
    return place
