"""Rotary position embedding of video tokens at any frame, without a table that ends."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Turn = torch.Tensor  # complex numbers of length 1, [tokens, 1, head_dim / 2]
KEPT = 16  # turns remembered: those of a chunk are asked for in every layer of every step


class VideoRope:
    """Wan's three axes, with the angles taken in float64 at whatever frame is asked for.

    Args:
        head_dim: channels of a head; frames get what two thirds of it, rounded down to even thirds, leave over.
        grid: rows and columns of tokens in a frame.
        theta: base of the frequencies.
    """

    def __init__(self, head_dim: int, grid: tuple[int, int], theta: float = 10000.0) -> None:
        across = 2 * (head_dim // 6)
        self._rates = [
            theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
            for size in (head_dim - 2 * across, across, across)
        ]
        self._grid = grid
        self._turns: dict[object, Turn] = {}

    def turn(self, frames: Sequence[float], like: torch.Tensor) -> Turn:
        """How the tokens of some frames are turned, for tensors such as ``like``."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        key = (*frames, dtype, like.device)
        if key not in self._turns:
            if len(self._turns) >= KEPT:
                self._turns.pop(next(iter(self._turns)))
            angles = self._angles(frames)
            self._turns[key] = torch.complex(angles.cos(), angles.sin()).to(like.device, dtype.to_complex())
        return self._turns[key]

    def _angles(self, frames: Sequence[float]) -> torch.Tensor:
        rows, columns = self._grid
        axes = [torch.tensor(list(frames)), torch.arange(rows), torch.arange(columns)]
        along = [torch.outer(axis.double(), rate) for axis, rate in zip(axes, self._rates, strict=True)]
        shape = (len(frames), rows, columns, -1)
        parts = [along[0][:, None, None], along[1][None, :, None], along[2][None, None]]
        return torch.cat([part.expand(shape) for part in parts], -1).reshape(len(frames) * rows * columns, 1, -1)
