"""Attention over runs of a cache's rows: one way in, to our kernels where they run and to plain torch elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from cachedit.kernels.kv_cache import KVCache
from cachedit.kernels.registration import run_on
from cachedit.kernels.rope_scatter_kv import rope_scatter_kv
from cachedit.kernels.spans import Span, load, store
from cachedit.kernels.subset_attention import Pair, few, subset_attention

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Projected(NamedTuple):
    """What the projections of a layer gave for some tokens, and what has to be done to it.

    Attributes:
        q: queries [B, N, H, D].
        k: keys [B, N, Hk, D].
        v: values [B, N, Hk, D].
        turn: complex numbers of length 1 [N, 1, D / 2] that rotate neighbouring channels of queries and keys; None
            rotates nothing.
        q_norm: weight of an RMSNorm over all heads of the queries before it, [H * D]; None norms nothing.
        k_norm: the same of the keys, [Hk * D].
        eps: of both norms.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    turn: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    eps: float = 1e-6

    def part(self, rows: slice) -> Projected:
        """Some of the tokens."""
        if rows == slice(0, self.q.shape[1]):
            return self
        turn = None if self.turn is None else self.turn[rows]
        return self._replace(q=self.q[:, rows], k=self.k[:, rows], v=self.v[:, rows], turn=turn)

    def normed(self) -> Projected:
        """The norms are done."""
        if self.q_norm is None and self.k_norm is None:
            return self
        q, k = _normed(self.q, self.q_norm, self.eps), _normed(self.k, self.k_norm, self.eps)
        return self._replace(q=q, k=k, q_norm=None, k_norm=None)

    def turned(self) -> Projected:
        """The norms and the rotation are done."""
        if run_on(self.q) and (self.turn is not None or self.q_norm is not None):
            rows = KVCache(*(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (self.k, self.v)))
            return Projected(keep(self, rows, [(0, self.k.shape[1])]), rows.k, self.v)
        done = self.normed()
        if self.turn is None:
            return done
        return done._replace(q=rotated(done.q, self.turn), k=rotated(done.k, self.turn), turn=None)


class Reading(NamedTuple):
    """What queries attend to.

    Attributes:
        q: normed and rotated [B, M, H, D].
        cache: of a layer.
        spans: its rows that are seen, by every query.
        fresh: keys and values [B, n, Hk, D] behind them; None for none.
    """

    q: torch.Tensor
    cache: KVCache
    spans: Sequence[Span] = ()
    fresh: Pair | None = None

    def gathered(self) -> Pair:
        """Keys and values [B, m, Hk, D]: a view where there is one run to read, copies of several."""
        parts = [load(self.cache, span, self.q.dtype) for span in self.spans]
        parts += [] if self.fresh is None else [self.fresh]
        keys, values = parts[0] if len(parts) == 1 else (torch.cat(x, 1) for x in zip(*parts, strict=True))
        return keys, values


def keep(given: Projected, cache: KVCache, spans: Sequence[Span]) -> torch.Tensor:
    """Norm and rotate, and write keys and values to the rows of ``spans`` in turn; gives the queries [B, N, H, D]."""
    if run_on(given.q) and cache.k.dtype in (given.q.dtype, torch.int8):
        cos, sin = (None, None) if given.turn is None else (given.turn.real[:, 0], given.turn.imag[:, 0])
        return rope_scatter_kv(
            given.q, given.k, given.v, cos, sin, _rows(spans, given.q.device), cache, q_norm=given.q_norm,
            k_norm=given.k_norm, eps=given.eps, interleaved=True,
        )  # fmt: skip
    done = given.turned()
    store(cache, spans, done.k, done.v)
    return done.q


def attend(reading: Reading, attention: Attention, kernel: bool = True) -> torch.Tensor:
    """What the queries read, [B, M, H, D].

    Our kernel reads int8 as it lies, and what few queries ask for; for the rest torch has the better ones.

    Args:
        reading: what is attended to.
        attention: torch's, of queries, keys and values [B, N, H, D].
        kernel: False leaves all of it to ``attention``.
    """
    q, cache, spans, fresh = reading
    direct = kernel and spans and run_on(q)
    if direct and (cache.k.dtype == torch.int8 or (cache.k.dtype == q.dtype and few(q, cache))):
        if len(spans) == 1:
            seen = slice(*spans[0])
            part = KVCache(*(None if x is None else x[:, seen] for x in cache))  # type: ignore[arg-type]
            return subset_attention(q, part, fresh=fresh)[0]
        return subset_attention(q, cache, slots=_rows(spans, q.device), fresh=fresh)[0]
    return attention(q, *reading.gathered())


def rotated(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of neighbouring channels of x [B, N, H, D] by complex numbers [N, 1, D / 2]; rounded once."""
    pairs = torch.view_as_complex(x.to(turn.dtype.to_real()).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)


def _normed(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    if weight is None:
        return x
    return functional.rms_norm(x.flatten(2), weight.shape, weight, eps).view(x.shape)


def _rows(spans: Sequence[Span], device: torch.device) -> torch.Tensor:
    """Numbers of the rows of some runs, integers [N]."""
    runs = [torch.arange(*span, dtype=torch.int32, device=device) for span in spans]
    return runs[0] if len(runs) == 1 else torch.cat(runs)
