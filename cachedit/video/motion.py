"""AnimateDiff's motion modules on a few frames at a time, which attend to those before through rings."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from cachedit.disguise import disguised
from cachedit.errors import UnsupportedModelError
from cachedit.processors import Processor, alone
from cachedit.video.places import Places

ATTRIBUTE = "_cachedit_motion"
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Ring:
    """Keys and values of one denoising step by layer, [h * w, window, C], without positions; and frames so far."""

    frames: int = 0
    layers: dict[int, Pair] = field(default_factory=dict)


class Current:
    """The pass that the processors are in: one ring for every sample; none outside of one."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.rings: list[Ring] = []
        self._lock = Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Current:
        return memo.setdefault(id(self), Current(self.places))

    @contextmanager
    def during(self, rings: list[Ring]) -> Iterator[None]:
        """Inside, the model's forward is a pass over these rings.

        Raises:
            RuntimeError: another thread is in one.
        """
        with alone(self._lock, "motion model"):
            try:
                self.rings = rings
                yield
            finally:
                self.rings = []


class MotionStream:
    """A motion UNet that is called with the newest frames alone (Live2Diff, arXiv 2407.08701).

    The frames of a call see each other and, in the temporal attention, the first ``sink`` and the last frames of the
    same denoising step. Every step has a ring of its own, so no pass is made to commit a frame. Positions count from
    the oldest frame that is seen and are added where the ring is read: as the projections are linear,
    W(x + p) = Wx + Wp, and nothing that is kept is moved or computed anew.

    The model must have been made causal in time, as Live2Diff's was. One frame per call is what it is made for; the
    frames of a longer call share the statistics of the modules' group norm.

    Args:
        unet: a ``UNetMotionModel``; nothing but the processors of its motion modules is changed.
        window: frames that are seen, the sink and those of the call included.
        sink: leading frames that are seen forever.

    Raises:
        UnsupportedModelError: another model, or one with other processors.
        ValueError: a window that the positions do not reach, or that the sink fills.
    """

    def __init__(self, unet: nn.Module, window: int = 16, sink: int = 8) -> None:
        self.unet: Any = unet
        self._blocks = _motion_blocks(unet)
        most = min(block.pos_embed.pe.shape[1] for block in self._blocks)
        if not 0 <= sink < window <= most:
            raise ValueError(
                f"got a window of {window} frames with a sink of {sink}; allowed: a window up to {most}, the positions "
                "of the motion modules, and a smaller sink"
            )
        self._current = Current(Places(sink, window - sink))
        self._rings: dict[Hashable, Ring] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all rings."""
        pairs = (pair for ring in self._rings.values() for pair in ring.layers.values())
        return sum(x.numel() * x.element_size() for pair in pairs for x in pair)

    def reset(self) -> None:
        """Forget every frame."""
        self._rings.clear()

    @contextmanager
    def attached(self) -> Iterator[MotionStream]:
        """The processors are on the model inside."""
        try:
            for layer, attn in enumerate(_attentions(self._blocks)):
                positions = self._blocks[layer // 2].pos_embed
                attn.set_processor(RingTemporalAttention(self._current, layer, attn.processor, positions))
            for block in self._blocks:
                block.pos_embed.__dict__[ATTRIBUTE] = self._current
                block.pos_embed.__class__ = _left_to_the_ring(cast(Any, type(block.pos_embed)))
            yield self
        finally:
            for attn in _attentions(self._blocks):
                if isinstance(attn.processor, RingTemporalAttention):
                    attn.set_processor(attn.processor.stock)
            for block in self._blocks:
                if block.pos_embed.__dict__.pop(ATTRIBUTE, None) is not None:
                    block.pos_embed.__class__ = cast(Any, type(block.pos_embed).__base__)

    @torch.no_grad()
    def __call__(self, steps: Sequence[Hashable], sample: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        """What the model predicts for the newest frames.

        Args:
            steps: of every sample its denoising step, or anything that names a ring, such as ("uncond", 3). Samples
                may be at different steps, each on the frame that it has come to.
            sample: latents [B, C, n, h, w] of the frames that follow those of the last call with the same step.
            *arguments, **named: of the model's forward.

        Returns:
            Of the shape of ``sample``. Where the call fails it can be made again.

        Raises:
            ValueError: not one step for each sample, one twice, or more frames than fit beside the sink.
        """
        room = self._current.places.ring
        if len(set(steps)) != len(steps) or len(steps) != sample.shape[0] or sample.shape[2] > room:
            raise ValueError(
                f"got steps {list(steps)} for {sample.shape[0]} samples of {sample.shape[2]} frames; allowed: one step "
                f"for each sample, none twice, and up to {room} frames"
            )
        rings = [self._rings.setdefault(step, Ring()) for step in steps]
        with self._current.during(rings):
            found = self.unet(sample, *arguments, **{**named, "return_dict": False})[0]
        for ring in rings:
            ring.frames += sample.shape[2]
        return found


class RingTemporalAttention(Processor[Current]):
    """Attention of the frames of one place over those before; ``positions`` is the block's embedding of them."""

    def __init__(self, current: Current, layer: int, stock: Any, positions: Any) -> None:
        super().__init__(current, layer, stock)
        self.positions = positions

    def __call__(
        self, attn: Any, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor | None = None, **named: Any
    ) -> torch.Tensor:
        """Frames [B * h * w, n, C] without positions."""
        rings = self.current.rings
        if not rings:
            return self.stock(attn, hidden_states, encoder_hidden_states, **named)
        q, k, v = (to(hidden_states) for to in (attn.to_q, attn.to_k, attn.to_v))
        table = self.positions.pe[0].to(hidden_states)
        placed = [to(table) - to(torch.zeros_like(table[:1])) for to in (attn.to_q, attn.to_k, attn.to_v)]
        parts = zip(rings, *(x.chunk(len(rings)) for x in (q, k, v)), strict=True)
        found = torch.cat([self._attend(attn.heads, ring, placed, *x) for ring, *x in parts])
        return attn.to_out[1](attn.to_out[0](found))

    def _attend(
        self, heads: int, ring: Ring, placed: Sequence[torch.Tensor], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Write what is new into the ring and attend to what is live, in the order of the frames."""
        places, count = self.current.places, q.shape[1]
        shape = (k.shape[0], places.window, k.shape[2])
        if self.layer not in ring.layers or ring.layers[self.layer][0].shape != shape:
            ring.layers[self.layer] = k.new_zeros(shape), v.new_zeros(shape)
        new = [places.slot(ring.frames + index) for index in range(count)]
        live = [places.slot(frame) for frame in places.live(ring.frames + count)]
        keys, values = ring.layers[self.layer]
        keys[:, new], values[:, new] = k, v
        size = len(live)
        q = q + placed[0][size - count : size]
        keys, values = keys[:, live] + placed[1][:size], values[:, live] + placed[2][:size]
        q, keys, values = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, keys, values))
        return F.scaled_dot_product_attention(q, keys, values).transpose(1, 2).flatten(2)


def _motion_blocks(unet: nn.Module) -> list[Any]:
    """The blocks of all motion modules, once they are known to be of the kind that can be taken over."""
    modules: Any = unet.modules()
    blocks = [
        block
        for module in modules
        if type(module).__name__ == "AnimateDiffTransformer3D"
        for block in module.transformer_blocks
    ]
    fits = bool(blocks) and all(
        type(attn.processor).__name__ == "AttnProcessor2_0" and attn.norm_q is None and not attn.is_cross_attention
        for attn in _attentions(blocks)
    )
    if not fits or any(type(block.pos_embed).__name__ != "SinusoidalPositionalEmbedding" for block in blocks):
        raise UnsupportedModelError(
            f"{type(unet).__name__} has {len(blocks)} motion blocks, or such of another kind; allowed: a "
            "UNetMotionModel with temporal self-attention at sinusoidal positions, and the processors it comes with."
        )
    return blocks


def _attentions(blocks: Sequence[Any]) -> list[Any]:
    return [attn for block in blocks for attn in (block.attn1, block.attn2)]


@functools.cache
def _left_to_the_ring(cls: Any) -> Any:
    """Position embeddings that add nothing in a pass, where the ring adds them, and which are otherwise ``cls``."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x if self.__dict__[ATTRIBUTE].rings else cls.forward(self, x)

    return disguised(cls, forward=forward)
