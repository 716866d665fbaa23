"""The options that every strategy accepts beside its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Options:
    """What every strategy accepts beside its own options.

    Attributes:
        blocks: names of the block lists of the stack, in execution order; None to find them.
        timesteps: the timesteps of the run, for a module that is driven by hand.
        num_inference_steps: their number, where the timesteps themselves are not known.
        timestep_arg: name of the denoiser's timestep argument; None to find it.
        few_step_guard: never reuse in runs of 4 steps or fewer, and at most one step in a row up to 8 steps.
        cache_device: where residuals are kept; None: where they are computed.
        cache_dtype: how residuals are kept; None: as they are computed.
        process_group: ranks that run one model and must hear one signal; None for a model on one rank, and for
            diffusers' context parallelism, whose ranks are found.
    """

    blocks: tuple[str, ...] | None = None
    timesteps: tuple[float, ...] | None = None
    num_inference_steps: int | None = None
    timestep_arg: str | None = None
    few_step_guard: bool = True
    cache_device: torch.device | None = None
    cache_dtype: torch.dtype | None = None
    process_group: Any = None


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], Options]:
    """The strategy's own options, and those that every strategy takes.

    Raises:
        TypeError, ValueError: one of the latter has an impossible value.
    """
    names = {field.name for field in dataclasses.fields(Options)}
    common = {key: value for key, value in options.items() if key in names and value is not None}
    readers: dict[str, Callable[[Any], Any]] = {
        "blocks": _blocks,
        "timesteps": _timesteps,
        "num_inference_steps": _count,
        "few_step_guard": _flag,
        "cache_device": _device,
        "cache_dtype": _dtype,
    }
    read: dict[str, Any] = {key: readers[key](value) if key in readers else value for key, value in common.items()}
    return {key: value for key, value in options.items() if key not in names}, Options(**read)


def _blocks(value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else tuple(value)
    if not names or len(set(names)) != len(names):
        raise ValueError(f"blocks={value!r}; allowed: names of block lists in execution order, each once")
    return names


def _timesteps(value: Any) -> tuple[float, ...]:
    values = value.tolist() if isinstance(value, torch.Tensor) else value
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence) or not values:
        raise ValueError(f"timesteps={value!r}; allowed: one number per step, such as scheduler.timesteps")
    return tuple(float(v) for v in values)


def _count(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"num_inference_steps={value!r}; allowed: a positive integer")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"few_step_guard={value!r}; allowed: True or False")
    return value


def _device(value: Any) -> torch.device:
    try:
        return torch.device(value)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"cache_device={value!r}; allowed: a torch device such as 'cpu' or 'cuda:0'") from error


def _dtype(value: Any) -> torch.dtype:
    if not isinstance(value, torch.dtype) or not value.is_floating_point:
        raise TypeError(f"cache_dtype={value!r}; allowed: a floating dtype such as torch.bfloat16")
    return value
