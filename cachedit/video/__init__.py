"""Autoregressive video: frames are made chunk by chunk and attend to those before through a ring of keys and values."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cachedit.video.network import CausalNetwork as CausalNetwork
    from cachedit.video.processors import Branch as Branch
    from cachedit.video.ring import RollingKVCache as RollingKVCache

_HOMES = {
    "Branch": "processors",
    "CausalNetwork": "network",
    "RollingKVCache": "ring",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    """What is public loads on first use, as the strategies alone need none of it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'cachedit.video' has no attribute {name!r}")
    return getattr(importlib.import_module(f"cachedit.video.{_HOMES[name]}"), name)
