"""Frames that have left the window, of which those that look most like the newest come back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cachedit.video.ring import Pair, RollingKVCache


class History:
    """Keeps what leaves a ring on the host, and pins the most similar of it before every chunk.

    MagicWorld (arXiv 2511.18886) finds latents of former frames by how alike they look, and computes them again with
    the chunk. Here their keys and values come back instead, as in WorldKV (2605.22718), so they cost no pass.

    Args:
        cache: ring of one branch with ``pins``; of one sample, as samples would find other frames. What its
            ``on_evict`` was is called first.
        recalled: frames that come back.
        remembered: frames that are kept; the oldest goes first.
    """

    def __init__(self, cache: RollingKVCache, recalled: int, remembered: int) -> None:
        self.recalled, self.remembered = recalled, remembered
        self.looks: dict[int, torch.Tensor] = {}  # of committed frames, [C] of length 1
        self.kept: dict[int, list[Pair]] = {}  # keys and values of a frame by layer
        self._first, cache.on_evict = cache.on_evict, self._evicted

    @property
    def nbytes(self) -> int:
        """Bytes of the frames that are kept."""
        return sum(x.numel() * x.element_size() for frame in self.kept.values() for pair in frame for x in pair)

    def see(self, start: int, latents: torch.Tensor) -> None:
        """Note how committed frames [1, C, n, h, w] from number ``start`` on look: the mean over their pixels."""
        means = torch.nn.functional.normalize(latents[0].float().mean((-2, -1)), dim=0)  # [C, n]
        self.looks |= {start + index: look.cpu() for index, look in enumerate(means.T)}

    def similar(self, frames: Sequence[int]) -> list[int]:
        """The ``recalled`` of these frames that look most like the newest committed one, the most similar first."""
        newest = self.looks[max(self.looks)]
        return sorted(frames, key=lambda frame: -float(self.looks[frame] @ newest))[: self.recalled]

    def state_dict(self) -> dict[str, Any]:
        """Everything that ``load_state_dict`` needs."""
        return {"looks": dict(self.looks), "kept": {frame: list(layers) for frame, layers in self.kept.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where ``state`` was taken."""
        self.looks = dict(state["looks"])
        self.kept = {frame: list(layers) for frame, layers in state["kept"].items()}

    def _evicted(self, cache: RollingKVCache, gone: list[int]) -> None:
        if self._first is not None:
            self._first(cache, gone)
        for frame in gone:
            found = (cache.frames(layer, [frame]) for layer in range(cache.layers))
            self.kept[frame] = [(k.to("cpu", copy=True), v.to("cpu", copy=True)) for k, v in found]
        for frame in sorted(self.kept)[: -self.remembered]:
            del self.kept[frame]
        known = {*self.kept, *cache.live()}
        self.looks = {frame: look for frame, look in self.looks.items() if frame in known}
        cache.recall({frame: self.kept[frame] for frame in self.similar([*self.kept])})
