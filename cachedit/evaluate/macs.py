"""How much a denoiser multiplies, which no other load on the machine changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from cachedit.evaluate.configuration import Configuration
from cachedit.evaluate.shot import Shot
from cachedit.evaluate.taking import OnStep, take
from cachedit.feature.attachment import find_denoisers


def count_macs(
    pipe: Any,
    configuration: Configuration | None,
    shot: Shot,
    steps: int,
    call_options: dict[str, Any],
    on_step: OnStep | None = None,
) -> float | None:
    """Multiply-accumulates of all denoiser calls in one run, by torch's FlopCounterMode; the run is not to be timed.

    Only matrix products, convolutions and attention count, as usual; what a cache adds or scales does not.

    Returns:
        The number; None where nothing could be counted, as in a compiled denoiser.
    """
    counter = FlopCounterMode(display=False, custom_mapping=_ON_CPU)
    spent: list[int] = []
    hooks = []
    for denoiser in _modules(pipe):
        # The text encoder and the decoder run under the counter too, and do not belong to the number.
        hooks.append(denoiser.register_forward_pre_hook(lambda *_: spent.append(-counter.get_total_flops())))
        hooks.append(denoiser.register_forward_hook(lambda *_: spent.append(counter.get_total_flops())))
    try:
        with counter:
            take(pipe, configuration, shot, steps, call_options, on_step)
    finally:
        for hook in hooks:
            hook.remove()
    return sum(spent) / 2 or None


def _modules(pipe: Any) -> list[nn.Module]:
    return list(dict.fromkeys(find_denoisers(pipe).values()))


def _attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    count: int = sdpa_flop_count(query, key, value)
    return count


_ON_CPU = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention}
"""torch counts the attention kernels of GPUs alone."""
