"""Which rings there can be."""

from __future__ import annotations

from cachedit.kernels.eight_bits import FORMATS

ROPES = ("absolute", "sink_shift", "relative")


def check_window(window: int, sink: int, rope: str, quant: str | None) -> None:
    """Refuse sizes and options of a ring that do not fit together.

    Raises:
        ValueError: with what was given and what is allowed.
    """
    if type(window) is not int or type(sink) is not int or not 0 <= sink < window:
        raise ValueError(
            f"got a window of {window!r} frames with a sink of {sink!r}; allowed: a sink of 0 or more frames and a "
            "window that is larger. The window counts the sink and the chunk."
        )
    if rope not in ROPES:
        raise ValueError(f"got rope={rope!r}; allowed: {', '.join(ROPES)}")
    if quant not in FORMATS:
        raise ValueError(f"got dtype={quant!r}; allowed: None to keep the model's own, or 'int8' or 'fp8'")
