"""Which processes run one model together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def shared_group(denoiser: nn.Module) -> Any:
    """Process group of the ranks that share the tokens of a diffusers model; None for a model on one rank.

    ``enable_parallelism`` leaves its configuration in private attributes, which may be missing or named otherwise.
    """
    parallel = getattr(denoiser, "_parallel_config", None)
    mesh = getattr(getattr(parallel, "context_parallel_config", None), "_flattened_mesh", None)
    get_group: Callable[[], Any] = getattr(mesh, "get_group", lambda: None)
    return get_group()
