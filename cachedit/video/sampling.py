"""How the latents of a chunk are made: a few steps on one chunk, or a wave of steps over several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cachedit.video.noise import Noise
from cachedit.video.presets import Preset

Predict = Callable[..., torch.Tensor]  # latents, one timestep per frame, perhaps frames left out -> velocity
Between = Callable[[int, float, torch.Tensor], None]  # step, timestep, latents


@dataclass(frozen=True)
class Skipping:
    """Frames of a chunk that some steps leave out and fill in from the others (as FloED does, arXiv 2412.00857).

    frames: step -> numbers of the frames within the chunk that it leaves out, never all.
    fill:   estimates of the clean latents [B, C, n, H, W], and those numbers -> the estimates with these filled in.
    """

    frames: Callable[[int], Sequence[int]]
    fill: Callable[[torch.Tensor, Sequence[int]], torch.Tensor]


def few_steps(
    preset: Preset,
    noise: Noise,
    start: torch.Tensor,
    predict: Predict,
    between: Between | None = None,
    skip: int = 0,
    skipping: Skipping | None = None,
) -> torch.Tensor:
    """Clean latents of a chunk: estimate them, add fresh noise of the next level, and again (Self Forcing, CausVid).

    Args:
        preset: noise levels and timesteps.
        noise: where the fresh noise comes from.
        start: latents at the first level, [B, C, n, H, W].
        predict: the model.
        between: called after every step.
        skip: leading steps that are left out.
        skipping: frames that steps leave out.
    """
    x, count = start, start.shape[2]
    levels = list(zip(preset.sigmas, preset.timesteps, strict=True))[skip:]
    for step, (sigma, timestep) in enumerate(levels):
        absent = skipping.frames(skip + step) if skipping is not None else ()
        if skipping is not None and absent:
            kept = [frame for frame in range(count) if frame not in set(absent)]
            clean = x.clone()
            clean[:, :, kept] -= sigma * predict(x[:, :, kept], [timestep] * len(kept), tuple(absent))
            x = skipping.fill(clean, absent)
        else:
            x = x - sigma * predict(x, [timestep] * count)
        if step + 1 < len(levels):
            x = noised(x, levels[step + 1][0], noise)
        if between is not None:
            between(skip + step, timestep, x)
    return x


def noised(x: torch.Tensor, sigma: float, noise: Noise) -> torch.Tensor:
    """Latents with fresh noise of a level in [0, 1]."""
    return x if sigma == 0 else (1 - sigma) * x + sigma * noise.draw(x.shape)


class Wave:
    """Chunks in the making, each one step behind the one before it (Rolling Forcing, arXiv 2509.25161).

    Every pass takes all of them one step further; they attend to each other in both directions.
    """

    def __init__(self, preset: Preset) -> None:
        self.preset = preset
        self.chunks: list[torch.Tensor] = []
        self.steps: list[int] = []

    def advance(
        self,
        fresh: Callable[[int], torch.Tensor | None],
        noise: Noise,
        predict: Predict,
        between: Between | None = None,
    ) -> torch.Tensor:
        """Passes until the first chunk is clean, which is returned; ``fresh`` gives the noise of the k-th open chunk.

        Nothing is changed where a pass fails.
        """
        sigmas, times = self.preset.sigmas, self.preset.timesteps
        chunks, steps = list(self.chunks), list(self.steps)
        while True:
            added = fresh(len(chunks)) if len(chunks) < len(sigmas) else None
            if added is not None:
                chunks, steps = [*chunks, added], [*steps, 0]
            x = torch.cat(chunks, 2)
            velocity = predict(
                x, [times[k] for k, part in zip(steps, chunks, strict=True) for _ in range(part.shape[2])]
            )
            parts = velocity.split([part.shape[2] for part in chunks], 2)
            clean = [part - sigmas[k] * v for part, k, v in zip(chunks, steps, parts, strict=True)]
            steps = [k + 1 for k in steps]
            done = clean.pop(0) if steps[0] == len(sigmas) else None
            if done is not None:
                steps.pop(0)
            chunks = [noised(part, sigmas[k], noise) for part, k in zip(clean, steps, strict=True)]
            if between is not None:
                between(len(sigmas) - 1 if done is not None else steps[0] - 1, times[-1], x)
            if done is not None:
                self.chunks, self.steps = chunks, steps
                return done

    def state_dict(self) -> dict[str, Any]:
        """The chunks in the making."""
        return {"chunks": [x.clone() for x in self.chunks], "steps": list(self.steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where ``state`` was taken."""
        self.chunks, self.steps = list(state["chunks"]), list(state["steps"])
