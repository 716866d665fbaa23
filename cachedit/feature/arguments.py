"""What can be read off the arguments of a denoiser call."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from cachedit.errors import UnsupportedModelError

TIME_ARGUMENTS = ("timestep", "timesteps", "t", "timestep_ratio")
CONTAINERS = (dict, list, tuple)


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


def main_input(args: tuple[Any, ...], kwargs: dict[str, Any], time_name: str) -> Any:
    """The latents of a call: its first argument that is not the timestep."""
    main = args[0] if args else kwargs[next(iter(kwargs))]
    if main is kwargs.get(time_name) and len(kwargs) > 1:
        main = next(value for name, value in kwargs.items() if name != time_name)
    return main


def first_tensor(value: Any) -> torch.Tensor | None:
    """The first tensor of a list of texts, by whose identity a branch is known; None if there is none."""
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    return value if isinstance(value, torch.Tensor) else None


def call_signature(args: tuple[Any, ...], kwargs: dict[str, Any], time_name: str) -> tuple[Any, ...]:
    """What the residuals of a branch hang on: the main input, and which other inputs there are, in which shapes.

    Returns:
        Shape, dtype and device of the main input; how many inputs have no names, and the names of the others; the
        shapes of all in the same order.
    """
    main, tensor = main_input(args, kwargs, time_name), torch.Tensor
    shapes: list[Any] = []
    for value in (*args, *kwargs.values()):  # asked at every call, so the common kinds are told apart right here
        if isinstance(value, tensor):
            shapes.append(value.shape)
        else:
            shapes.append(_shape(value) if isinstance(value, CONTAINERS) else value is None)
    form = (main.shape, main.dtype, main.device) if isinstance(main, tensor) else _shape(main)
    return form, (len(args), *kwargs), tuple(shapes)


def changed_inputs(before: tuple[Any, ...], now: tuple[Any, ...]) -> list[str]:
    """Names of the inputs in which two signatures differ."""
    entries = [set(zip((*range(count), *names), shapes, strict=True)) for _, (count, *names), shapes in (before, now)]
    return sorted({str(name) for name, _ in entries[0] ^ entries[1]})


def _shape(value: Any) -> Any:
    """Shape of a tensor, shapes in a container, and of anything else whether it is there."""
    if isinstance(value, torch.Tensor):
        return value.shape
    if isinstance(value, dict):
        return tuple([(key, _shape(item)) for key, item in value.items()])
    return tuple([_shape(item) for item in value]) if isinstance(value, CONTAINERS) else value is None
