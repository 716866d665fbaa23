"""The rolling key/value cache of autoregressive video: a sink and a ring of frames that are never moved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from cachedit.kernels.registration import run_on
from cachedit.kernels.row_attention import Projected, Reading, keep, rotated
from cachedit.video.opening import Block, Opening, Plan
from cachedit.video.options import check_window
from cachedit.video.places import Places, joined
from cachedit.video.rope import Turn, VideoRope
from cachedit.video.rows import Rows

Pair = tuple[torch.Tensor, torch.Tensor]
Evicted = Callable[["RollingKVCache", "list[int]"], None]


class RollingKVCache:
    """Keys and values of the frames that later chunks attend to, for all layers of one model and one branch.

    A chunk that ends before frame c attends to the first ``sink`` frames and to the last ``window - sink`` frames
    before c, its own included (Self Forcing, arXiv 2506.08009; LongLive, 2509.22622). A *pass* is one forward of one or
    more blocks of frames behind the last committed one: ``open`` it, let every layer ``read`` it, ``close`` it. Blocks
    that are not committed stay open and may be opened again; the memory is the same however long the video grows.
    Frames that are open need no slots where several blocks are open at once, or where what is kept is quantised: they
    are then attended to as they are, so a look-ahead of any length fits.

    Args:
        layers: attention layers of the model.
        heads: key heads of a layer.
        head_dim: channels of a head.
        grid: rows and columns of tokens in a frame.
        window: frames that a chunk attends to, itself and the sink included.
        sink: leading frames that stay forever.
        batch: samples.
        dtype: of the model's keys and values.
        device: of the buffers.
        rope: "absolute" keeps keys rotated at the frame's number (Self Forcing, CausVid); "sink_shift" turns the sink
            again before every chunk, so that it lies next to the window (Rolling Forcing, 2509.25161); "relative" keeps
            keys unrotated and counts what is attended to from 0 (LongLive). The last two are the same function;
            "relative" is slower and there to test the other.
        quant: None, "int8" or "fp8": how committed frames are kept. Frames that are open are never quantised.
        pins: how many more frames ``pin`` may keep, the oldest giving way.
        offset: number of frame 0 for the position embedding.
        on_evict: called with the cache and the numbers of the committed frames that lose their slots, before they do;
            ``frames`` reads them. Frames that one pass both writes and evicts are not reported.

    Raises:
        ValueError: sizes or options that do not fit together.
    """

    def __init__(
        self,
        layers: int,
        heads: int,
        head_dim: int,
        grid: tuple[int, int],
        *,
        window: int,
        sink: int = 0,
        batch: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        rope: str = "absolute",
        quant: str | None = None,
        pins: int = 0,
        offset: int = 0,
        on_evict: Evicted | None = None,
    ) -> None:
        check_window(window, sink, rope, quant)
        self._places = Places(sink, window - sink, pins)
        self.tokens, self.layers, self.rope, self.quant = grid[0] * grid[1], layers, rope, quant
        self.offset, self.on_evict = offset, on_evict
        self._sizes = {"layers": layers, "heads": heads, "head_dim": head_dim, "grid": tuple(grid), "batch": batch}
        self._rope = VideoRope(head_dim, grid)
        sizes = (self.tokens, heads, head_dim, dtype)
        self._rows = Rows(layers, batch, pins + window, *sizes, quant, device)
        shifts = rope == "sink_shift" and sink + pins > 0
        self._raw = Rows(layers, batch, sink + pins, *sizes, None, device).buffers.k if shifts else None
        self.reset()

    def reset(self) -> None:
        """Forget every frame."""
        self.done = 0  # frames that are committed; a reader of the ring must not look further
        self._end = 0  # frames that have had slots, committed or not
        self._oldest = 0  # frames before this one, and outside the sink, are not attended to
        self._pinned: list[int | None] = [None] * self._places.pins
        self._pin_next = 0
        self._wanted: set[int] = set()
        self._turned: list[tuple[Any, ...]] = [()] * self.layers  # where the sink's keys are rotated to, by layer

    @property
    def window(self) -> int:
        """Frames that a chunk attends to at most, pinned ones aside."""
        return self._places.window

    @property
    def sink(self) -> int:
        """Leading frames that stay forever."""
        return self._places.sink

    @property
    def oldest(self) -> int:
        """The oldest frame outside the sink that is still there; frames that are open have taken slots already."""
        return self._places.first(self._end, self._oldest)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return self._rows.nbytes + (0 if self._raw is None else self._raw.nbytes)

    @property
    def pinned(self) -> list[int]:
        """Frames that were pinned and have left the ring, the oldest first."""
        return sorted(frame for frame in self._pinned if frame is not None)

    def live(self, stop: int | None = None) -> list[int]:
        """Frames that a chunk ending at ``stop`` attends to (None: those that are committed now), pinned ones aside."""
        if stop is not None:
            return self._places.live(stop, self._oldest)
        return [*range(min(self.sink, self.done)), *range(self.oldest, self.done)]

    def open(self, blocks: Sequence[int], commit: int = 0, left_out: Iterable[int] = ()) -> Opening:
        """Open a pass over blocks of so many frames each, of which the first ``commit`` become final.

        ``left_out`` are frames of a single open block, counted from its first, that the pass does without.

        Raises:
            ValueError: a block does not fit into the ring, or nothing is left of it.
        """
        opened, absent = self.done + sum(blocks[:commit]), frozenset(left_out)
        made = self._plan(blocks, commit, absent)
        written = max([block.stop for block in made if block.committed or block.in_place], default=0)
        if self._evict(max(self._end, written)):
            made = self._plan(blocks, commit, absent)
        frames = tuple(self.done + index for index in range(sum(blocks)) if index not in absent)
        return Opening(frames, opened, tuple(made))

    def close(self, opening: Opening) -> None:
        """End a pass that has gone through every layer: its committed frames are final."""
        self.done = max(self.done, opening.committed)

    def read(self, layer: int, opening: Opening, given: Projected) -> Iterator[Reading]:
        """Write what a layer keeps of a pass and give, block by block, what it attends with and to.

        Args:
            layer: number of the layer.
            opening: of this pass.
            given: queries, keys and values of all frames of the pass, before the position embedding.
        """
        if self._raw is not None and opening.blocks[0].start < self.sink:
            given = given.normed()
        raw, relative, cache = given.k, self.rope == "relative", self._rows.layer(layer)
        if not relative:
            given = given._replace(turn=self._turn(opening.frames, given.k))
        if not (run_on(given.q) and all(block.in_place for block in opening.blocks)):
            given = given.turned()  # at once; else each block is, as it is written
        for block in opening.blocks:
            own = given.part(block.tokens)
            queries = own.q
            if block.committed or block.in_place:
                queries = keep(own, cache, self._rows.spans(block.own))
                self._keep_raw(layer, block, raw[:, block.tokens])
            if self._raw is not None:
                self._turn_anchors(layer, block)
            if block.in_place:
                yield Reading(queries, cache, self._rows.spans([block.whole]))
                continue
            fresh = given.k[:, block.fresh], given.v[:, block.fresh]
            reading = Reading(queries, cache, self._rows.spans(block.past), fresh)
            yield self._relative(block, reading) if relative else reading

    def _relative(self, block: Block, reading: Reading) -> Reading:
        """Everything that is attended to, rotated at places that are counted from 0."""
        keys, values = reading.gathered()
        queries = rotated(reading.q, self._turn(block.places[-(reading.q.shape[1] // self.tokens) :], keys))
        return reading._replace(q=queries, spans=(), fresh=(rotated(keys, self._turn(block.places, keys)), values))

    def frames(self, layer: int, numbers: Iterable[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys, rotated as they are kept, and values [B, n * tokens, H, D] of committed frames that are in the ring."""
        return self._rows.read(layer, self._places.runs(numbers))

    def pin(self, frames: Iterable[int]) -> None:
        """Keep committed frames when they leave the ring (a scene cut of LongLive 2, arXiv 2605.18739).

        Raises:
            ValueError: there is no room for pins, or a frame is not committed or has left.
        """
        wanted = set(frames)
        if not self._places.pins or not wanted <= set(self.live()):
            raise ValueError(
                f"pin got frames {sorted(wanted)} of {self.done} with room for {self._places.pins} pins; allowed: "
                f"frames among {self.live()}. Make the cache with pins=, and pin frames before they leave the window."
            )
        self._wanted |= wanted - set(range(self.sink))

    def recall(self, frames: Mapping[int, Sequence[Pair]]) -> None:
        """Fill the pins with frames that have left, in place of what they hold; ``on_evict`` may call it.

        ``frames`` are their numbers, and by layer what the method of that name gave of each before it left.

        Raises:
            ValueError: there is no room for so many.
        """
        if len(frames) > self._places.pins:
            raise ValueError(f"recall got {len(frames)} frames; allowed: {self._places.pins}, the cache's pins=")
        self._pinned, self._pin_next = [None] * self._places.pins, len(frames)
        for slot, frame in enumerate(sorted(frames), self._places.pins - len(frames)):
            for layer, (k, v) in enumerate(frames[frame]):
                self._rows.write(layer, [(slot, slot + 1)], k, v)
            self._hold(frame, slot)

    def rewind(self, frame: int) -> None:
        """Open the committed frames from ``frame`` on again, to write them anew; older ones but the sink are dropped.

        Raises:
            ValueError: the frame has left the ring.
        """
        if not self.oldest <= frame <= self.done:
            raise ValueError(f"rewind got frame {frame}; allowed: a frame of the ring, {self.live()}.")
        self._oldest = self.done = self._end = frame

    def forget(self, frame: int) -> None:
        """Attend no more to frames before ``frame``, but for the sink."""
        self._oldest = max(self._oldest, min(frame, self.done))

    def state_dict(self) -> dict[str, Any]:
        """Everything that a cache of the same sizes needs to go on from here; tensors are copies."""
        names = ("done", "_end", "_oldest", "_pin_next", "offset")
        kept: dict[str, Any] = {name: getattr(self, name) for name in names}
        kept |= {"pinned": list(self._pinned), "wanted": sorted(self._wanted), "turned": list(self._turned)}
        kept["buffers"] = [None if x is None else x.clone() for x in (*self._rows.buffers, self._raw)]
        return {**kept, "sizes": self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where ``state`` was taken.

        Raises:
            ValueError: it is of a cache of other sizes.
        """
        if state["sizes"] != self._identity():
            raise ValueError(f"got the state of a cache {state['sizes']}; allowed: one of {self._identity()}.")
        for name in ("done", "_end", "_oldest", "_pin_next", "offset"):
            setattr(self, name, state[name])
        self._pinned, self._wanted = list(state["pinned"]), set(state["wanted"])
        self._turned = [tuple(x) for x in state["turned"]]
        for buffer, kept in zip((*self._rows.buffers, self._raw), state["buffers"], strict=True):
            if buffer is not None:
                buffer.copy_(kept)

    def _identity(self) -> dict[str, Any]:
        options = {"window": self.window, "sink": self.sink, "pins": self._places.pins}
        return {**self._sizes, **options, "rope": self.rope, "quant": self.quant, "dtype": str(self._rows.dtype)}

    def _plan(self, blocks: Sequence[int], commit: int, left_out: frozenset[int]) -> list[Block]:
        """The blocks of a pass as things are now; what has to be turned back first is not read in place."""
        plain = self.quant is None and self.rope != "relative"
        plan = Plan(self._places, self.tokens, self.done, self._oldest, self._pin_slots(), plain, left_out)
        return plan.blocks(blocks, commit)

    def _pin_slots(self) -> list[int]:
        """Slots of the pinned frames, the oldest frame first."""
        held = [(frame, slot) for slot, frame in enumerate(self._pinned) if frame is not None]
        return [slot for _, slot in sorted(held)]

    def _turn(self, frames: Iterable[int], like: torch.Tensor) -> Turn:
        return self._rope.turn([frame + self.offset for frame in frames], like)

    def _keep_raw(self, layer: int, block: Block, k: torch.Tensor) -> None:
        """The part of the sink that a block writes, before rotation."""
        if self._raw is not None and block.start < self.sink:
            rows = slice(block.start * self.tokens, min(block.stop, self.sink) * self.tokens)
            self._raw[layer, :, rows] = k[:, : rows.stop - rows.start]

    def _turn_anchors(self, layer: int, block: Block) -> None:
        """Rotate the keys of the sink and the pins so that they end where the ring of this block begins."""
        slots = self._pin_slots()
        wanted = (block.first, *slots)
        if self._raw is None or wanted == self._turned[layer] or (block.first <= self.sink and not slots):
            return
        anchors = [*range(self.sink), *(self.sink + slot for slot in slots)]
        rows = torch.cat([self._raw[layer, :, self._rows.span((at, at + 1))] for at in anchors], 1)
        keys = rotated(rows, self._turn(range(block.first - len(anchors), block.first), rows))
        places = [*(self._places.slot(frame) for frame in range(self.sink)), *slots]
        self._rows.write(layer, joined(places), keys, None)
        self._turned[layer] = wanted

    def _evict(self, end: int) -> bool:
        """Make room for frames up to ``end``: pin what was asked for, tell of what goes. True if the pins changed."""
        before = self._places.first(self._end, self._oldest)
        gone = [frame for frame in range(before, max(self.sink, end - self._places.ring)) if frame < self.done]
        pinned, held = sorted(self._wanted & set(gone)), list(self._pinned)
        if gone and self.on_evict is not None:
            self.on_evict(self, gone)
        for frame in pinned:
            self._move_to_pin(frame)
        self._end = end
        return self._pinned != held

    def _move_to_pin(self, frame: int) -> None:
        slot = self._places.pins - 1 - self._pin_next % self._places.pins
        self._pin_next += 1
        self._rows.move(self._places.slot(frame), slot)
        self._hold(frame, slot)
        self._wanted.discard(frame)

    def _hold(self, frame: int, slot: int) -> None:
        """A frame lies in a pin's slot now, its keys rotated as those of the ring are."""
        if self._raw is not None:
            at = self._rows.span((self.sink + slot, self.sink + slot + 1))
            for layer in range(self.layers):
                keys, _ = self._rows.read(layer, [(slot, slot + 1)])
                self._raw[layer, :, at] = rotated(keys, self._turn([frame], keys).conj())
        self._turned = [()] * self.layers
        self._pinned[slot] = frame
