"""Passes whose every layer computes tokens of its own, and takes what the others gave from the step before."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from cachedit.text.layers import Layers
from cachedit.text.layouts.rotated import heads, replaced
from cachedit.text.slots import Pass, SlotCache
from cachedit.text.strategy import LayerPlan


class Features:
    """Keeps what attention and feed-forward of every layer gave, [B, S, C] each; the stream itself is always whole.

    Attributes:
        tokens: that the layers computed in the last pass, on average.
        last: tokens that the last layer computed in it [width].
    """

    last: torch.Tensor

    def __init__(self, layers: Layers) -> None:
        self.layers = layers
        self.kept: dict[tuple[str, int], torch.Tensor] = {}
        self.tokens = 0.0

    @property
    def bytes(self) -> int:
        """Bytes that are held."""
        return sum(x.nbytes for x in self.kept.values())

    @contextmanager
    def running(self, call: Pass, row: int, cache: SlotCache, plan: Callable[[int], LayerPlan]) -> Iterator[None]:
        """One pass over all tokens of one row, with the layers replaced."""
        self.tokens = 0.0
        functions = [
            functools.partial(self._layer, layer, number, call, row, cache, plan)
            for number, layer in enumerate(self.layers.each)
        ]
        with replaced(self.layers.each, "forward", functions):
            yield

    def _layer(
        self, layer: Any, number: int, call: Pass, row: int, cache: SlotCache, plan: Callable[[int], LayerPlan],
        /, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        assert position_embeddings is not None
        normed, width = layer.input_layernorm(hidden_states), call.width
        asked = plan(number)
        chosen = asked.compute[:width]
        if asked.count:
            chosen = chosen | self._turned(layer, number, normed, row, cache, asked)
        where, self.last = chosen.nonzero()[:, 0], chosen
        self.tokens += len(where) / len(self.layers.each)
        if len(where):
            cache.begin(replace(call, slots=where[None]))
            mask = None if attention_mask is None else attention_mask[:, :, where]
            angles = tuple(table[:, where] for table in position_embeddings)
            kwargs["position_ids"] = call.positions[:, where]
            attended = layer.self_attn(
                hidden_states=normed[:, where], attention_mask=mask, position_embeddings=angles, **kwargs
            )[0]
            self._put("attention", number, row, where, attended, cache.batch, width)
        stream = hidden_states + self.kept["attention", number][row : row + 1, :width]
        if len(where):
            fed = layer.mlp(layer.post_attention_layernorm(stream[:, where]))
            self._put("mlp", number, row, where, fed, cache.batch, width)
        return stream + self.kept["mlp", number][row : row + 1, :width]

    def _turned(
        self, layer: Any, number: int, normed: torch.Tensor, row: int, cache: SlotCache, asked: LayerPlan
    ) -> torch.Tensor:
        """The checked tokens whose values have turned most; the values of all checked ones are taken fresh."""
        where = asked.checked[: normed.shape[1]].nonzero()[:, 0]
        kept = cache.values[number]
        fresh = heads(layer.self_attn.v_proj(normed[:, where]), kept.shape[-1])[0]  # [H, M, D]
        before = kept[row][:, where]
        alike = functional.cosine_similarity(
            fresh.transpose(0, 1).flatten(1), before.transpose(0, 1).flatten(1), dim=-1
        )
        alike = alike.masked_fill(asked.compute[where], -2.0)
        kept[row].index_copy_(1, where, fresh)
        found = torch.zeros_like(asked.checked[: normed.shape[1]])
        found[where[alike.argsort(stable=True)[: asked.count]]] = True
        return found

    def _put(
        self, name: str, layer: int, row: int, where: torch.Tensor, fresh: torch.Tensor, batch: int, width: int
    ) -> None:
        kept = self.kept.get((name, layer))
        if kept is None or kept.shape[1] < width:
            grown = fresh.new_zeros(batch, width, fresh.shape[2])
            if kept is not None:
                grown[:, : kept.shape[1]] = kept
            kept = self.kept[name, layer] = grown
        kept[row].index_copy_(0, where, fresh[0])
