"""RecomputeWindow: chunks of a video attend to a window that is computed anew before each of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from cachedit.video.presets import Preset, check_preset, preset
from cachedit.video.strategy import VideoStrategy


@dataclass(frozen=True)
class RecomputeWindow(VideoStrategy):
    """Compute the window anew before every chunk, and keep nothing from chunk to chunk (Krea Realtime).

    What rolling caches are compared with: the first frame of the window is always a video's first, so nothing drifts
    out of the positions that the model knows, and each chunk takes a pass over all frames before it. What is None is
    the preset's.

    preset: "self-forcing", "causvid", "longlive", "krea" or "rolling-forcing".
    chunk:  latent frames that are denoised together.
    sigmas: noise levels of the steps, falling from 1; the model is told 1000 times them.
    window: latent frames that a chunk attends to, itself included.
    """

    preset: str = "krea"
    chunk: int | None = None
    sigmas: tuple[float, ...] | None = None
    window: int | None = None

    paper: ClassVar[str] = "krea-realtime-video"

    def plan(self) -> Preset:
        """The preset with the options that are given."""
        sigmas = None if self.sigmas is None else tuple(self.sigmas)
        chosen = preset(self.preset).changed(chunk=self.chunk, sigmas=sigmas, window=self.window)
        overlap = chosen.window - chosen.chunk
        chosen = replace(chosen, context="recompute", overlap=overlap, sink=0, rope="absolute", quant=None)
        check_preset(chosen)
        return chosen

    def own_steps(self) -> int:
        """Those of a chunk."""
        return len(self.plan().sigmas)

    def reference(self) -> RecomputeWindow:
        """Itself."""
        return self
