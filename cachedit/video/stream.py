"""A video as it is made: an iterator of chunks that can be talked to, stopped, kept and taken up again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from cachedit.video.decoder import StreamingDecoder
from cachedit.video.prompts import PromptChange
from cachedit.video.record import ChunkRecord, VideoRun
from cachedit.video.rollout import Rollout


@dataclass(frozen=True)
class Chunk:
    """Frames that were made together.

    Attributes:
        index: number of the chunk.
        start, stop: its latent frames.
        latents: clean, [B, C, stop - start, h, w].
        frames: as ``output_type`` says: arrays [B, n, H, W, 3] ("np"), tensors [B, n, 3, H, W] ("pt"), lists of
            pictures ("pil"), or the latents themselves.
        first_frame: number of the first of them in the video.
        prompt: what they were made for.
    """

    index: int
    start: int
    stop: int
    latents: torch.Tensor
    frames: Any
    first_frame: int
    prompt: str


@dataclass(frozen=True)
class Tools:
    """What a stream needs of its pipeline.

    encode: text -> embeddings [B, tokens, channels].
    show: frames [B, 3, n, H, W] in [-1, 1] -> what is asked for.
    latent_of: frames [B, 3, n, H, W] in [-1, 1] -> latents.
    remake: a state -> a stream that goes on from it.
    free: called at the end.
    factor: frames per latent frame.
    """

    encode: Callable[[Any], torch.Tensor]
    show: Callable[[torch.Tensor], Any]
    latent_of: Callable[[torch.Tensor], torch.Tensor]
    remake: Callable[[dict[str, Any]], Stream]
    free: Callable[[], None]
    factor: int


class Stream:
    """Chunks of a video. Frames come before the pass that lets later chunks attend to them, so they come sooner.

    An error inside a chunk, such as an interrupt, leaves the stream as it was: ``next`` makes the chunk again.

    Attributes:
        run: the record, which ``cachedit.last_run`` gives too.
        prompt: the words that the next chunk is made for.
    """

    def __init__(
        self,
        rollout: Rollout,
        decoder: StreamingDecoder | None,
        tools: Tools,
        run: VideoRun,
        *,
        given: torch.Tensor | None = None,
        frames: int | None = None,
        prompt: str = "",
        output_type: str = "np",
    ) -> None:
        self._rollout: Rollout | None = rollout
        self._decoder, self._tools, self.run = decoder, tools, run
        self._given, self._frames, self.prompt, self._output = given, frames, prompt, output_type
        self._latents: torch.Tensor | None = None  # of a chunk that is made and not shown yet
        self._steps: int | None = None  # 0 where these latents were given
        self._pending: torch.Tensor | None = None  # the chunk shown last, which nothing attends to yet
        self._change: PromptChange | None = None
        self._tail: torch.Tensor | None = None  # the last frames, where a ring may be filled from them
        self._shown = 0
        if decoder is not None and decoder.factor > 1:
            rollout.first_frame = self._first_frame

    @property
    def limit(self) -> int | None:
        """Latent frames of the whole video; None for no end."""
        return self._open().limit

    def __iter__(self) -> Iterator[Chunk]:
        """The stream itself."""
        return self

    def __next__(self) -> Chunk:
        """The next chunk, after what is left to do of the one before.

        Raises:
            StopIteration: the video is complete, or the stream was closed.
        """
        rollout = self._rollout
        if rollout is None:
            raise StopIteration
        if rollout.ended:
            self._end("finished")
            raise StopIteration
        self._commit_pending(rollout)
        if self._change is not None and self._given is None:
            self._apply(rollout)
        index, began = len(self.run.chunks), time.perf_counter()
        if self._latents is None:
            self._steps = 0 if self._given is not None else None
            self._latents = rollout.make() if self._given is None else self._next_given(rollout)
        latents, made = self._latents, time.perf_counter()
        start, stop = rollout.made - latents.shape[2], rollout.made
        stop = stop if rollout.limit is None else min(stop, rollout.limit)
        chunk = self._shown_chunk(index, start, stop, latents)
        decoded = time.perf_counter()
        self._pending, self._latents = latents, None
        work = (0, 0, 0) if self._steps == 0 else (rollout.passes, rollout.attended, rollout.evicted)
        times = (1000 * (made - began), 1000 * (decoded - made))
        self.run.add(ChunkRecord(index, start, stop, *work, rollout.cache_bytes, *times, None, self.prompt))
        return chunk

    def change_prompt(
        self, prompt: str | list[str] | None = None, how: str = "keep", chunks: int = 3, prompt_embeds: Any = None
    ) -> None:
        """Go on with another prompt from the next chunk on; the chunk shown last is kept as it was made.

        Args:
            prompt: the new text.
            how: "keep", "recache", "flush" or "interpolate" (``PromptChange``).
            chunks: how many chunks "interpolate" takes.
            prompt_embeds: embeddings instead of text.

        Raises:
            ValueError: the text does not fit to the text before, or ``how`` is not known.
            RuntimeError: the stream has ended.
        """
        rollout = self._open()
        if (prompt is None) == (prompt_embeds is None):
            raise ValueError("got prompt and prompt_embeds both or neither; allowed: one of the two")
        old = rollout.branches[0].embeds
        embeds = self._tools.encode(prompt) if prompt_embeds is None else prompt_embeds
        words = " | ".join(prompt) if isinstance(prompt, list) else prompt or ""
        change = PromptChange(embeds.to(old.device, old.dtype), how, chunks, words)
        change.check(old)
        self._change = change

    def close(self) -> None:
        """End the stream where it is and let go of everything it holds."""
        if self._rollout is not None:
            self._end("finished" if self._rollout.ended else "aborted")

    def state_dict(self) -> dict[str, Any]:
        """The whole stream between two chunks, in tensors and plain values, for ``video.stream(state=...)``.

        Raises:
            RuntimeError: the stream has ended.
        """
        rollout = self._open()
        return {
            "rollout": rollout.state_dict(),
            "noise": rollout.noise.state_dict(),
            "embeds": [branch.embeds for branch in rollout.branches],
            "decoder": None if self._decoder is None else self._decoder.state_dict(),
            "latents": self._latents,
            "steps": self._steps,
            "pending": self._pending,
            "given": self._given,
            "tail": self._tail,
            "source": rollout.source,
            "strength": rollout.strength,
            "shape": rollout.shape,
            "guidance": rollout.guidance,
            "limit": rollout.limit,
            "frames": self._frames,
            "shown": self._shown,
            "prompt": self.prompt,
            "change": None if self._change is None else self._change.state_dict(),
            "output_type": self._output,
            "preset": vars(rollout.preset),
            "run": [dict(vars(chunk)) for chunk in self.run.chunks],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where ``state`` was taken; the caller has made this stream from the rest of it."""
        self._open().load_state_dict(state["rollout"])
        if self._decoder is not None and state["decoder"] is not None:
            self._decoder.load_state_dict(state["decoder"])
        for name in ("latents", "steps", "pending", "given", "tail", "shown"):
            setattr(self, f"_{name}", state[name])
        self._change = None if state["change"] is None else PromptChange(**state["change"])
        for chunk in state["run"]:
            self.run.add(ChunkRecord(**chunk))

    def fork(self) -> Stream:
        """Another stream that goes on from here; both can be run in turn."""
        return self._tools.remake(self.state_dict())

    def _open(self) -> Rollout:
        if self._rollout is None:
            raise RuntimeError("this stream has ended; start another one with video.stream(...)")
        return self._rollout

    def _commit_pending(self, rollout: Rollout) -> None:
        if self._pending is None:
            return
        began = time.perf_counter()
        rollout.commit(self._pending)
        self._pending = None
        self.run.chunks[-1].commit_ms = 1000 * (time.perf_counter() - began)

    def _apply(self, rollout: Rollout) -> None:
        change = self._change
        if change is None:
            return
        change.apply(rollout)
        self.prompt = change.prompt
        if change.over:
            self._change = None

    def _next_given(self, rollout: Rollout) -> torch.Tensor:
        """The next latents of the video that is continued: what is left over first, then whole chunks."""
        assert self._given is not None
        chunk = rollout.preset.chunk
        count = self._given.shape[2] % chunk or chunk
        latents, rest = self._given[:, :, :count], self._given[:, :, count:]
        self._given = rest if rest.shape[2] else None
        rollout.made += count
        return latents

    def _decode(self, latents: torch.Tensor) -> torch.Tensor | None:
        if self._decoder is None:
            return None
        frames, overlap = self._decoder(latents), self._open().preset.overlap
        if overlap:
            tail = frames if self._tail is None else torch.cat([self._tail, frames], 2)
            self._tail = tail[:, :, -((overlap - 1) * self._tools.factor + 1) :].clone()
        return frames

    def _first_frame(self, count: int) -> torch.Tensor:
        """The latent of the frame where the last ``count`` latent frames begin, encoded as a video's first."""
        assert self._tail is not None
        at = (count - 1) * self._tools.factor + 1
        return self._tools.latent_of(self._tail[:, :, self._tail.shape[2] - at : self._tail.shape[2] - at + 1])

    def _shown_chunk(self, index: int, start: int, stop: int, latents: torch.Tensor) -> Chunk:
        frames, first, latents = self._decode(latents), self._shown, latents[:, :, : stop - start]
        if self._output == "latent" or frames is None:
            self._shown += latents.shape[2]
            return Chunk(index, start, stop, latents, latents, first, self.prompt)
        if self._frames is not None:
            frames = frames[:, :, : self._frames - first]
        self._shown += frames.shape[2]
        return Chunk(index, start, stop, latents, self._tools.show(frames), first, self.prompt)

    def _end(self, status: str) -> None:
        self.run.status = status
        self._rollout = self._decoder = self._latents = self._pending = self._given = self._tail = self._change = None
        self._tools.free()
