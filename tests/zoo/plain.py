"""A denoiser of no known family: what a user's own model may look like."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from .case import Case
from .draw import Draw, settle

WIDTH = 24
DEPTH = 4
CHANNELS = 4
TOKENS = 12


class Stage(nn.Module):
    """A residual MLP block that mixes tokens through their mean and insists on its own ``bias_index``."""

    def __init__(self, index: int) -> None:
        """Make stage number ``index``."""
        super().__init__()
        self.index = index
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, temb: torch.Tensor, *, bias_index: int) -> torch.Tensor:
        """Map tokens ``[B, N, C]`` at time embedding ``[B, C]`` to tokens ``[B, N, C]``."""
        assert bias_index == self.index, f"stage {self.index} received the arguments of stage {bias_index}"
        modulated = self.norm(x + x.mean(1, keepdim=True)) * (1 + self.scale(temb)[:, None])
        return x + self.mlp(modulated)


class PlainDenoiser(nn.Module):
    """Tokens in, tokens out, through a block list under an unusual name."""

    def __init__(self) -> None:
        """Build with torch's default weights."""
        super().__init__()
        self.embed = nn.Linear(CHANNELS, WIDTH)
        self.time = nn.Sequential(nn.Linear(2, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.stages = nn.ModuleList([Stage(index) for index in range(DEPTH)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CHANNELS)

    def forward(
        self, x: torch.Tensor, t: torch.Tensor, control: Sequence[torch.Tensor | None] | None = None
    ) -> torch.Tensor:
        """Predict for noisy tokens ``x`` ``[B, N, channels]`` at ``t`` ``[B]`` in [0, 1], 1 being noise.

        ``control[i]`` ``[B, N, C]``, where given, is added after stage ``i``.
        """
        temb = self.time(torch.stack([torch.sin(3 * t), torch.cos(3 * t)], dim=-1))
        x = self.embed(x)
        for index, stage in enumerate(self.stages):
            x = stage(x, temb, bias_index=index)
            if control is not None and control[index] is not None:
                x = x + control[index]
        return self.head(self.norm(x))


PLAIN = Case(
    name="plain",
    build=lambda: settle(PlainDenoiser()),
    inputs=lambda seed, batch: {"x": Draw(seed, batch)(TOKENS, CHANNELS)},
    time=lambda sigma, batch: {"t": torch.full((batch,), sigma)},
    stack=("stages",),
    control=lambda seed, batch: {"control": list(Draw(seed, batch)(DEPTH, TOKENS, WIDTH).unbind(1))},
)
