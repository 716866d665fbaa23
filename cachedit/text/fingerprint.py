"""What tells one language model from another, its weights included: what bears a cache is a matter of training."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

SAMPLED = 16  # values of each tensor


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """Class, number of parameters, and a digest of some values of every parameter; None while they are not in memory.

    The values are read in bfloat16, so that a model that is loaded in full precision is still the same.
    """
    parameters = dict(model.named_parameters())
    return {
        "class": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in parameters.values()),
        "weights": _digest(parameters),
    }


@torch.no_grad()
def _digest(parameters: dict[str, nn.Parameter]) -> str | None:
    """Of names and sampled values, with one copy from each device."""
    if any(parameter.device.type == "meta" for parameter in parameters.values()):
        return None
    on_device: dict[torch.device, list[torch.Tensor]] = {}
    for parameter in parameters.values():
        values = parameter.flatten()
        sampled = values[:: max(1, len(values) // SAMPLED)][:SAMPLED].to(torch.bfloat16)
        on_device.setdefault(parameter.device, []).append(sampled)
    digest = hashlib.sha256("\n".join(parameters).encode())
    for sampled_values in on_device.values():
        digest.update(torch.cat(sampled_values).cpu().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]
