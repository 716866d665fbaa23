"""Diffusion forcing (SkyReels-V2): in its asynchronous mode, only the blocks that are being denoised are computed."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from cachedit.disguise import disguised
from cachedit.video.network import CausalNetwork
from cachedit.video.processors import Branch, Current
from cachedit.video.record import ChunkRecord, VideoRun
from cachedit.video.ring import RollingKVCache

ATTRIBUTE = "_cachedit_forcing"
NOT_BEGUN = 999  # the timestep that diffusers gives to blocks that have not begun


@dataclass
class Window:
    """The blocks of one guidance path while its noise goes through.

    branch: text, and the ring that holds every frame.
    times:  timestep of every block at the last call, in the order of the blocks.
    """

    branch: Branch
    times: list[float] = field(default_factory=list)


class DiffusionForcing:
    """Answers the calls of the transformer of a diffusion forcing pipeline (SkyReels-V2, arXiv 2504.13074).

    Blocks of frames are denoised one behind the other. Under the block-causal mask a block that is finished does not
    change any more, and nobody attends to one that has not begun. So a finished block is committed once, and the model
    runs on the blocks in between alone: the same function as the stock model's, with fewer frames.

    A block is finished when its timestep is 0. One that has not begun has the highest timestep; of those only the first
    can be at its first step, so that it alone is computed. Where two blocks can be at one timestep, all are computed.

    Args:
        described: the strategy, for the record.
        quant: how finished frames are kept (``RollingKVCache``).
    """

    def __init__(self, described: str, quant: str | None) -> None:
        self.described, self.quant = described, quant
        self.current = Current()
        self.run: VideoRun | None = None
        self._label = ""
        self._windows: dict[str, Window] = {}
        self._pipe: Any = None  # inside a call
        self._lag = 0  # steps that a block is behind the one before it

    @property
    def idle(self) -> bool:
        """True outside a call of the pipeline: the transformer is the stock one then."""
        return self._pipe is None

    def call(self, pipe: Any, stock: Any, *arguments: Any, **named: Any) -> Any:
        """The pipeline's own call.

        Raises:
            ValueError: its mode is synchronous, where nothing can be kept.
        """
        block = named.get("causal_block_size") or pipe.transformer.config.num_frame_per_block
        if not named.get("ar_step") or block < 2:
            raise ValueError(
                f"got ar_step={named.get('ar_step', 0)} and causal_block_size={block}: all frames are denoised "
                "together and attend to each other, so nothing can be kept exactly. Allowed: ar_step of 1 or more with "
                "causal_block_size of 2 or more, such as 5 and 5; or unwrap the pipeline."
            )
        self._windows.clear()
        self._pipe, self._lag = pipe, named["ar_step"]
        self.run = VideoRun(self.described, 0, 0, "absolute", self.quant or str(pipe.transformer.dtype), "forcing")
        self.run.status = "aborted"
        try:
            found = stock(*arguments, **named)
            self.run.status = "finished"
            return found
        finally:
            self._windows.clear()
            self._pipe = None

    @contextmanager
    def labelled(self, name: str) -> Iterator[None]:
        """Calls inside are of this guidance path."""
        before, self._label = self._label, name
        try:
            yield
        finally:
            self._label = before

    def forward(
        self, model: Any, stock: Any, latents: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor, **named: Any
    ) -> torch.Tensor:
        """What the stock model gives for the frames that are being denoised; zero for the others.

        Args:
            model: the transformer.
            stock: its own call.
            latents: [B, C, F, H, W].
            timestep: of every frame, [B, F], equal in all samples.
            text: [B, tokens, channels].
            **named: further arguments of the call.
        """
        size, frames = model.config.num_frame_per_block, latents.shape[2]
        times = timestep[0, ::size].tolist()
        window = self._window(model, latents, text, times)
        cache = window.branch.cache
        finished = next((index for index, time in enumerate(times) if time != 0), len(times))
        stop = len(times) if self._ambiguous() else max(times.index(max(times)) + 1, finished)
        fresh = cache.done // size  # blocks that are committed
        found = torch.zeros_like(latents)
        if stop > fresh:
            rows, commit = slice(fresh * size, stop * size), max(0, finished - fresh)
            opening = cache.open([size] * (stop - fresh), commit)
            with self.current.pass_over(window.branch, opening), _no_mask(model):
                found[:, :, rows] = stock(
                    latents[:, :, rows], timestep[:, rows], text, **{**named, "return_dict": False}
                )[0]
            cache.close(opening)
        self._record((stop - fresh) * size, frames, cache)
        return found

    def _ambiguous(self) -> bool:
        """True if a block may be at the timestep of the next one, so that timesteps do not tell which has begun."""
        times = self._pipe.scheduler.timesteps.long()
        return bool(times[min(self._lag, len(times) - 1)] >= min(int(times[0]), NOT_BEGUN))

    def _window(self, model: Any, latents: torch.Tensor, text: torch.Tensor, times: list[float]) -> Window:
        """The window of this guidance path; a new one where the noise goes up again, as a new video begins."""
        known = self._windows.get(self._label)
        same = known is not None and len(known.times) == len(times)
        if known is None or not same or any(new > old for new, old in zip(times, known.times, strict=True)):
            network = CausalNetwork(model, self.current)
            cache = network.cache(latents.shape, window=latents.shape[2], quant=self.quant)
            known = self._windows[self._label] = Window(Branch(text, cache))
        known.times = times
        return known

    def _record(self, computed: int, frames: int, cache: RollingKVCache) -> None:
        """One row per call of the model: its frames, how many of them it took and how many are finished."""
        if self.run is not None:
            size = cache.nbytes * len(self._windows)
            self.run.window = max(self.run.window, frames)
            self.run.add(
                ChunkRecord(len(self.run.chunks), 0, cache.done, 1, computed, frames - computed, size, 0.0, 0.0)
            )


@contextmanager
def _no_mask(model: Any) -> Iterator[None]:
    """The model builds a dense mask where its configuration is causal; here the processors know who sees whom."""
    size = model.config.num_frame_per_block
    model.register_to_config(num_frame_per_block=1)
    try:
        yield
    finally:
        model.register_to_config(num_frame_per_block=size)


@functools.cache
def forced(cls: Any) -> Any:
    """A transformer class whose calls go through its ``DiffusionForcing``, and which is otherwise ``cls``."""

    def call(self: Any, hidden_states: Any, timestep: Any, encoder_hidden_states: Any, *rest: Any, **named: Any) -> Any:
        stock = functools.partial(cls.__call__, self)
        forcing = self.__dict__[ATTRIBUTE]
        if rest or forcing.idle or not named.get("enable_diffusion_forcing"):
            return stock(hidden_states, timestep, encoder_hidden_states, *rest, **named)
        return (forcing.forward(self, stock, hidden_states, timestep, encoder_hidden_states, **named),)

    @contextmanager
    def cache_context(self: Any, name: str, **named: Any) -> Iterator[None]:
        with self.__dict__[ATTRIBUTE].labelled(name), cls.cache_context(self, name, **named):
            yield

    return disguised(cls, __call__=call, cache_context=cache_context, **{ATTRIBUTE: True})
