"""Pictures and videos as parts of a page that loads nothing."""

from __future__ import annotations

import base64
import io
import math
from html import escape
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from cachedit.evaluate.picture_files import to_image

LOSSLESS_SIDE = 256  # pixels; larger pictures go into a page as JPEG
LARGEST_SIDE = 512  # pixels; larger pictures are shown at that size
FILM_SIDE, FILM_FRAMES = 256, 64  # of a video in a page: the longer side, and the number of frames
SMALL_FRAME = 64  # pixels; larger frames go into a page as JPEG


class Sheet(NamedTuple):
    """The frames of a video side by side in one picture, which a page shows one at a time.

    Attributes:
        uri: the picture.
        columns, rows: of frames.
        width, height: of a frame.
    """

    uri: str
    columns: int
    rows: int
    width: int
    height: int


def data_uri(picture: Tensor) -> str:
    """A picture ``[3, H, W]`` in [0, 1] as a data URI: PNG up to 256 pixels a side, JPEG of at most 512 above.

    A page of 1024-pixel PNGs would be tens of megabytes.
    """
    image = to_image(picture)
    if max(image.size) <= LOSSLESS_SIDE:
        return _encoded(image, "png")
    image.thumbnail((LARGEST_SIDE, LARGEST_SIDE), Image.Resampling.LANCZOS)
    return _encoded(image, "jpeg")


def figure(picture: Tensor, caption: str) -> str:
    """A picture ``[3, H, W]`` with its caption."""
    small = ' class="small"' if max(picture.shape[1:]) <= LOSSLESS_SIDE else ""
    text = escape(caption, quote=True)
    return f'<figure><img{small} src="{data_uri(picture)}" alt="{text}"><figcaption>{text}</figcaption></figure>'


def shown_frames(count: int) -> list[int]:
    """The frames of a video that a page shows: all, or so many evenly spread ones."""
    if count <= FILM_FRAMES:
        return list(range(count))
    return [round(k * (count - 1) / (FILM_FRAMES - 1)) for k in range(FILM_FRAMES)]


def sheet(frames: Tensor) -> Sheet:
    """Frames ``[N, 3, H, W]`` as one picture, small enough for a page."""
    scale = min(1.0, FILM_SIDE / max(frames.shape[2:]))
    if scale < 1:
        frames = F.interpolate(frames, scale_factor=scale, mode="area")
    count, _, height, width = frames.shape
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    canvas = torch.zeros(3, rows * height, columns * width)
    for k, frame in enumerate(frames):
        top, left = k // columns * height, k % columns * width
        canvas[:, top : top + height, left : left + width] = frame
    lossless = scale == 1 and max(height, width) <= SMALL_FRAME
    return Sheet(_encoded(to_image(canvas), "png" if lossless else "jpeg"), columns, rows, width, height)


def film(found: Sheet, caption: str) -> str:
    """One frame of a sheet with its caption; the script of the page turns to the others."""
    text = escape(caption, quote=True)
    style = (
        f"aspect-ratio:{found.width}/{found.height};background-image:url({found.uri});"
        f"background-size:{100 * found.columns}% {100 * found.rows}%"
    )
    picture = f'<div class="film" role="img" aria-label="{text}" style="{style}"></div>'
    return f"<figure>{picture}<figcaption>{text}</figcaption></figure>"


def player(found: Sheet, count: int, label: str) -> str:
    """Controls of all films of a section: a button and a slider. Hidden until the script is there."""
    text = escape(label, quote=True)
    return (
        f'<div class="player" hidden data-columns="{found.columns}" data-rows="{found.rows}">'
        f'<button type="button" aria-label="Play or pause: {text}">Play</button>'
        f'<input type="range" min="1" max="{count}" value="1" aria-label="Frame: {text}">'
        f"<output>1 of {count}</output></div>"
    )


def _encoded(image: Image.Image, kind: str) -> str:
    buffer = io.BytesIO()
    if kind == "png":
        image.save(buffer, "PNG", optimize=True)
    else:
        image.save(buffer, "JPEG", quality=88)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
