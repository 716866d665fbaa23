"""Attention processors of stock Flux and QwenImage transformers that write and read banks of condition tokens."""

from __future__ import annotations

from typing import Any

import torch

from cachedit.conditions.passes import Current, Pass, attended
from cachedit.errors import UnsupportedModelError
from cachedit.processors import Processor

Output = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class JointAttention(Processor[Current]):
    """Attention of text and image tokens; ``layer`` is its number in the banks."""


class FluxJointAttention(JointAttention):
    """Attention of Flux's blocks with two streams and, without ``encoder_hidden_states``, of those with one."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Output:
        """Image tokens, and text tokens where they came apart."""
        from diffusers.models.embeddings import apply_rotary_emb

        now = self.current.now
        if now is None:
            return self.stock(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
        fused = attn.to_qkv if attn.fused_projections else None
        q, k, v = _heads(attn.head_dim, *_projected(hidden_states, fused, attn.to_q, attn.to_k, attn.to_v))
        q, k = attn.norm_q(q), attn.norm_k(k)
        if encoder_hidden_states is not None:
            now.text = encoder_hidden_states.shape[1]
            fused = attn.to_added_qkv if attn.fused_projections else None
            added = _projected(encoder_hidden_states, fused, attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
            text_q, text_k, text_v = _heads(attn.head_dim, *added)
            q = torch.cat([attn.norm_added_q(text_q), q], 1)
            k = torch.cat([attn.norm_added_k(text_k), k], 1)
            v = torch.cat([text_v, v], 1)
        if image_rotary_emb is not None:
            q = apply_rotary_emb(q, image_rotary_emb, sequence_dim=1)
            k = apply_rotary_emb(k, image_rotary_emb, sequence_dim=1)
        x = attended(now, self.layer, q, k, v, attention_mask, self._attention_backend).flatten(2)
        return x if encoder_hidden_states is None else _split(attn, now, x)


class QwenJointAttention(JointAttention):
    """Attention of QwenImage's blocks, whose image positions are those of whole grids."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_hidden_states_mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Output:
        """Image tokens and text tokens."""
        from diffusers.models.transformers.transformer_qwenimage import apply_rotary_emb_qwen

        now = self.current.now
        if now is None:
            return self.stock(
                attn, hidden_states, encoder_hidden_states, encoder_hidden_states_mask, attention_mask, image_rotary_emb
            )
        now.text = encoder_hidden_states.shape[1]
        dim = attn.inner_dim // attn.heads
        q, k, v = _heads(dim, *_projected(hidden_states, None, attn.to_q, attn.to_k, attn.to_v))
        added = _projected(encoder_hidden_states, None, attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        text_q, text_k, text_v = _heads(dim, *added)
        q, k = _normed(attn.norm_q, q), _normed(attn.norm_k, k)
        text_q, text_k = _normed(attn.norm_added_q, text_q), _normed(attn.norm_added_k, text_k)
        if image_rotary_emb is not None:
            image, text = image_rotary_emb
            if now.into is not None:
                now.text_positions = text
            elif now.text_positions is not None:
                text = now.text_positions
            image = image if now.rows is None else image[now.rows.to(image.device)]
            q, k = (apply_rotary_emb_qwen(x, image, use_real=False) for x in (q, k))
            text_q, text_k = (apply_rotary_emb_qwen(x, text, use_real=False) for x in (text_q, text_k))
        mask = _mask(encoder_hidden_states_mask, hidden_states)
        q, k, v = torch.cat([text_q, q], 1), torch.cat([text_k, k], 1), torch.cat([text_v, v], 1)
        return _split(attn, now, attended(now, self.layer, q, k, v, mask, self._attention_backend).flatten(2))


_KNOWN = {
    "FluxTransformer2DModel": ("FluxAttnProcessor", FluxJointAttention),
    "QwenImageTransformer2DModel": ("QwenDoubleStreamAttnProcessor2_0", QwenJointAttention),
}


def check_model(model: Any) -> None:
    """Refuse a model whose attention cannot be taken over.

    Raises:
        UnsupportedModelError: with the reason.
    """
    name = type(model).__name__
    if name not in _KNOWN:
        raise UnsupportedModelError(
            f"{name} cannot attend to a bank of condition tokens. Allowed: {', '.join(_KNOWN)}."
        )
    expected = _KNOWN[name][0]
    for attn in _attentions(model):
        found = attn.processor.stock if isinstance(attn.processor, JointAttention) else attn.processor
        if type(found).__name__ != expected:
            raise UnsupportedModelError(
                f"{name} has attention processors of type {type(found).__name__}; allowed: {expected}. Unload what "
                "put them there, such as an IP adapter."
            )


def count_layers(model: Any) -> int:
    """Layers that a bank of this model has."""
    return len(_attentions(model))


def attach(model: Any, current: Current) -> None:
    """Put our processors on every block; those that were there are kept in them."""
    processor = _KNOWN[type(model).__name__][1]
    for layer, attn in enumerate(_attentions(model)):
        attn.set_processor(processor(current, layer, attn.processor))


def detach(model: Any) -> None:
    """Give the blocks back the processors they had."""
    for attn in _attentions(model):
        if isinstance(attn.processor, JointAttention):
            attn.set_processor(attn.processor.stock)


def _attentions(model: Any) -> list[Any]:
    return [block.attn for block in (*model.transformer_blocks, *getattr(model, "single_transformer_blocks", ()))]


def _projected(x: torch.Tensor, fused: Any, to_q: Any, to_k: Any, to_v: Any) -> tuple[torch.Tensor, ...]:
    return fused(x).chunk(3, dim=-1) if fused is not None else (to_q(x), to_k(x), to_v(x))


def _heads(dim: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(x.unflatten(-1, (-1, dim)) for x in tensors)  # [B, N, H, D]


def _normed(norm: Any, x: torch.Tensor) -> torch.Tensor:
    return x if norm is None else norm(x)


def _mask(text: torch.Tensor | None, image: torch.Tensor) -> torch.Tensor | None:
    """A mask of the text's padding as one of all tokens, [B, 1, 1, N]."""
    if text is None:
        return None
    seen = torch.ones(image.shape[:2], dtype=torch.bool, device=image.device)
    return torch.cat([text.bool(), seen], 1)[:, None, None]


def _split(attn: Any, now: Pass, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    image = attn.to_out[1](attn.to_out[0](x[:, now.text :]))
    return image, attn.to_add_out(x[:, : now.text])
