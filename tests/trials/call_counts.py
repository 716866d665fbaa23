"""What a wrap costs that never reuses: Python calls of whole pipeline runs at the depth of real models.

A call is one "call" event of ``sys.setprofile``: a Python function is entered. Counted is everything from the call of
the pipeline to its return, its own loop and its scheduler included, and divided by the block passes of the run: steps x
guidance branches x blocks. Widths are tiny; they do not change the number of calls.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from conftest import Scripted
from diffusers import FluxTransformer2DModel, WanTransformer3DModel

import cachedit
from zoo.built import Built, run
from zoo.draw import settle
from zoo.image_pipelines import flux_true_cfg
from zoo.video_models import WAN_SIZES
from zoo.video_pipelines import wan

STEPS = 10
NEVER: dict[str, tuple[Any, dict[str, Any]]] = {
    "a script that computes every step": (Scripted(compute=tuple(range(STEPS))), {}),
    "taylor_seer, interval 1": ("taylor_seer", {"interval": 1}),
    "delta_cache, interval 1": ("delta_cache", {"interval": 1}),
    "first_block_cache, threshold 0": ("first_block_cache", {"threshold": 0.0}),
    "tea_cache, threshold 0": ("tea_cache", {"threshold": 0.0}),
    "fora, interval 1": ("fora", {"interval": 1}),
}
STATIC = tuple(NEVER)[:2]  # the whole stack by a schedule: what the limit of 1 % is for


def deep_flux() -> tuple[Built, int]:
    """FLUX.1-dev's 19 double and 38 single blocks, with true guidance."""
    built = flux_true_cfg()
    model = FluxTransformer2DModel(
        in_channels=4, num_layers=19, num_single_layers=38, num_attention_heads=2, attention_head_dim=16,
        joint_attention_dim=16, pooled_projection_dim=16, guidance_embeds=True, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    built.pipe.register_modules(transformer=settle(model))
    return built, 57


def deep_wan() -> tuple[Built, int]:
    """Wan 2.1 14B's 40 blocks, with guidance."""
    built = wan()
    built.pipe.register_modules(transformer=settle(WanTransformer3DModel(**{**WAN_SIZES, "num_layers": 40})))
    return built, 40


MODELS: dict[str, Callable[[], tuple[Built, int]]] = {"flux": deep_flux, "wan": deep_wan}


@dataclass(frozen=True)
class Cost:
    """Python calls per block pass without and with the wrap, and whether the two results are bit-equal."""

    model: str
    strategy: str
    plain: float
    wrapped: float
    equal: bool
    strip: str

    @property
    def share(self) -> float:
        """Calls that the wrap adds, over those of the plain pipeline."""
        return self.wrapped / self.plain - 1


def costs(model: str, names: tuple[str, ...] = tuple(NEVER)) -> list[Cost]:
    """One row per strategy."""
    built, blocks = MODELS[model]()
    passes = STEPS * (built.calls // 10) * blocks
    plain, expected = _counted(built)
    rows = []
    for name in names:
        strategy, options = NEVER[name]
        cachedit.wrap(built.pipe, strategy, **options)
        calls, output = _counted(built)
        record = cachedit.last_run(built.pipe)
        cachedit.unwrap(built.pipe)
        rows.append(Cost(model, name, plain / passes, calls / passes, torch.equal(output, expected), record.strip()))
    return rows


def _counted(built: Built) -> tuple[int, torch.Tensor]:
    """Python calls of a run, and its result; one run before it fills what is filled once."""
    calls = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nothing was reused
        run(built, steps=STEPS)
        sys.setprofile(note)
        try:
            output = run(built, steps=STEPS)
        finally:
            sys.setprofile(None)
    return calls, output
