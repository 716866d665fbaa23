"""The latents of a video, chunk by chunk: what is denoised, what is committed, and what fills a ring anew."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cachedit.video.history import History
from cachedit.video.network import CausalNetwork
from cachedit.video.noise import Noise
from cachedit.video.presets import Preset
from cachedit.video.processors import Branch
from cachedit.video.sampling import Between, Skipping, Wave, few_steps, noised


class Rollout:
    """Makes chunks of latents that attend to those before.

    ``make`` a chunk, show it, ``commit`` it, and so on. A failing ``make`` or ``commit`` can be called again.

    Args:
        network: the model.
        branches: the prompt's, and perhaps the negative prompt's.
        preset: how the model is rolled out.
        shape: of the latents of one frame, (B, C, H, W).
        noise: where the noise comes from.
        guidance: scale of classifier-free guidance, with two branches.
        limit: latent frames of the whole video; None for no end.
        source: clean latents that the chunks start from [B, C, F, H, W] instead of noise alone.
        strength: noise level up to which the source is noised.

    Attributes:
        made: latent frames made so far.
        committed: of these, those that later ones attend to.
        passes: of the denoiser, for the last chunk and each branch.
        attended: latent frames that its last pass attended to, its own included.
        evicted: latent frames that had left the window by then.
        skipping: frames of a chunk that steps leave out; not in a wave.
        between: called after every step with the step, its timestep and the latents.
        histories: of every branch, where frames that left the window come back.
        first_frame: gives the latent [B, C, 1, H, W] that the frame so many from the end has as a video's first frame;
            None where no frame of a video is encoded otherwise than the others.
    """

    def __init__(
        self,
        network: CausalNetwork,
        branches: Sequence[Branch],
        preset: Preset,
        shape: Sequence[int],
        noise: Noise,
        *,
        guidance: float = 1.0,
        limit: int | None = None,
        source: torch.Tensor | None = None,
        strength: float = 1.0,
    ) -> None:
        self.network, self.branches, self.preset, self.noise = network, list(branches), preset, noise
        self.shape, self.guidance, self.limit = tuple(shape), guidance, limit
        self.source, self.strength = source, strength
        self.made = self.committed = 0
        self.passes = self.attended = self.evicted = 0
        self.between: Between | None = None
        self.skipping: Skipping | None = None
        self.first_frame: Callable[[int], torch.Tensor] | None = None
        self.histories: list[History] = []
        if preset.recalled:
            self.histories = [History(branch.cache, preset.recalled, preset.remembered) for branch in self.branches]
        self._base = 0  # number in the video of the ring's frame 0
        self._starts: list[int] = []  # where the committed chunks begin, as far as they are remembered
        self._recent: torch.Tensor | None = None  # clean latents of the last frames, [B, C, <= window, H, W]
        self._wave = Wave(preset) if preset.context == "wave" else None
        self._warned = False
        self._stale = False  # the ring is being filled anew

    @property
    def ended(self) -> bool:
        """True once the whole video is made."""
        return self.limit is not None and self.made >= self.limit

    @property
    def cache_bytes(self) -> int:
        """Bytes of the rings of all branches, and of what is remembered beside them."""
        rings = sum(branch.cache.nbytes for branch in self.branches)
        return rings + sum(history.nbytes for history in self.histories)

    def make(self) -> torch.Tensor:
        """Clean latents [B, C, chunk, H, W] of the next chunk; the rings are those of the chunks committed before."""
        if self.preset.context == "recompute" or (self.preset.context == "restart" and self._full()):
            self._refill()
        self._warn_of_flicker()
        self.passes = 0
        before = self.noise.states()
        try:
            if self._wave is not None:
                latents = self._wave.advance(self._fresh, self.noise, self._predict, self.between)
            else:
                latents = few_steps(
                    self.preset,
                    self.noise,
                    self._start(),
                    self._predict,
                    self.between,
                    self._skipped_steps(),
                    self.skipping,
                )
        except BaseException:
            self.noise.set_states(before)
            raise
        self.made += latents.shape[2]
        return latents

    def commit(self, latents: torch.Tensor) -> None:
        """Let later chunks attend to a chunk, the next after those committed before."""
        count = latents.shape[2]
        if self.preset.context != "recompute":
            self._write(latents)
        for history in self.histories:
            history.see(self.committed, latents)
        self._starts.append(self.committed)
        self.committed += count
        self.made = max(self.made, self.committed)
        recent = latents if self._recent is None else torch.cat([self._recent, latents], 2)
        self._recent = recent[:, :, -self.preset.window :].clone()
        self._starts = [start for start in self._starts if start >= self.committed - self.preset.window]

    def recommit(self) -> None:
        """Write the frames of the ring anew, in order, under the text that the branches have now; the sink stays."""
        if self.preset.context == "recompute" or self._recent is None:
            return
        start, stop = self.branches[0].cache.oldest, self.committed - self._base
        for branch in self.branches:
            branch.cache.rewind(start)
        edges = sorted({start, stop, *(at - self._base for at in self._starts if start < at - self._base < stop)})
        for begin, end in zip(edges, edges[1:], strict=False):
            first = self._recent.shape[2] - (stop - begin)
            self._write(self._recent[:, :, first : first + end - begin])

    def state_dict(self) -> dict[str, Any]:
        """Everything that ``load_state_dict`` needs."""
        names = ("made", "committed", "_base", "_starts", "_recent", "_warned", "_stale")
        return {
            **{name: getattr(self, name) for name in names},
            "wave": None if self._wave is None else self._wave.state_dict(),
            "caches": [branch.cache.state_dict() for branch in self.branches],
            "histories": [history.state_dict() for history in self.histories],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where ``state`` was taken; the noise is not in it."""
        for name in ("made", "committed", "_base", "_starts", "_recent", "_warned", "_stale"):
            setattr(self, name, state[name])
        self._starts = list(self._starts)
        if self._wave is not None:
            self._wave.load_state_dict(state["wave"])
        for branch, kept in zip(self.branches, state["caches"], strict=True):
            branch.cache.load_state_dict(kept)
        for history, kept in zip(self.histories, state["histories"], strict=True):
            history.load_state_dict(kept)

    def _predict(self, latents: torch.Tensor, timesteps: Sequence[float], left_out: Sequence[int] = ()) -> torch.Tensor:
        cache, count = self.branches[0].cache, latents.shape[2] + len(left_out)
        self.attended = len(cache.live(cache.done + count))
        self.evicted = self.committed + count - self.attended
        self.passes += 1
        return self.network(self.branches, latents, timesteps, guidance=self.guidance, left_out=left_out)

    def _write(self, latents: torch.Tensor) -> None:
        sigma = self.preset.context_sigma
        before = self.noise.states()
        try:
            clean = noised(latents, sigma, self.noise)
            self.network(self.branches, clean, 1000.0 * sigma, commit=1, writes=True)
        except BaseException:
            self.noise.set_states(before)
            raise

    def _start(self) -> torch.Tensor:
        """What the next chunk starts from: noise, or the source under noise."""
        batch, channels, height, width = self.shape
        noise = self.noise.first((batch, channels, self.preset.chunk, height, width), self.made)
        if self.source is None or self.source.shape[2] <= self.made:
            return noise
        known = self.source[:, :, self.made : self.made + self.preset.chunk].to(noise)
        if known.shape[2] < noise.shape[2]:
            known = torch.cat([known, known[:, :, -1:].expand(-1, -1, noise.shape[2] - known.shape[2], -1, -1)], 2)
        sigma = self.preset.sigmas[self._skipped_steps()]
        return (1 - sigma) * known + sigma * noise

    def _skipped_steps(self) -> int:
        """Leading steps whose noise level is above the strength with which a source is noised."""
        if self.source is None or self.source.shape[2] <= self.made:
            return 0
        above = sum(sigma > self.strength for sigma in self.preset.sigmas)
        return min(above, len(self.preset.sigmas) - 1)

    def _fresh(self, ahead: int) -> torch.Tensor | None:
        """Noise of a chunk that joins the wave behind ``ahead`` others; None at the end of the video."""
        start = self.made + ahead * self.preset.chunk
        if self.limit is not None and start >= self.limit:
            return None
        batch, channels, height, width = self.shape
        return self.noise.first((batch, channels, self.preset.chunk, height, width), start)

    def _full(self) -> bool:
        return self._stale or self.branches[0].cache.done + self.preset.chunk > self.preset.window

    def _refill(self) -> None:
        """Forget the ring and fill it from the last clean latents, as the first frames of a video."""
        if self._recent is None:
            return
        overlap = self._recent[:, :, -self.preset.overlap :].clone()
        count = overlap.shape[2]
        if self.first_frame is not None and count < self.committed:
            overlap[:, :, :1] = self.first_frame(count).to(overlap)
        self._stale = True
        for branch in self.branches:
            branch.cache.reset()
        self._base = self.committed - count
        self._write(overlap)
        self._stale = False

    def _warn_of_flicker(self) -> None:
        cache = self.branches[0].cache
        rolls = self.preset.context in ("commit", "wave") and cache.sink == 0
        if rolls and not self._warned and cache.done + self.preset.open_frames > self.preset.window:
            self._warned = True
            warnings.warn(
                f"the first latent frame leaves the window of {self.preset.window} frames and there is no sink; "
                "published models flicker from here on. Wrap with sink=1 or more, or with a larger window.",
                stacklevel=2,
            )
