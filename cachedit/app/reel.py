"""A video that grows: its newest frame, one still of every chunk, and once it is whole, the film."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from cachedit.app import markup
from cachedit.evaluate.figures import FILM_SIDE, LOSSLESS_SIDE, data_uri
from cachedit.evaluate.picture_files import FRAME_MS, to_image
from cachedit.evaluate.table import size

STILLS = 48  # of the newest chunks; a page of all of a long video would be sent anew with each
STILL_SIDE = 96  # pixels
FILM_FRAMES = 480  # of the newest ones; a minute


@dataclass(frozen=True)
class Reel:
    """What there is of a video.

    Attributes:
        chunks: frames of each chunk so far, [n, 3, H, W] in [0, 1].
        run: the record of the rollout.
        whole: True once no more will come.
    """

    chunks: tuple[Tensor, ...]
    run: Any
    whole: bool = False

    @property
    def frames(self) -> int:
        """How many there are."""
        return sum(len(chunk) for chunk in self.chunks)


def shown(reel: Reel) -> str:
    """The reel as HTML."""
    newest = reel.chunks[-1][-1]
    small = " ce-small" if max(newest.shape[1:]) <= LOSSLESS_SIDE else ""
    if reel.whole:
        picture, text = _film(reel), f"the video, {reel.frames} frames"
    else:
        picture, text = data_uri(newest), f"the newest frame, number {reel.frames}"
    return "\n".join(
        [
            f'<div class="ce-pictures{small}"><figure class="ce-reel"><div><img src="{picture}" alt="{text}"></div>',
            f"<figcaption><span>{text}</span></figcaption></figure></div>",
            _stills(reel),
            _facts(reel) if reel.whole else "",
        ]
    )


def _stills(reel: Reel) -> str:
    """The last frame of every chunk; where another prompt begins, its words."""
    records, items = reel.run.chunks[: len(reel.chunks)], []
    first = max(0, len(reel.chunks) - STILLS)
    for chunk, record in list(zip(reel.chunks, records, strict=True))[first:]:
        changed = record.index == 0 or record.prompt != records[record.index - 1].prompt
        words = f"<q>{escape(record.prompt)}</q>" if changed else ""
        still = data_uri(_reduced(chunk[-1:], STILL_SIDE)[0])
        kind = ' class="ce-changed"' if changed else ""
        items.append(f'<li{kind}><img src="{still}" alt="chunk {record.index + 1}">{words}</li>')
    return f'<ol class="ce-stills" aria-label="Last frame of every chunk">{"".join(items)}</ol>'


def _facts(reel: Reel) -> str:
    run, milliseconds = reel.run, [chunk.denoise_ms + chunk.decode_ms for chunk in reel.run.chunks]
    commits = [chunk.commit_ms for chunk in run.chunks if chunk.commit_ms is not None]
    total = sum(milliseconds) + sum(commits)
    rows = [
        (one.index + 1, f"{one.start} to {one.stop - 1}", one.attended, _ms(one.denoise_ms), _ms(one.commit_ms))
        for one in _few(run.chunks)
    ]
    return markup.facts(
        {
            "first frames after": _ms(milliseconds[0]),
            "frames per second": f"{1000 * reel.frames / total:.1f}",
            "window": f"{run.window} latent frames, {run.sink} of them sink",
            "left the window": f"{run.chunks[-1].evicted} latent frames",
            "cache": size(run.cache_bytes_peak),
            "strategy": run.strategy,
        }
    ) + markup.table(
        ("chunk", "latent frames", "attended to", "denoised in", "committed in"),
        [[str(cell) for cell in row] for row in rows],
        "Chunks: the first four and the last four",
    )


def _few(chunks: Sequence[Any]) -> list[Any]:
    """The first four and the last four."""
    return [*chunks] if len(chunks) <= 8 else [*chunks[:4], *chunks[-4:]]


def _ms(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds:.0f} ms"


def _film(reel: Reel) -> str:
    """All frames, or the last of very many, as an animated picture: lossless where they are small."""
    frames = [frame for chunk in reel.chunks for frame in _reduced(chunk, FILM_SIDE)][-FILM_FRAMES:]
    images = [to_image(frame) for frame in frames]
    kind, quality = ("PNG", {}) if max(images[0].size) <= 64 else ("WEBP", {"quality": 80})
    buffer = io.BytesIO()
    images[0].save(buffer, kind, save_all=True, append_images=images[1:], duration=FRAME_MS, loop=0, **quality)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _reduced(frames: Tensor, side: int) -> Tensor:
    """Frames whose longer side is no longer than ``side`` pixels."""
    scale = side / max(frames.shape[2:])
    return frames if scale >= 1 else F.interpolate(frames, scale_factor=scale, mode="area")
