"""RollingKV: chunks of a video attend to those before through a ring of keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from cachedit.strategies.recompute_window import RecomputeWindow
from cachedit.video.options import check_window
from cachedit.video.presets import Preset, check_preset, preset
from cachedit.video.strategy import VideoStrategy


@dataclass(frozen=True)
class RollingKV(VideoStrategy):
    """Make video chunk by chunk over a rolling window of keys and values (arXiv 2506.08009).

    For Wan models that were made causal. What is None is the preset's. A chunk takes a few steps; then one more pass
    writes its clean keys and values, to which later chunks attend, until they leave the window.

    preset:        "self-forcing", "causvid", "longlive", "krea" or "rolling-forcing".
    chunk:         latent frames that are denoised together.
    sigmas:        noise levels of the steps, falling from 1; the model is told 1000 times them.
    window:        latent frames that a chunk attends to, itself and the sink included.
    sink:          leading latent frames that are attended to forever.
    rope:          "absolute" positions; "sink_shift" keeps the sink next to the window ("relative": the same, slower).
    dtype:         None keeps keys and values as they are, "int8" and "fp8" in eight bits.
    context_sigma: noise level at which clean chunks are attended to.
    """

    preset: str = "self-forcing"
    chunk: int | None = None
    sigmas: tuple[float, ...] | None = None
    window: int | None = None
    sink: int | None = None
    rope: Literal["absolute", "sink_shift", "relative"] | None = None
    dtype: Literal["int8", "fp8"] | None = None
    context_sigma: float | None = None

    paper: ClassVar[str] = "arXiv 2506.08009"

    def plan(self) -> Preset:
        """The preset with the options that are given."""
        chosen = preset(self.preset).changed(
            chunk=self.chunk, sigmas=None if self.sigmas is None else tuple(self.sigmas), window=self.window,
            sink=self.sink, rope=self.rope, quant=self.dtype, context_sigma=self.context_sigma,
        )  # fmt: skip
        check_window(chosen.window, chosen.sink, chosen.rope, chosen.quant)
        check_preset(chosen)
        return chosen

    def own_steps(self) -> int:
        """Those of a chunk."""
        return len(self.plan().sigmas)

    def reference(self) -> RecomputeWindow:
        """The same rollout with the window computed anew before every chunk."""
        chosen = self.plan()
        return RecomputeWindow(self.preset, chosen.chunk, self.sigmas, chosen.window)
