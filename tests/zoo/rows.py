"""A tiny denoiser in one row of a table: its class, its sizes and what it is called with."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from types import ModuleType
from typing import Any

import diffusers.models.transformers as transformers
import diffusers.models.unets as unets
import torch
from diffusers import ModelMixin

from .case import Case, Time
from .draw import Draw, settle

WIDTH = 32
TEXT = 6
SIDE = 4  # image tokens per side
TOKENS = SIDE * SIDE
HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}

Rows = Callable[[Draw, int], dict[str, Any]]


def classes(package: ModuleType) -> dict[str, type[ModelMixin]]:
    """All model classes of a folder of diffusers."""
    found = {}
    for entry in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{entry.name}")
        for name, cls in vars(module).items():
            if inspect.isclass(cls) and issubclass(cls, ModelMixin) and cls.__module__ == module.__name__:
                found[name] = cls
    return found


TRANSFORMERS, UNETS = classes(transformers), classes(unets)
DENOISERS = TRANSFORMERS | UNETS


def row(name: str, time: Time, inputs: Rows, /, slow_time: bool = True, **sizes: Any) -> Case:
    """The case of a class of diffusers, under its name; an older release need not have it.

    Args:
        name: of the class.
        time: (sigma, batch) -> its timestep argument.
        inputs: (numbers of a batch, batch) -> the other arguments of its forward.
        slow_time: as of ``settle``.
        **sizes: its configuration.
    """
    return Case(
        name=name,
        build=lambda: settle(DENOISERS[name](**sizes), slow_time=slow_time),
        inputs=lambda seed, batch: inputs(Draw(seed, batch), batch),
        time=time,
        stack=(),
    )


def called(name: str, scale: float = 1.0, ascending: bool = False, dtype: torch.dtype = torch.float32) -> Time:
    """A timestep ``[B]`` in an argument of that name: sigma, or 1 - sigma, times a scale."""

    def time(sigma: float, batch: int) -> dict[str, Any]:
        level = 1.0 - sigma if ascending else sigma
        return {name: torch.full((batch,), scale * level).to(dtype)}

    return time


def full(batch: int) -> torch.Tensor:
    """A mask ``[B, 6]`` of text that hides nothing."""
    return torch.ones(batch, TEXT, dtype=torch.bool)
