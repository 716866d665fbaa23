"""The caches of diffusers and of cache-dit for the Pareto benchmark.

Settings are those of the peers' own configurations, over about the range of speed-ups that they reach on this model.
Order 0 of diffusers' TaylorSeer is no TaylorSeer, but plain reuse; it is among the settings because it does best here.
cache-dit cannot run without a first block at every step, which is an eighth of this model.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import os
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from pareto_methods import Method, Ready, Settings, Trial

from cachedit import schedules

os.environ.setdefault("CACHE_DIT_LOG_LEVEL", "error")  # read when it is imported

MODULES = [r"transformer_blocks\.\d+\.(attn1|ff)"]  # diffusers' own patterns miss CogView4's "attn1"
FIRST_STEPS = 3  # computed by every method with a mask or an interval


# -- diffusers --------------------------------------------------------------------------------------------------------

LITE = {"use_lite_mode": True}
DIFFUSERS: dict[str, tuple[str, bool, list[Settings]]] = {
    "FirstBlockCache": ("FirstBlockCacheConfig", False, [{"threshold": t} for t in (0.06, 0.15, 0.25)]),
    "MagCache": (
        "MagCacheConfig",
        True,
        [
            {"threshold": error, "max_skip_steps": skips, "retention_ratio": kept}
            for error, skips, kept in ((0.03, 1, 0.2), (0.06, 2, 0.2), (0.12, 3, 0.2), (0.24, 4, 0.1), (0.5, 6, 0.1))
        ],
    ),
    "TaylorSeer lite": (
        "TaylorSeerCacheConfig",
        True,
        [
            {"max_order": order, "cache_interval": interval, "disable_cache_before_step": first, **LITE}
            for order, choices in (
                (0, ((2, 3), (2, 5), (3, 5), (4, 5), (5, 5), (4, 3))),
                (1, ((2, 3), (2, 5), (3, 3), (3, 5), (4, 5))),
                (2, ((2, 5), (3, 5), (4, 5))),
            )
            for interval, first in choices
        ],
    ),
    "TaylorSeer modules": ("TaylorSeerCacheConfig", True, [{"cache_interval": 3, "cache_identifiers": MODULES}]),
    "PAB": ("PyramidAttentionBroadcastConfig", True, [{"spatial_attention_block_skip_range": n} for n in (2, 3, 5)]),
    "FasterCache": ("FasterCacheConfig", False, [{"is_guidance_distilled": value} for value in (False, True)]),
    "SeaCache": ("SeaCacheConfig", False, [{}]),
}
"""Name -> class of the configuration, whether prompts may share a batch, settings."""


def diffusers_methods(trial: Trial) -> Iterator[Method]:
    """Everything that ``enable_cache`` knows, taken off and put on again before every run."""
    for name, (config, batched, choices) in DIFFUSERS.items():
        for settings in choices:
            yield Method("diffusers", name, settings, partial(_diffusers, trial, config, settings, batched))


def _diffusers(trial: Trial, config: str, settings: Settings, batched: bool) -> Ready:
    pipe = trial.own_pipe()
    made = _diffusers_config(trial, pipe, config, settings)

    def begin() -> None:
        if pipe.transformer.is_cache_enabled:
            pipe.transformer.disable_cache()
        pipe.transformer.enable_cache(made)

    return Ready(pipe, begin, batched)


def _diffusers_config(trial: Trial, pipe: Any, name: str, settings: Settings) -> Any:
    import diffusers

    extra: Settings = {}
    if name == "MagCacheConfig":
        extra = {"num_inference_steps": trial.steps, "mag_ratios": magnitude_ratios(trial)}
    if name == "TaylorSeerCacheConfig":
        extra = {"taylor_factors_dtype": torch.float32}
    if name in ("PyramidAttentionBroadcastConfig", "FasterCacheConfig"):
        extra = {"current_timestep_callback": lambda: pipe.current_timestep}
    if name == "FasterCacheConfig":
        extra |= {"tensor_format": "BCHW", "attention_weight_callback": lambda module: 0.5}
    return getattr(diffusers, name)(**settings, **extra)


def magnitude_ratios(trial: Trial) -> list[float]:
    """What diffusers' own calibration prints, averaged over branches and prompts; measured once."""
    if "ratios" not in trial.found:
        from diffusers import MagCacheConfig

        pipe, printed = trial.own_pipe(), io.StringIO()
        pipe.transformer.enable_cache(MagCacheConfig(calibrate=True, num_inference_steps=trial.steps))
        for k, prompt in enumerate(trial.prompts):
            generator = torch.Generator().manual_seed(trial.seed + k)
            with contextlib.redirect_stdout(printed), torch.no_grad():
                pipe(prompt, num_inference_steps=trial.steps, generator=generator, output_type="latent")
        rows = [ast.literal_eval(row) for row in re.findall(r"^\[[\d., e-]+\]$", printed.getvalue(), re.MULTILINE)]
        if len(rows) != 2 * len(trial.prompts):
            raise RuntimeError(f"diffusers printed {len(rows)} lists of ratios for {len(trial.prompts)} prompts")
        trial.found["ratios"] = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    return list(trial.found["ratios"])


# -- cache-dit --------------------------------------------------------------------------------------------------------


MASKS = ("slow", "medium", "fast", "ultra", "every 2", "every 3", "every 4")
"""cache-dit's own, and even ones."""


def cache_dit_methods(trial: Trial) -> Iterator[Method]:
    """DBCache by threshold and by steps mask, each plain and with the TaylorSeer calibrator."""
    if importlib.util.find_spec("cache_dit") is None:
        return
    for first, order, thresholds in (
        (1, 0, (0.08, 0.15, 0.3)),
        (1, 1, (0.15,)),
        (2, 0, (0.15,)),
    ):
        name = f"DBCache F{first}" + (f" Taylor-{order}" if order else "")
        for threshold in thresholds:
            own = {"residual_diff_threshold": threshold, "max_warmup_steps": FIRST_STEPS}
            settings: Settings = {"Fn": first, "order": order, "threshold": threshold}
            yield Method("cache-dit", name, settings, partial(_cache_dit, trial, first, order, own))
    for order in (0, 1, 2):
        name = "mask" + (f" Taylor-{order}" if order else "")
        for mask in MASKS:
            settings = {"Fn": 1, "order": order, "mask": mask}
            yield Method("cache-dit", name, settings, partial(_cache_dit, trial, 1, order, {}, mask))


def _cache_dit(trial: Trial, first: int, order: int, own: Settings, mask: str = "") -> Ready:
    import cache_dit as peer

    if mask:
        own = {**own, "steps_computation_mask": _mask(mask, trial.steps), "steps_computation_policy": "static"}

    def configs() -> Settings:
        config = peer.DBCacheConfig(
            Fn_compute_blocks=first, Bn_compute_blocks=0, enable_separate_cfg=True, num_inference_steps=trial.steps,
            **own,
        )  # fmt: skip
        calibrator = peer.TaylorSeerCalibratorConfig(taylorseer_order=order) if order else None
        return {"cache_config": config, "calibrator_config": calibrator}

    pipe = trial.own_pipe()
    peer.enable_cache(pipe.transformer, **configs())
    return Ready(pipe, lambda: peer.refresh_context(pipe.transformer, **configs()), batched=bool(mask))


def _mask(name: str, steps: int) -> list[int]:
    """1 where a step is computed: one of cache-dit's own masks, or an even one, as TaylorSeer has them."""
    import cache_dit as peer

    if not name.startswith("every"):
        return list(peer.steps_mask(total_steps=steps, mask_policy=name))
    computed = schedules.every(steps, int(name.split()[1]), FIRST_STEPS)
    return [int(step in computed) for step in range(steps)]
