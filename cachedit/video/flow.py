"""Frames that a step leaves out, filled in from their neighbours along optical flow."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
import torch.nn.functional as F

from cachedit.video.sampling import Skipping

Flow = Callable[[int, int], torch.Tensor]
TOLERANCE = 0.5  # latent pixels by which a way there and back may miss its start


def flow_interpolation(flow: Flow, frames: Sequence[int], steps: Collection[int], scale: float = 1.0) -> Skipping:
    """Leave frames of a chunk out of early steps and warp them from their neighbours (FloED, arXiv 2412.00857).

    An approximation: it needs flow that is known beforehand, as in inpainting, where it is completed from the video.
    FloED has published no code for it; what stands here follows the paper's description.

    Args:
        flow: two frames of the chunk, ``a`` and ``b`` -> for every pixel of ``a`` how far to the right and down it is
            found in ``b``, [B or 1, 2, h, w] in pixels of that size.
        frames: numbers of the frames within the chunk that are left out; their neighbours are the nearest that are not.
        steps: steps that leave them out.
        scale: what the flow is multiplied by to be in latent pixels, besides what its size alone asks for.

    Returns:
        What ``skip_frames`` of a call takes.

    Raises:
        ValueError: a frame is named twice or has a number below 0.
    """
    absent = tuple(sorted(frames))
    if len(set(absent)) < len(absent) or any(frame < 0 for frame in absent):
        raise ValueError(f"got frames={list(frames)}; allowed: numbers of frames within a chunk, each once")

    def fill(clean: torch.Tensor, left_out: Sequence[int]) -> torch.Tensor:
        filled, kept = clean.clone(), [frame for frame in range(clean.shape[2]) if frame not in set(left_out)]
        for frame in left_out:
            before = max((other for other in kept if other < frame), default=None)
            after = min((other for other in kept if other > frame), default=None)
            found = [
                _warped(
                    clean[:, :, other],
                    _sized(flow(frame, other), clean, scale),
                    _sized(flow(other, frame), clean, scale),
                )
                for other in (before, after)
                if other is not None
            ]
            filled[:, :, frame] = _blended(found)
        return filled

    return Skipping(frames=lambda step: absent if step in steps else (), fill=fill)


def _sized(flow: torch.Tensor, latents: torch.Tensor, scale: float) -> torch.Tensor:
    """Flow at the size of the latents, in their pixels."""
    height, width = flow.shape[-2:]
    rows, columns = latents.shape[-2:]
    flow = F.interpolate(flow.to(latents), size=(rows, columns), mode="bilinear", align_corners=False)
    return flow * flow.new_tensor([columns / width, rows / height]).view(1, 2, 1, 1) * scale


def _warped(x: torch.Tensor, there: torch.Tensor, back: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A neighbour [B, C, H, W] as the frame sees it, and where it is seen, [B or 1, 1, H, W] of 0 and 1."""
    missed = there + _sampled(back, there)
    seen = (missed.norm(dim=1, keepdim=True) <= TOLERANCE) & _inside(there)
    return _sampled(x, there), seen.to(x.dtype)


def _blended(found: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The mean of the neighbours that see a pixel; of all where none does."""
    seen = torch.stack([seen for _, seen in found])
    weights = torch.where(seen.sum(0) > 0, seen, torch.ones_like(seen))
    return (torch.stack([x for x, _ in found]) * weights).sum(0) / weights.sum(0)


def _targets(flow: torch.Tensor) -> torch.Tensor:
    """Where every pixel goes, [B, 2, H, W]: column and row."""
    rows, columns = torch.meshgrid(*(torch.arange(n).to(flow) for n in flow.shape[-2:]), indexing="ij")
    return torch.stack([columns, rows]) + flow


def _inside(flow: torch.Tensor) -> torch.Tensor:
    height, width = flow.shape[-2:]
    column, row = _targets(flow).split(1, 1)
    return (column >= 0) & (column <= width - 1) & (row >= 0) & (row <= height - 1)


def _sampled(x: torch.Tensor, flow: torch.Tensor) -> torch.Tensor:
    """``x`` [B, C, H, W] read where the flow leads; beyond an edge it is what is at the edge."""
    height, width = x.shape[-2:]
    size = flow.new_tensor([max(width - 1, 1), max(height - 1, 1)]).view(1, 2, 1, 1)
    grid = (2 * _targets(flow) / size - 1).permute(0, 2, 3, 1)
    batch = max(x.shape[0], grid.shape[0])
    x, grid = x.expand(batch, -1, -1, -1), grid.expand(batch, -1, -1, -1)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=True)
