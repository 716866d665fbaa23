"""Attention processors of a stock Wan transformer: self-attention over a ring, cross-attention to kept text."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import torch
from torch import nn

from cachedit.kernels.registration import run_on
from cachedit.kernels.row_attention import Projected
from cachedit.kernels.row_attention import attend as attend_rows
from cachedit.processors import Processor, alone, attend
from cachedit.video.opening import Opening
from cachedit.video.ring import RollingKVCache


@dataclass
class Branch:
    """One guidance path of a video.

    embeds: text the model is given, [B, tokens, channels].
    cache:  keys and values of its frames.
    text:   keys and values of the text by layer, which depend on nothing else.
    """

    embeds: torch.Tensor
    cache: RollingKVCache
    text: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def prompt(self, embeds: torch.Tensor) -> None:
        """Give it other text."""
        self.embeds = embeds
        self.text.clear()


class Current:
    """The pass that the processors of a model are in; outside of one they are the model's own."""

    def __init__(self) -> None:
        self.branch: Branch | None = None
        self.opening: Opening | None = None
        self.writes = False  # the pass is there for what it writes; what the model predicts is not looked at
        self._lock = Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Current:
        return memo.setdefault(id(self), Current())

    @contextmanager
    def pass_over(self, branch: Branch, opening: Opening, writes: bool = False) -> Iterator[None]:
        """Inside, the model's forward is this pass.

        Raises:
            RuntimeError: another thread is in one.
        """
        with alone(self._lock, "video model"):
            try:
                self.branch, self.opening, self.writes = branch, opening, writes
                yield
            finally:
                self.branch, self.opening, self.writes = None, None, False


class RingSelfAttention(Processor[Current]):
    """Self-attention of the frames of a pass over the ring of the current branch."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: Any = None,
    ) -> torch.Tensor:
        """The model's own rotary embedding and mask are put aside: the ring knows the frames and who sees whom."""
        branch, opening = self.current.branch, self.current.opening
        if branch is None or opening is None:
            return self.stock(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)
        readings = branch.cache.read(self.layer, opening, _projected(attn, hidden_states))
        if self.current.writes and self.layer == branch.cache.layers - 1:
            for _ in readings:
                pass
            return hidden_states  # nothing follows that is kept
        backend = self._attention_backend
        attention = functools.partial(attend, backend=backend)
        found = [attend_rows(reading, attention, kernel=backend is None) for reading in readings]
        return _out(attn, found[0] if len(found) == 1 else torch.cat(found, 1))


class TextCrossAttention(Processor[Current]):
    """Cross-attention whose keys and values are computed once per prompt."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: Any = None,
    ) -> torch.Tensor:
        """The text itself is looked at only where it has not been before."""
        branch = self.current.branch
        if branch is None or encoder_hidden_states is None:
            return self.stock(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)
        if self.current.writes and self.layer == branch.cache.layers - 1:
            return hidden_states
        if self.layer not in branch.text:
            if getattr(attn, "fused_projections", False):
                k, v = attn.to_kv(encoder_hidden_states).chunk(2, dim=-1)
            else:
                k, v = attn.to_k(encoder_hidden_states), attn.to_v(encoder_hidden_states)
            branch.text[self.layer] = _heads(attn, attn.norm_k(k)), _heads(attn, v)
        q = _heads(attn, attn.norm_q(attn.to_q(hidden_states)))
        return _out(attn, attend(q, *branch.text[self.layer], self._attention_backend))


def _projected(attn: Any, x: torch.Tensor) -> Projected:
    if getattr(attn, "fused_projections", False):
        q, k, v = attn.to_qkv(x).chunk(3, dim=-1)
    else:
        q, k, v = attn.to_q(x), attn.to_k(x), attn.to_v(x)
    norms: tuple[Any, Any] = attn.norm_q, attn.norm_k
    if run_on(x) and all(_bare(norm, x) for norm in norms) and norms[0].eps == norms[1].eps:
        weights = {"q_norm": norms[0].weight, "k_norm": norms[1].weight, "eps": norms[0].eps}
    else:
        q, k, weights = norms[0](q), norms[1](k), {}
    return Projected(_heads(attn, q), _heads(attn, k), _heads(attn, v), **weights)


def _bare(norm: Any, x: torch.Tensor) -> bool:
    """Whether calling the norm does nothing but what its weight says: it is torch's, and nobody has hooked into it."""
    if type(norm) is not nn.RMSNorm or norm.eps is None or type(norm.weight) is not nn.Parameter:
        return False
    hooked = "forward" in vars(norm) or norm._forward_pre_hooks or norm._forward_hooks
    return not hooked and norm.weight.device == x.device


def _heads(attn: Any, x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(2, (attn.heads, -1))  # [B, N, H, D]


def _out(attn: Any, x: torch.Tensor) -> torch.Tensor:
    return attn.to_out[1](attn.to_out[0](x.flatten(2, 3)))
