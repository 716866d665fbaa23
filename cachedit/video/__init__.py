"""Autoregressive video: frames are made chunk by chunk and attend to those before through a ring of keys and values."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cachedit.video.checkpoint import load_causal_checkpoint as load_causal_checkpoint
    from cachedit.video.decoder import StreamingDecoder as StreamingDecoder
    from cachedit.video.flow import flow_interpolation as flow_interpolation
    from cachedit.video.motion import MotionStream as MotionStream
    from cachedit.video.network import CausalNetwork as CausalNetwork
    from cachedit.video.presets import PRESETS as PRESETS
    from cachedit.video.presets import Preset as Preset
    from cachedit.video.processors import Branch as Branch
    from cachedit.video.record import ChunkRecord as ChunkRecord
    from cachedit.video.record import VideoRun as VideoRun
    from cachedit.video.ring import RollingKVCache as RollingKVCache
    from cachedit.video.sampling import Skipping as Skipping
    from cachedit.video.stream import Chunk as Chunk
    from cachedit.video.stream import Stream as Stream

_HOMES = {
    "PRESETS": "presets",
    "Branch": "processors",
    "CausalNetwork": "network",
    "Chunk": "stream",
    "ChunkRecord": "record",
    "MotionStream": "motion",
    "Preset": "presets",
    "RollingKVCache": "ring",
    "Skipping": "sampling",
    "Stream": "stream",
    "StreamingDecoder": "decoder",
    "VideoRun": "record",
    "flow_interpolation": "flow",
    "load_causal_checkpoint": "checkpoint",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    """What is public loads on first use, as the strategies alone need none of it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'cachedit.video' has no attribute {name!r}")
    return getattr(importlib.import_module(f"cachedit.video.{_HOMES[name]}"), name)
