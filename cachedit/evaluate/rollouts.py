"""What a comparison tells of a video that was made chunk by chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cachedit.video.record import VideoRun


def passes(run: VideoRun) -> int:
    """How often the denoiser was called for steps; the commits come on top."""
    return sum(chunk.steps for chunk in run.chunks)


def summary(run: VideoRun) -> dict[str, Any]:
    """Chunks, window and times of a rollout as JSON; times in milliseconds on the host."""
    commits = [chunk.commit_ms for chunk in run.chunks if chunk.commit_ms is not None]
    return {
        "chunks": len(run.chunks),
        "window": run.window,
        "sink": run.sink,
        "left_the_window": run.chunks[-1].evicted if run.chunks else 0,
        "first_chunk_ms": run.first_chunk_ms,
        "last_chunk_ms": run.chunks[-1].denoise_ms + run.chunks[-1].decode_ms if run.chunks else None,
        "commit_ms": sum(commits) / len(commits) if commits else None,
    }


def in_words(rollout: dict[str, Any]) -> str:
    """A summary in one line."""
    commit = "" if rollout["commit_ms"] is None else f", a commit {_ms(rollout['commit_ms'])}"
    return (
        f"{rollout['chunks']} chunks over a window of {rollout['window']} latent frames (sink: {rollout['sink']}); "
        f"the first chunk took {_ms(rollout['first_chunk_ms'])}, the last {_ms(rollout['last_chunk_ms'])}{commit}"
    )


def _ms(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds:.0f} ms"
