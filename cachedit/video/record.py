"""What happened in a rollout: one record per chunk, and the numbers people ask for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cachedit.record import Record


@dataclass
class ChunkRecord:
    """One chunk of a video.

    Attributes:
        index: number of the chunk.
        start, stop: its latent frames.
        steps: passes of the denoiser that it took; 0 where its latents were given.
        attended: latent frames that it attended to, its own included; 0 where its latents were given.
        evicted: latent frames that had left the window by then.
        cache_bytes: of the rings of all branches.
        denoise_ms, decode_ms: wall time on the host, in milliseconds; decode_ms is 0 where nothing is decoded.
        commit_ms: the same of the pass that lets later chunks attend to it; None until it is made, and for the last.
        prompt: what it was made for; "" where text embeddings were given.
    """

    index: int
    start: int
    stop: int
    steps: int
    attended: int
    evicted: int
    cache_bytes: int
    denoise_ms: float
    decode_ms: float
    commit_ms: float | None = None
    prompt: str = ""


@dataclass
class VideoRun(Record):
    """One rollout.

    Attributes:
        strategy: the strategy as it was configured.
        window, sink: latent frames that a chunk attends to at most, and how many of these stay.
        rope, dtype, context: how positions and frames are kept, and what fills the ring (``Preset``).
        chunks: one record per chunk.
        cache_bytes_peak: most bytes that the rings of all branches held at once.
        status: "running", "finished" or "aborted".
    """

    strategy: str
    window: int
    sink: int
    rope: str
    dtype: str
    context: str
    chunks: list[ChunkRecord] = field(default_factory=list)
    cache_bytes_peak: int = 0
    status: str = "running"

    @property
    def frames(self) -> int:
        """Latent frames that were made."""
        return self.chunks[-1].stop if self.chunks else 0

    @property
    def first_chunk_ms(self) -> float | None:
        """Time to the frames of the first chunk, in milliseconds; its commit comes after. None before them."""
        return self.chunks[0].denoise_ms + self.chunks[0].decode_ms if self.chunks else None

    @property
    def total_ms(self) -> float:
        """Time of all chunks and their commits, in milliseconds."""
        return sum(chunk.denoise_ms + chunk.decode_ms + (chunk.commit_ms or 0.0) for chunk in self.chunks)

    def add(self, chunk: ChunkRecord) -> None:
        """Enter a chunk."""
        self.chunks.append(chunk)
        self.cache_bytes_peak = max(self.cache_bytes_peak, chunk.cache_bytes)

    def summary(self) -> dict[str, Any]:
        """What follows from the chunks."""
        return {"frames": self.frames, "first_chunk_ms": self.first_chunk_ms, "total_ms": self.total_ms}

    def lines(self) -> list[tuple[str, str]]:
        """A small table: what was configured, how far it came, and how long a chunk takes."""
        times = [chunk.denoise_ms + chunk.decode_ms for chunk in self.chunks]
        commits = [chunk.commit_ms for chunk in self.chunks if chunk.commit_ms is not None]
        last = self.chunks[-1] if self.chunks else None
        rows = [
            ("strategy", self.strategy),
            ("status", self.status),
            ("made", f"{self.frames} latent frames in {len(self.chunks)} chunks"),
            ("window", f"{self.window} latent frames, {self.sink} of them sink, rope {self.rope}, {self.context}"),
            ("left it", f"{last.evicted if last else 0} latent frames"),
            ("first chunk", "-" if not times else f"{times[0]:.0f} ms to its frames"),
            ("last chunk", "-" if not times else f"{times[-1]:.0f} ms to its frames"),
            ("commit", "-" if not commits else f"{sum(commits) / len(commits):.0f} ms in the mean, behind the frames"),
            ("cache", f"{self.cache_bytes_peak:,} bytes at most, {self.dtype}"),
        ]
        return rows
