"""What can be read off the arguments of a denoiser call."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from cachedit.errors import UnsupportedModelError

TIME_ARGUMENTS = ("timestep", "timesteps", "t", "timestep_ratio")


def find_time(denoiser: nn.Module, name: str | None) -> tuple[str, int | None]:
    """Name and position of the timestep argument.

    Raises:
        UnsupportedModelError: the forward has no such argument.
    """
    signature = inspect.signature(type(denoiser).forward)
    parameters = [p for p in list(signature.parameters.values())[1:] if p.kind is not p.VAR_KEYWORD]
    names = [p.name for p in parameters]
    for candidate in TIME_ARGUMENTS if name is None else (name,):
        if candidate in names:
            return candidate, names.index(candidate)
    if name is not None and len(parameters) < len(signature.parameters) - 1:
        return name, None
    raise UnsupportedModelError(
        f"{type(denoiser).__name__}.forward has no timestep argument ({name or ' / '.join(TIME_ARGUMENTS)}); it has "
        f"{', '.join(names)}. Name it: cachedit.wrap(..., timestep_arg=NAME)."
    )


def call_signature(args: tuple[Any, ...], kwargs: dict[str, Any], time_name: str) -> tuple[Any, ...]:
    """Which inputs a call has and how they are shaped, the main one first; timesteps and values do not count."""
    entries: list[tuple[Any, ...]] = [
        (key, value.shape if isinstance(value, torch.Tensor) else _shape(value))
        for key, value in [*enumerate(args), *kwargs.items()]
        if value is not None and key != time_name
    ]
    main = args[0] if args else kwargs.get(entries[0][0]) if entries else None
    if isinstance(main, torch.Tensor):
        entries[0] += (main.dtype, main.device)
    return tuple(entries)


def _shape(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape
    if isinstance(value, dict):
        return tuple([(key, _shape(item)) for key, item in value.items()])
    return tuple([_shape(item) for item in value]) if isinstance(value, (list, tuple)) else None
