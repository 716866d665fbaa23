"""What the denoiser's output at each step adds to the final sample, by the arithmetic of the sampler alone."""

from __future__ import annotations

import copy
import inspect
import math
from typing import Any

import torch

REMEMBERED = 200  # schedules; a run asks for that of its own at its start
_known: dict[Any, tuple[float, ...] | None] = {}


def response(scheduler: Any) -> tuple[float, ...] | None:
    """Change of the final sample per unit of the output at each step, all other outputs being what they are.

    A sampler's step is linear in the sample and in the outputs, so it is driven once with an impulse at every step,
    each in a number of the sample of its own. Euler answers with the lengths of its steps; a multistep solver, which
    draws on one output at several steps, with what these amount to. Runs on the host, once per schedule.

    Args:
        scheduler: of diffusers, its timesteps set and no step made yet; it is copied and left as it is. Steps before
            its ``begin_index`` are not made and get 0.

    Returns:
        One number per timestep; None if the sampler's step asks for more than an output, a timestep and a sample.
    """
    sigmas = getattr(scheduler, "sigmas", None)
    key = (
        type(scheduler),
        repr(scheduler.config),
        tuple(scheduler.timesteps.tolist()),
        tuple(sigmas.tolist()) if isinstance(sigmas, torch.Tensor) else sigmas,
        getattr(scheduler, "begin_index", None),
    )
    if key not in _known:
        if len(_known) >= REMEMBERED:
            _known.clear()
        _known[key] = _measured(scheduler)
    return _known[key]


def _measured(scheduler: Any) -> tuple[float, ...] | None:
    impulses = torch.eye(len(scheduler.timesteps), dtype=torch.float64, device="cpu")
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            silent, driven = (_driven(scheduler, outputs) for outputs in (torch.zeros_like(impulses), impulses))
    except Exception:  # whatever a step may miss that a pipeline of its own would give it
        return None
    found: list[float] = (driven - silent).tolist()  # what noise adds is in both
    return tuple(found) if all(map(math.isfinite, found)) else None


def _driven(scheduler: Any, outputs: torch.Tensor) -> torch.Tensor:
    """The final sample ``[T]`` of a run with these outputs ``[T, T]``, a row per step, from a sample of nothing."""
    own = copy.deepcopy(scheduler)
    vars(own).update({name: value.cpu() for name, value in vars(own).items() if isinstance(value, torch.Tensor)})
    options = {"generator": torch.Generator().manual_seed(0)} if _takes_generator(own) else {}
    torch.default_generator.manual_seed(0)  # of the CPU alone, and forked
    shape = (1, len(outputs), 1, 1)
    sample = torch.zeros(shape, dtype=outputs.dtype, device="cpu")
    for step in range(getattr(own, "begin_index", None) or 0, len(outputs)):
        timestep = own.timesteps[step]
        if hasattr(own, "scale_model_input"):
            own.scale_model_input(sample, timestep)  # some expect it to be asked before every step
        sample = own.step(outputs[step].view(shape), timestep, sample, return_dict=False, **options)[0]
    return sample.flatten()


def _takes_generator(scheduler: Any) -> bool:
    return "generator" in inspect.signature(scheduler.step).parameters
