"""Pictures out of whatever a pipeline returns, and their difference."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def pictures(output: Any) -> Tensor:
    """The pictures or frames of a pipeline's output as ``[N, 3, H, W]`` in [0, 1], float32 on the CPU.

    Args:
        output: a pipeline output with ``images`` or ``frames``, or the tuple that ``return_dict=False`` gives. Arrays
            and PIL images are channels last, tensors channels first; leading axes (videos, frames) are flattened.

    Raises:
        ValueError: there are no RGB pictures in it.
    """
    found = getattr(output, "images", None)
    found = getattr(output, "frames", None) if found is None else found
    if found is None and isinstance(output, tuple) and output:
        found = output[0]
    values = _stacked(found)
    if values is None or values.ndim < 3 or values.shape[-3] not in (1, 3, 4):
        shape = None if values is None else list(values.shape)
        raise ValueError(
            f"the pipeline returned {type(output).__name__} with pictures of shape {shape}; allowed: images or frames "
            "with 1, 3 or 4 channels, as output_type='np', 'pt' or 'pil' give them."
        )
    values = values.detach().float().cpu().flatten(0, -4) if values.ndim > 3 else values.detach().float().cpu()[None]
    values = values.expand(-1, 3, -1, -1) if values.shape[1] == 1 else values[:, :3]
    return values.clamp(0, 1)


def is_video(output: Any) -> bool:
    """True if a pipeline's output holds frames rather than pictures."""
    return getattr(output, "images", None) is None and getattr(output, "frames", None) is not None


def _stacked(found: Any) -> Tensor | None:
    """Nested lists of pictures as one tensor ``[..., C, H, W]``; None if there is nothing that looks like one."""
    if isinstance(found, Tensor):
        return found
    if isinstance(found, (list, tuple)):
        parts = [_stacked(item) for item in found]
        return torch.stack([part for part in parts if part is not None]) if parts and None not in parts else None
    if hasattr(found, "convert"):
        found = np.asarray(found.convert("RGB"), dtype=np.float32) / 255
    if isinstance(found, np.ndarray) and found.ndim >= 3:
        return torch.from_numpy(found).movedim(-1, -3)
    return None


def difference(a: Tensor, b: Tensor, gain: float) -> Tensor:
    """Absolute difference of two pictures ``[..., 3, H, W]``, made ``gain`` times brighter so that it can be seen."""
    return ((a - b).abs() * gain).clamp(0, 1)
