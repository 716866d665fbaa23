"""Tiny language models of every layout that a text cache knows, with random weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import cachedit
from cachedit.text.caching import CachedModel

VOCABULARY, MASK = 97, 96
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}


def llama(dtype: torch.dtype = torch.float64, **changed: Any) -> nn.Module:
    """Llama with grouped queries; it has full attention because its configuration says so."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZES, "num_key_value_heads": 2, **changed})
    config.is_causal = False
    config.mask_token_id = MASK
    return LlamaForCausalLM(config).to(dtype).eval()


def causal_llama(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Llama whose configuration says nothing, so that its own mask would be causal."""
    model: Any = llama(dtype)
    del model.config.is_causal
    return model


def qwen(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Qwen3: grouped queries, with norms on queries and keys."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16)
    config.is_causal = False
    config.mask_token_id = MASK
    return Qwen3ForCausalLM(config).to(dtype).eval()


def eurobert(dtype: torch.dtype = torch.float64) -> nn.Module:
    """EuroBert, bidirectional by itself."""
    from transformers import EuroBertConfig, EuroBertForMaskedLM

    torch.manual_seed(0)
    config = EuroBertConfig(**SIZES, num_key_value_heads=4)
    config.mask_token_id = MASK
    return EuroBertForMaskedLM(config).to(dtype).eval()


class Rotary(nn.Module):
    """Tables of angles, as both layouts of remote code ask for them."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.rates = 1e4 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)

    def tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions[..., None] * self.rates
        angles = torch.cat([angles, angles], -1)
        return angles.cos(), angles.sin()

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [B, S, D] in the dtype of ``x``: Dream's way."""
        cos, sin = self.tables(positions)
        return cos.to(x.dtype), sin.to(x.dtype)

    def get_rotary_embedding(self, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Sines and cosines [1, 1, S, D] of all positions: LLaDA's way."""
        cos, sin = self.tables(torch.arange(length, device=device))
        return sin[None, None], cos[None, None]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat(
        [
            a * cos[..., : a.shape[-1]] - b * sin[..., : a.shape[-1]],
            b * cos[..., : a.shape[-1]] + a * sin[..., : a.shape[-1]],
        ],
        -1,
    )


class LLaDABlock(nn.Module):
    """A block in the layout of LLaDA's remote code; its attention sees no mask."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(n_heads=heads, rope_full_precision=True)
        self.attn_norm, self.ff_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.q_proj, self.k_proj, self.v_proj, self.attn_out = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.ff_proj, self.ff_out = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.rotary_emb = Rotary(dim // heads)

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention_bias: Any = None, layer_past: Any = None,
        use_cache: bool = False,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        q, k, v = (x.unflatten(-1, (self.config.n_heads, -1)).transpose(1, 2) for x in (q, k, v))
        sin, cos = self.rotary_emb.get_rotary_embedding(q.shape[2], q.device)
        found = functional.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.attn_out(found.transpose(1, 2).flatten(2)), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.attn_norm(x)
        attended, _ = self.attention(
            self.q_proj(normed), self.k_proj(normed), self.v_proj(normed), None, layer_past=None
        )
        x = x + attended
        return x + self.ff_out(functional.silu(self.ff_proj(self.ff_norm(x))))


class DreamAttention(nn.Module):
    """Self-attention in the layout of Dream's remote code."""

    def __init__(self, dim: int, heads: int, groups: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.q_proj, self.o_proj = nn.Linear(dim, dim), nn.Linear(dim, dim, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(dim, groups * self.head_dim) for _ in range(2))
        self.rotary_emb = Rotary(self.head_dim)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any = None, position_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, None, None]:
        q, k, v = (
            projection(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        assert position_ids is not None
        cos, sin = (table[:, None] for table in self.rotary_emb(v, position_ids))
        found = functional.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, enable_gqa=True)
        return self.o_proj(found.transpose(1, 2).flatten(2)), None, None


class DreamLayer(nn.Module):
    """Attention and feed-forward."""

    def __init__(self, dim: int, heads: int, groups: int) -> None:
        super().__init__()
        self.self_attn = DreamAttention(dim, heads, groups)
        self.norms = nn.ModuleList(nn.RMSNorm(dim) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.norms[0](x), "full", position_ids=position_ids)[0]
        return x + self.mlp(self.norms[1](x))


class FusedAttention(nn.Module):
    """Self-attention in the layout of LLaDA2's remote code: one projection, norms, and half of the channels rotated."""

    def __init__(self, dim: int, heads: int, groups: int, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.is_causal, self.heads, self.groups = layer_idx, False, heads, groups
        self.head_dim = dim // heads
        self.query_key_value = nn.Linear(dim, (heads + 2 * groups) * self.head_dim, bias=False)
        self.query_layernorm, self.key_layernorm = nn.RMSNorm(self.head_dim), nn.RMSNorm(self.head_dim)
        self.dense = nn.Linear(dim, dim, bias=False)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, past_key_value: Any = None,
        position_embeddings: Any = None,
    ) -> tuple[torch.Tensor, Any]:  # fmt: skip
        fused = self.query_key_value(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = fused.split([self.heads, self.groups, self.groups], 1)
        q, k = self.query_layernorm(q), self.key_layernorm(k)
        q, k = (self.half_rotated(x, *position_embeddings) for x in (q, k))
        read = k.shape[2]
        if past_key_value is not None:
            read += past_key_value.get_seq_length(self.layer_idx)
            k, v = past_key_value.update(k, v, self.layer_idx, {"position_embeddings": position_embeddings})
        if attention_mask is not None and attention_mask.shape != (len(q), 1, q.shape[2], read):
            raise ValueError(f"a mask {list(attention_mask.shape)} for {q.shape[2]} tokens that read {read}")
        found = functional.scaled_dot_product_attention(q, k, v, attention_mask, enable_gqa=True)
        return self.dense(found.transpose(1, 2).flatten(2)), past_key_value

    @staticmethod
    def half_rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        turned, kept = x.chunk(2, -1)
        return torch.cat([rotate(turned, cos, sin), kept], -1)


class LLaDA2(nn.Module):
    """A language model in the layout of LLaDA2's remote code; from a mask of two dimensions it makes a full one."""

    def __init__(self, dim: int = 32, heads: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.config = SimpleNamespace(mask_token_id=MASK)
        self.word_embeddings, self.rotary_emb = nn.Embedding(VOCABULARY, dim), Rotary(dim // heads // 2)
        self.norms = nn.ModuleList(nn.RMSNorm(dim) for _ in range(2 * layers))
        self.attentions = nn.ModuleList(FusedAttention(dim, heads, 2, layer) for layer in range(layers))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim)) for _ in range(layers)
        )
        self.lm_head = nn.Linear(dim, VOCABULARY, bias=False)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, position_ids: Any = None,
        past_key_values: Any = None, use_cache: bool = False,
    ) -> SimpleNamespace:  # fmt: skip
        x = self.word_embeddings(input_ids)
        if attention_mask is not None and attention_mask.ndim == 2:
            hidden = (attention_mask == 0)[:, None, None].expand(-1, 1, x.shape[1], -1)
            attention_mask = torch.zeros_like(hidden, dtype=x.dtype).masked_fill(hidden, torch.finfo(x.dtype).min)
        if position_ids is None:
            position_ids = torch.arange(x.shape[1]).expand(len(x), -1)
        angles = tuple(table[:, None] for table in self.rotary_emb(x, position_ids))
        for layer, (attention, mlp) in enumerate(zip(self.attentions, self.mlps, strict=True)):
            x = x + attention(self.norms[2 * layer](x), attention_mask, past_key_values, angles)[0]
            x = x + mlp(self.norms[2 * layer + 1](x))
        return SimpleNamespace(logits=self.lm_head(x))


class Stacked(nn.Module):
    """Embedding, blocks and head around the blocks of a layout."""

    def __init__(self, blocks: list[nn.Module], dim: int = 32) -> None:
        super().__init__()
        self.config = SimpleNamespace(mask_token_id=MASK)
        self.embedding, self.head = nn.Embedding(VOCABULARY, dim), nn.Linear(dim, VOCABULARY, bias=False)
        self.blocks = nn.ModuleList(blocks)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: Any = None, position_ids: torch.Tensor | None = None
    ) -> SimpleNamespace:
        x = self.embedding(input_ids)
        for block in self.blocks:
            if isinstance(block, DreamLayer):
                order = torch.arange(x.shape[1]).expand(len(x), -1)
                x = block(x, order if position_ids is None else position_ids)
            else:
                x = block(x)
        return SimpleNamespace(logits=self.head(x))


def llada(dtype: torch.dtype = torch.float64) -> nn.Module:
    """The layout of LLaDA."""
    torch.manual_seed(0)
    return Stacked([LLaDABlock(32, 4) for _ in range(3)]).to(dtype).eval()


def dream(dtype: torch.dtype = torch.float64) -> nn.Module:
    """The layout of Dream, with grouped queries; the logits are for the next token."""
    torch.manual_seed(0)
    return Stacked([DreamLayer(32, 4, 2) for _ in range(3)]).to(dtype).eval()


def llada2(dtype: torch.dtype = torch.float64) -> nn.Module:
    """The layout of LLaDA2, which is known to be block-causal."""
    torch.manual_seed(0)
    return LLaDA2().to(dtype).eval()


class BlockCausal(nn.Module):
    """A language model that is block-causal by itself when it gets a plain mask, as LLaDA2 is."""

    def __init__(self, model: Any, block_length: int) -> None:
        super().__init__()
        self.lm, self.block_length, self.config = model, block_length, model.config
        self.tokens = 0

    @property
    def dtype(self) -> torch.dtype:
        return self.lm.dtype

    @property
    def device(self) -> torch.device:
        return self.lm.device

    def forward(
        self, input_ids: torch.Tensor, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any
    ) -> Any:
        self.tokens += input_ids.numel()
        if attention_mask is not None and attention_mask.ndim == 2:
            order = torch.arange(input_ids.shape[1])
            visible = (order[None] // self.block_length <= order[:, None] // self.block_length)[None]
            visible = visible & attention_mask.bool()[:, None]
            visible = visible | (~visible.any(-1, keepdim=True) & (order[None] == order[:, None]))
            attention_mask = visible[:, None]
        return self.lm(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama, "causal_llama": causal_llama, "qwen": qwen, "eurobert": eurobert, "llada": llada, "dream": dream,
    "llada2": llada2,
}  # fmt: skip


@functools.cache
def model(name: str) -> nn.Module:
    """One model of a layout in fp64; tests leave it as they find it."""
    return MODELS[name]()


def prompts(rows: int, length: int, seed: int = 1) -> torch.Tensor:
    """Random token ids, none of them the mask."""
    return torch.randint(1, MASK, (rows, length), generator=torch.Generator().manual_seed(seed))


def stepwise(model: Any, prompt: torch.Tensor, strategy: Any, **options: Any) -> list[torch.Tensor]:
    """Logits of the tokens asked for, step by step, and the tokens at the end."""
    found: list[torch.Tensor] = []
    step = CachedModel.step

    def noted(self: CachedModel, *arguments: Any) -> Any:
        one = step(self, *arguments)
        found.append(one.logits)
        return one

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CachedModel, "step", noted)
        tokens = cachedit.generate(model, prompt, strategy, **options)
    return [*found, tokens]
