"""How close each frame of a video is to the baseline's, as a drawing."""

from __future__ import annotations

import math
from html import escape

from torch import Tensor

from cachedit.evaluate.metrics import psnr
from cachedit.evaluate.plot import ticks

WIDTH, HEIGHT = 620, 120
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 26  # margins


def frame_plot(frames: Tensor, reference: Tensor, name: str) -> str:
    """PSNR over the frames as an SVG element that stands for itself; "" where all frames are identical.

    Args:
        frames: [N, 3, H, W] in [0, 1].
        reference: like ``frames``.
        name: of what is compared.
    """
    values = psnr(frames, reference).tolist()
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    scale = ticks(min(finite), max(finite), 1.0)
    low, high = scale[0], scale[-1]
    across = (WIDTH - LEFT - RIGHT) / max(1, len(values) - 1)

    def place(frame: int, value: float) -> str:
        y = TOP + (HEIGHT - TOP - BOTTOM) * (1 - (min(value, high) - low) / (high - low))
        return f"{LEFT + frame * across:.1f},{y:.1f}"

    parts = []
    for value in (low, high):
        x, y = place(0, value).split(",")
        parts.append(f'<text x="{float(x) - 6}" y="{float(y) + 4}" text-anchor="end">{value:g}</text>')
        parts.append(f'<line x1="{x}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="currentColor" opacity=".25"/>')
    # An identical frame, whose PSNR is infinite, is drawn at the top.
    points = " ".join(place(frame, value) for frame, value in enumerate(values) if not math.isnan(value))
    parts.append(f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="1.5"/>')
    for frame, anchor in ((0, "start"), (len(values) - 1, "end")):
        x = place(frame, low).split(",")[0]
        parts.append(f'<text x="{x}" y="{HEIGHT - 6}" text-anchor="{anchor}">frame {frame + 1}</text>')
    told = f"PSNR of each frame of {name}: {min(finite):.1f} to {max(finite):.1f} dB"
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-family="system-ui, sans-serif" '
        f'font-size="12" fill="currentColor"><title>{escape(told)}</title>{"".join(parts)}</svg>'
    )
