"""One picture of a comparison: a row of prompts per configuration, and under every cached row its step strip."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from cachedit.evaluate.comparison import Comparison, Row
from cachedit.evaluate.picture_files import to_image
from cachedit.run import COMPUTED

if TYPE_CHECKING:
    from PIL.Image import Image

SIDE, GAP, LABEL, STRIP = 128, 6, 22, 14  # pixels
INK, PALE, PAPER = (32, 32, 36), (206, 210, 218), (255, 255, 255)


def draw(comparison: Comparison) -> Image:
    """Draw the first picture of every prompt, baseline first; computed steps are dark, reused ones pale."""
    from PIL import Image, ImageDraw

    rows = comparison.rows
    columns = len(rows[0].shots)
    width = columns * (SIDE + GAP) + GAP
    heights = [LABEL + SIDE + GAP + (STRIP + GAP if row.strip else 0) for row in rows]
    poster = Image.new("RGB", (width, sum(heights) + GAP), PAPER)
    brush = ImageDraw.Draw(poster)
    top = GAP
    for row, height in zip(rows, heights, strict=True):
        brush.text((GAP, top + 4), _label(row), fill=INK)
        for k, shot in enumerate(row.shots):
            if shot.pictures is not None:
                poster.paste(_picture(shot.pictures[0]), (GAP + k * (SIDE + GAP), top + LABEL))
        if row.strip:
            step = (width - 2 * GAP) / len(row.strip)
            low = top + LABEL + SIDE + GAP
            for i, mark in enumerate(row.strip):
                left = GAP + i * step
                fill = INK if mark == COMPUTED else PALE
                brush.rectangle((round(left), low, round(left + step) - 2, low + STRIP), fill=fill)
        top += height
    return poster


def _label(row: Row) -> str:
    if not row.strip:
        return f"{row.strategy}: {row.nfe:g} steps computed"
    return f"{row.strategy}: {row.nfe:g} of {len(row.strip)} steps computed (dark), the others reused (pale)"


def _picture(pixels: Tensor) -> Image:
    """A picture [3, H, W] in [0, 1] at the poster's size; small ones keep their pixels."""
    from PIL import Image

    image = to_image(pixels)
    sampling = Image.Resampling.NEAREST if max(image.size) <= SIDE else Image.Resampling.LANCZOS
    return image.resize((SIDE, SIDE), sampling)
