"""The picture of an edit: its latents, and the tokens that a mask covers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F


def packed_latents(pipe: Any, layout: Any, image: Any, height: int, width: int) -> tuple[torch.Tensor, tuple[int, int]]:
    """An image as the tokens that the model sees.

    Args:
        pipe: a Flux or QwenImage pipeline.
        layout: of its model.
        image: whatever the pipeline's image processor takes, or latents [B, C, h, w], which are not encoded again.
        height, width: of the image in pixels.

    Returns:
        [B, N, C], and rows and columns of tokens.

    Raises:
        ValueError: an image, and no autoencoder to encode it.
    """
    channels = pipe.transformer.config.in_channels // 4
    if isinstance(image, torch.Tensor) and image.ndim == 4 and image.shape[1] == channels:
        latents = image
    elif pipe.vae is None:
        raise ValueError(f"got an image for a pipeline without vae; allowed: latents [B, {channels}, h, w]")
    else:
        pixels = pipe.image_processor.preprocess(image, height=height, width=width)
        with torch.no_grad():
            latents = layout.encoded(pipe, pixels.to(pipe._execution_device, pipe.vae.dtype))
    batch, _, rows, columns = latents.shape
    packed = pipe._pack_latents(latents.contiguous(), batch, channels, rows, columns)
    return packed.to(pipe._execution_device), (rows // 2, columns // 2)


def foreground(mask: Any, grid: tuple[int, int]) -> torch.Tensor:
    """Tokens that are covered by a mask, if only by one of their pixels.

    Args:
        mask: a PIL image, an array or a tensor, [H, W] or with leading axes of size 1; more than half of the largest
            value of its type (1 for floats) is covered.
        grid: rows and columns of tokens.

    Returns:
        Rows of the covered tokens in ascending order.

    Raises:
        ValueError: a mask of another shape, or one that covers nothing.
    """
    given = mask if isinstance(mask, torch.Tensor) else torch.from_numpy(np.array(_grey(mask)))
    shape = tuple(given.shape)
    while given.ndim > 2 and given.shape[0] == 1:
        given = given[0]
    if given.ndim != 2:
        raise ValueError(f"got a mask of shape {shape}; allowed: [H, W], or with leading axes of size 1")
    covered = given > (127 if given.dtype == torch.uint8 else 0.5)
    rows = F.adaptive_max_pool2d(covered[None, None].float(), grid).flatten().nonzero().flatten()
    if len(rows) == 0:
        raise ValueError("got a mask that covers nothing; allowed: one that is white somewhere.")
    return rows.cpu()


def _grey(mask: Any) -> Any:
    return mask.convert("L") if hasattr(mask, "convert") else mask
