"""A pipeline that stops in the middle of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def interruptible(pipe: Any, check: Callable[[], None]) -> Iterator[None]:
    """Ask ``check`` before every block of every model of the pipeline; what it raises ends the call.

    Blocks are the entries of module lists, so that an encoder, a denoiser and a decoder are left at once, and a reused
    step, which runs no block, before its denoiser begins.
    """
    parts = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
    blocks = [
        block
        for part in parts
        for modules in part.modules()
        if isinstance(modules, nn.ModuleList)
        for block in modules.children()
    ]
    hooks = [module.register_forward_pre_hook(lambda *_: check()) for module in (*parts, *blocks)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
