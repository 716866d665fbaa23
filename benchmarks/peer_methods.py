"""The methods of the peer benchmark, all made to compute the very same steps.

Each takes a Setup and returns a Method that owns a deep copy of its denoiser.
"""

from __future__ import annotations

import copy
import gc
import importlib.util
import os
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, MagCacheConfig
from diffusers.hooks import apply_mag_cache
from peer_models import MASK, SIGMAS, STEPS, Setup
from torch import nn

import cachedit
from cachedit.strategy import Context, FeatureStrategy

NEVER = 1e9
"""A magnitude ratio that no threshold lets pass: MagCache computes the step."""


@dataclass
class Method:
    """A denoiser under one way of caching.

    Attributes:
        denoise: the call that is timed and counted; takes the denoiser's arguments by name, returns a tuple.
        cache_bytes: bytes that the method holds for later steps, asked after every step of a run.
        begin: called before every run.
        advance: (velocity, step, latent) -> the next latent; None: a plain Euler step.
    """

    denoise: Callable[..., tuple[torch.Tensor, ...]]
    cache_bytes: Callable[[], int] = lambda: 0
    begin: Callable[[], Any] = lambda: None
    advance: Callable[[torch.Tensor, int, torch.Tensor], torch.Tensor] | None = None


def uncached(setup: Setup) -> Method:
    """The denoiser as it is."""
    return Method(copy.deepcopy(setup.denoiser))


# -- the floor --------------------------------------------------------------------------------------------------------


class Floor:
    """The least that a plugin can do: swap the block lists, let the model's own loop run, add the stored residual.

    No clock, no checks, no record: which lists to use is read off the schedule in order.
    """

    def __init__(self, setup: Setup) -> None:
        self.model = copy.deepcopy(setup.denoiser)
        self.kept: dict[str, torch.Tensor] = {}
        blocks = [list(self.model.get_submodule(name)) for name in setup.lists]  # type: ignore[call-overload]
        pieces = pair_pieces if setup.model == "flux" else tensor_pieces
        head, tail, pass_on, add = pieces(blocks[0][0], blocks[-1][-1], self.kept)
        stand_ins: list[list[Any]] = [[pass_on] * len(part) for part in blocks]
        stand_ins[-1][-1] = add
        blocks[0][0], blocks[-1][-1] = head, tail
        for piece in (head, pass_on):
            piece.norm1 = setup.blocks[0].norm1  # DiT reads transformer_blocks[0].norm1 after its loop
        computed, reused = dict(zip(setup.lists, blocks, strict=True)), dict(zip(setup.lists, stand_ins, strict=True))
        self.schedule = [computed if mark == "1" else reused for mark in MASK]
        self.steps: Iterator[dict[str, list[Any]]] = iter(())

    def begin(self) -> None:
        """Start at the first step."""
        self.steps = iter(self.schedule)

    def __call__(self, **inputs: Any) -> tuple[torch.Tensor, ...]:
        self.model._modules.update(next(self.steps))  # type: ignore[arg-type]
        return self.model(**inputs)


def tensor_pieces(first: nn.Module, last: nn.Module, kept: dict[str, torch.Tensor]) -> tuple[Any, Any, Any, Any]:
    """Watched first and last block, stand-in and last stand-in, for blocks that return a tensor."""

    def head(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        kept["entered"] = hidden_states
        return first(hidden_states, *args, **kwargs)

    def tail(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = last(hidden_states, *args, **kwargs)
        kept["residual"] = out - kept.pop("entered")
        return out

    def pass_on(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states

    def add(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states + kept["residual"]

    return head, tail, pass_on, add


def pair_pieces(first: nn.Module, last: nn.Module, kept: dict[str, torch.Tensor]) -> tuple[Any, Any, Any, Any]:
    """The same for blocks that take names and return (text, image); only the image stream leaves the stack."""

    def head(hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        kept["entered"] = hidden_states
        return first(hidden_states=hidden_states, **kwargs)

    def tail(hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        text, image = last(hidden_states=hidden_states, **kwargs)
        kept["residual"] = image - kept.pop("entered")
        return text, image

    def pass_on(hidden_states: Any, encoder_hidden_states: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return encoder_hidden_states, hidden_states

    def add(hidden_states: Any, encoder_hidden_states: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return encoder_hidden_states, hidden_states + kept["residual"]

    return head, tail, pass_on, add


def floor(setup: Setup) -> Method:
    """The yardstick."""
    least = Floor(setup)
    return Method(least, lambda: held_bytes([least.kept], setup), least.begin)


# -- cachedit ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Masked(FeatureStrategy, abstract=True):
    """Computes the marked steps."""

    mask: str = MASK

    def should_compute(self, ctx: Context) -> bool:
        """True where the mask has a 1."""
        return self.mask[ctx.step] == "1"


def cachedit_by_hand(setup: Setup, strategy: FeatureStrategy | None = None) -> Method:
    """A bare module, whose timesteps are announced; without a strategy the newest residual is reused as it is."""
    model = copy.deepcopy(setup.denoiser)
    cachedit.wrap(model, strategy or Masked(), timesteps=[float(time) for time in setup.times])
    return Method(model, lambda: cachedit_bytes(model, setup, ()))


class Stub:
    """As much of a pipeline as cachedit reads its clock from."""

    def __init__(self, transformer: nn.Module) -> None:
        self.transformer, self.scheduler = transformer, FlowMatchEulerDiscreteScheduler()

    def __call__(self) -> None:
        """A pipeline class can be called; the benchmark drives the parts itself."""

    def begin(self) -> None:
        """Set the schedule, as a pipeline does at the start of a run."""
        self.scheduler.set_timesteps(sigmas=SIGMAS)

    def advance(self, velocity: torch.Tensor, step: int, latent: torch.Tensor) -> torch.Tensor:
        """The scheduler's own Euler step."""
        return self.scheduler.step(velocity, self.scheduler.timesteps[step], latent, return_dict=False)[0]


def cachedit_by_scheduler(setup: Setup) -> Method:
    """A pipeline, whose scheduler tells the step."""
    pipe = cachedit.wrap(Stub(copy.deepcopy(setup.denoiser)), Masked())
    model, scheduler = pipe.transformer, pipe.scheduler
    return Method(model, lambda: cachedit_bytes(model, setup, [scheduler.timesteps]), pipe.begin, pipe.advance)


def cachedit_bytes(model: nn.Module, setup: Setup, given: Sequence[torch.Tensor]) -> int:
    """What cachedit reports, if no more than that can be reached from what it put on the model.

    Raises:
        RuntimeError: more can be reached.
    """
    run, held = cachedit.last_run(model), held_bytes([model.__dict__["_cachedit"]], setup, given)
    assert run is not None
    if held > run.cache_bytes_peak:
        raise RuntimeError(f"cachedit reports {run.cache_bytes_peak} bytes and holds {held}")
    return run.cache_bytes_peak


# -- peers ------------------------------------------------------------------------------------------------------------


def diffusers_magcache(setup: Setup) -> Method:
    """diffusers' MagCache with ratios that let it compute the marked steps; it counts the calls and starts over."""
    model = copy.deepcopy(setup.denoiser)
    ratios = [NEVER if mark == "1" else 1.0 for mark in MASK]
    config = MagCacheConfig(
        threshold=0.5, max_skip_steps=STEPS, retention_ratio=0.0, num_inference_steps=STEPS, mag_ratios=ratios
    )
    if hasattr(model, "enable_cache"):
        model.enable_cache(config)
    else:
        apply_mag_cache(model, config)
    hooks = model.get_submodule(setup.lists[0])[0]._diffusers_hook.hooks.values()  # type: ignore[index]
    managers = [hook.state_manager for hook in hooks]
    return Method(model, lambda: held_bytes([manager._state_cache for manager in managers], setup))


def cache_dit(setup: Setup, first_blocks: int, taylor_order: int = 0) -> Method:
    """cache-dit's DBCache under its steps mask with the static policy, which needs no similarity test.

    Its context is refreshed before every run through the public call; left alone, it would start over one call late.

    Args:
        setup: the denoiser.
        first_blocks: that always run.
        taylor_order: of its Taylor calibrator; 0 reuses the newest residual as it is.
    """
    os.environ.setdefault("CACHE_DIT_LOG_LEVEL", "error")
    import cache_dit as peer

    model = copy.deepcopy(setup.denoiser)
    config = peer.DBCacheConfig(
        Fn_compute_blocks=first_blocks, Bn_compute_blocks=0, enable_separate_cfg=False, num_inference_steps=STEPS,
        steps_computation_mask=[int(mark) for mark in MASK], steps_computation_policy="static",
    )  # fmt: skip
    calibrator = peer.TaylorSeerCalibratorConfig(taylorseer_order=taylor_order) if taylor_order else None
    peer.enable_cache(model, cache_config=config, calibrator_config=calibrator)
    return Method(
        model,
        lambda: held_bytes([model._context_manager], setup),
        lambda: peer.refresh_context(model, cache_config=config, calibrator_config=calibrator),
    )


def held_bytes(roots: Iterable[Any], setup: Setup, given: Sequence[torch.Tensor] = ()) -> int:
    """Bytes of the storages of all tensors that can be reached from ``roots``.

    Weights, the arguments of the denoiser and the ``given`` tensors do not count: others hold them anyway.
    """
    others = [*given, setup.latent, *setup.times, *setup.inputs.values()]
    skipped = {tensor.data_ptr() for tensor in others if isinstance(tensor, torch.Tensor)}
    sizes: dict[int, int] = {}
    pending, seen = list(roots), set()
    while pending:
        item = pending.pop()
        if id(item) in seen or isinstance(item, (type, types.ModuleType, types.FunctionType, nn.Module)):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            storage = item.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        else:
            pending.extend(gc.get_referents(item))
    return sum(size for pointer, size in sizes.items() if pointer not in skipped)


def methods_for(setup: Setup) -> dict[str, Callable[[Setup], Method]]:
    """Name -> maker of every method that can run on this denoiser."""
    found: dict[str, Callable[[Setup], Method]] = {"uncached": uncached, "floor": floor, "cachedit": cachedit_by_hand}
    if setup.model == "flux":
        found["cachedit-scheduler"] = cachedit_by_scheduler
    found["diffusers-magcache"] = diffusers_magcache
    if importlib.util.find_spec("cache_dit") is not None:
        found["cache-dit-f1"] = lambda setup: cache_dit(setup, 1)
        if len(setup.blocks) > 8:
            found["cache-dit-f8"] = lambda setup: cache_dit(setup, 8)
    return found
