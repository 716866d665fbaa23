"""MagicWorld: frames of a video that left the window come back where they look like what is made now."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from cachedit.strategies.checks import check_count
from cachedit.strategies.rolling_kv import RollingKV
from cachedit.video.presets import Preset, check_preset


@dataclass(frozen=True)
class MagicWorld(RollingKV):
    """Roll out a video, and attend again to the frames most like the newest (MagicWorld, arXiv 2511.18886).

    ``RollingKV`` with a memory, so that a place which comes back into view is the place it was. Frames that leave the
    window are kept on the host; before every chunk those whose mean colour of the latents is most like the last
    frame's are attended to beside the window. The paper computes them again in every pass; here their keys and values
    are kept, as in WorldKV (2605.22718). One video at a time.

    preset:        "self-forcing" or "longlive"; what is None is the preset's.
    chunk:         latent frames that are denoised together.
    sigmas:        noise levels of the steps, falling from 1; the model is told 1000 times them.
    window:        latent frames that a chunk attends to, itself and the sink included, and what is recalled besides.
    sink:          leading latent frames that are attended to forever.
    rope:          "absolute" positions; "sink_shift" keeps the sink and what is recalled next to the window
                   ("relative": the same, slower).
    dtype:         None keeps keys and values as they are, "int8" and "fp8" in eight bits.
    context_sigma: noise level at which clean chunks are attended to.
    recalled:      latent frames that come back (paper: 3); 0 is ``RollingKV``.
    remembered:    latent frames that are kept, the last that left (paper: 20).
    """

    recalled: int = 3
    remembered: int = 20

    paper: ClassVar[str] = "arXiv 2511.18886"

    def plan(self) -> Preset:
        """The preset with the options that are given, and the memory."""
        check_count(self, "recalled")
        check_count(self, "remembered", lowest=1)
        chosen = replace(super().plan(), recalled=self.recalled, remembered=self.remembered)
        check_preset(chosen)
        return chosen
