"""A stock Wan transformer that is called a few frames at a time and attends to those before through a ring."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from cachedit.errors import UnsupportedModelError
from cachedit.video.processors import Branch, Current, RingSelfAttention, TextCrossAttention
from cachedit.video.ring import RollingKVCache


class CausalNetwork:
    """Calls of a Wan transformer over a rolling window.

    Args:
        model: a ``WanTransformer3DModel``, or a SkyReels-V2 one; nothing of it is changed but its processors.
        current: what the processors look at; a new one by default.
    """

    def __init__(self, model: nn.Module, current: Current | None = None) -> None:
        check_model(model)
        self.model: Any = model
        self.current = current or Current()
        self.dtype: torch.dtype = cast(Any, model).dtype  # asked for once, as diffusers walks over all modules for it

    @contextmanager
    def attached(self) -> Iterator[CausalNetwork]:
        """The processors are on the model inside."""
        attach(self.model, self.current)
        try:
            yield self
        finally:
            detach(self.model)

    def grid(self, latents: Sequence[int]) -> tuple[int, int]:
        """Rows and columns of tokens in a frame of latents of that shape."""
        _, rows, columns = self.model.config.patch_size
        return latents[-2] // rows, latents[-1] // columns

    def cache(self, latents: Sequence[int], **options: Any) -> RollingKVCache:
        """An empty ring for latents of shape [B, C, F, H, W]; options are those of ``RollingKVCache``."""
        config = self.model.config
        weight = next(iter(self.model.parameters()))
        options = {"batch": latents[0], "dtype": self.dtype, "device": weight.device} | options
        sizes = (config.num_layers, config.num_attention_heads, config.attention_head_dim)
        return RollingKVCache(*sizes, self.grid(latents), **options)

    @torch.no_grad()
    def __call__(
        self,
        branches: Branch | Sequence[Branch],
        latents: torch.Tensor,
        timesteps: float | Sequence[float],
        blocks: Sequence[int] | None = None,
        commit: int = 0,
        guidance: float = 1.0,
        left_out: Sequence[int] = (),
        writes: bool = False,
    ) -> torch.Tensor:
        """One pass over the frames that follow the committed ones.

        Args:
            branches: text and ring of the prompt, and perhaps those of the negative prompt.
            latents: of the frames, [B, C, F, H, W].
            timesteps: one for all frames, or one per frame.
            blocks: frames of each block, which see each other and all before; one block by default.
            commit: how many leading blocks become final, in all branches or, after an error, in none.
            guidance: scale of classifier-free guidance, with two branches.
            writes: True if only what is committed counts: the last layer does nothing but write, and what is
                returned means nothing.
            left_out: frames of the one open block, counted from its first, that are not in ``latents``.

        Returns:
            What the model predicts, of the shape and dtype of ``latents``.

        Raises:
            ValueError: a block does not fit into the ring.
        """
        both = [branches] if isinstance(branches, Branch) else list(branches)
        timestep, found, passes = self._timestep(latents, timesteps), [], []
        for branch in both:
            opening = branch.cache.open(blocks or [latents.shape[2] + len(left_out)], commit, left_out)
            passes.append(opening)
            with self.current.pass_over(branch, opening, writes):
                found.append(
                    self.model(
                        hidden_states=latents.to(self.dtype),
                        timestep=timestep,
                        encoder_hidden_states=branch.embeds,
                        return_dict=False,
                    )[0].to(latents.dtype)
                )
        for branch, opening in zip(both, passes, strict=True):
            branch.cache.close(opening)
        return found[0] if len(found) == 1 else found[1] + guidance * (found[0] - found[1])

    def _timestep(self, latents: torch.Tensor, timesteps: float | Sequence[float]) -> torch.Tensor:
        """[B] where all frames share it, which keeps the modulation small; else one per token, [B, F * tokens]."""
        batch, frames = latents.shape[0], latents.shape[2]
        each = [float(timesteps)] * frames if isinstance(timesteps, (int, float)) else [float(t) for t in timesteps]
        dtype = torch.promote_types(self.dtype, torch.float32)
        if len(set(each)) == 1:
            return torch.full((batch,), each[0], dtype=dtype, device=latents.device)
        rows, columns = self.grid(latents.shape)
        by_token = torch.tensor(each, dtype=dtype, device=latents.device).repeat_interleave(rows * columns)
        return by_token.expand(batch, -1)


def check_model(model: Any) -> None:
    """Refuse a model whose attention cannot be taken over.

    Raises:
        UnsupportedModelError: with the reason.
    """
    name = type(model).__name__
    if name not in ("WanTransformer3DModel", "SkyReelsV2Transformer3DModel"):
        raise UnsupportedModelError(
            f"{name} cannot be rolled out over a ring of frames. Allowed: WanTransformer3DModel and "
            "SkyReelsV2Transformer3DModel."
        )
    config = model.config
    if config.patch_size[0] != 1 or config.added_kv_proj_dim is not None:
        raise UnsupportedModelError(
            f"{name} has patches of {config.patch_size[0]} frames and added_kv_proj_dim={config.added_kv_proj_dim}; "
            "allowed: patches of one frame, and no image cross-attention. Take the text-to-video model, and start "
            "from an image with image=."
        )


def attach(model: Any, current: Current) -> None:
    """Put our processors on every block; those that were there are kept in them."""
    for layer, block in enumerate(model.blocks):
        block.attn1.set_processor(RingSelfAttention(current, layer, block.attn1.processor))
        block.attn2.set_processor(TextCrossAttention(current, layer, block.attn2.processor))


def detach(model: Any) -> None:
    """Give the blocks back the processors they had."""
    for block in model.blocks:
        for attn in (block.attn1, block.attn2):
            if isinstance(attn.processor, (RingSelfAttention, TextCrossAttention)):
                attn.set_processor(attn.processor.stock)
