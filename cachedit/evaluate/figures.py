"""Pictures and videos as parts of a page that loads nothing."""

from __future__ import annotations

import base64
import io
import math
from html import escape

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from cachedit.evaluate.picture_files import to_image

LOSSLESS_SIDE = 256  # pixels; larger pictures go into a page as JPEG
LARGEST_SIDE = 512  # pixels; larger pictures are shown at that size
FILM_SIDE, FILM_FRAMES = 256, 64  # of a video in a page: the longer side, and the number of frames
SMALL_FRAME = 64  # pixels; larger frames go into a page as JPEG


def data_uri(picture: Tensor) -> str:
    """A picture ``[3, H, W]`` in [0, 1] as a data URI: PNG up to 256 pixels a side, JPEG of at most 512 above.

    A page of 1024-pixel PNGs would be tens of megabytes.
    """
    image = to_image(picture)
    if max(image.size) <= LOSSLESS_SIDE:
        return _encoded(image, "png")
    image.thumbnail((LARGEST_SIDE, LARGEST_SIDE), Image.Resampling.LANCZOS)
    return _encoded(image, "jpeg")


def figure(pictures: Tensor, caption: str) -> str:
    """The first picture of ``[N, 3, H, W]`` with its caption."""
    small = ' class="small"' if max(pictures.shape[2:]) <= LOSSLESS_SIDE else ""
    text = escape(caption, quote=True)
    return f'<figure><img{small} src="{data_uri(pictures[0])}" alt="{text}"><figcaption>{text}</figcaption></figure>'


def shown_frames(count: int) -> list[int]:
    """The frames of a video that a page shows: all, or so many evenly spread ones."""
    if count <= FILM_FRAMES:
        return list(range(count))
    return [round(k * (count - 1) / (FILM_FRAMES - 1)) for k in range(FILM_FRAMES)]


def film(frames: Tensor, caption: str) -> str:
    """Frames ``[N, 3, H, W]`` with a caption: one picture of all, of which the page's script shows one at a time."""
    scale = min(1.0, FILM_SIDE / max(frames.shape[2:]))
    if scale < 1:
        frames = F.interpolate(frames, scale_factor=scale, mode="area")
    count, _, height, width = frames.shape
    columns, rows = layout(count)
    sheet = torch.zeros(3, rows * height, columns * width)
    for k, frame in enumerate(frames):
        top, left = k // columns * height, k % columns * width
        sheet[:, top : top + height, left : left + width] = frame
    kind = "png" if max(height, width) <= SMALL_FRAME else "jpeg"
    text = escape(caption, quote=True)
    style = (
        f"aspect-ratio:{width}/{height};background-image:url({_encoded(to_image(sheet), kind)});"
        f"background-size:{100 * columns}% {100 * rows}%"
    )
    picture = f'<div class="film" role="img" aria-label="{text}" style="{style}"></div>'
    return f"<figure>{picture}<figcaption>{text}</figcaption></figure>"


def layout(count: int) -> tuple[int, int]:
    """Columns and rows of so many frames in one picture."""
    columns = math.ceil(math.sqrt(count))
    return columns, math.ceil(count / columns)


def player(count: int, label: str) -> str:
    """Controls of all films of a section: a button and a slider. Hidden until the script is there."""
    columns, rows = layout(count)
    text = escape(label, quote=True)
    return (
        f'<div class="player" hidden data-columns="{columns}" data-rows="{rows}">'
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
