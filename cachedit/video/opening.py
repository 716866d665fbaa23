"""What one forward pass opens in a ring: its blocks of frames, and what each of them reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cachedit.video.places import Places, joined

Runs = list[tuple[int, int]]


@dataclass(frozen=True)
class Block:
    """Frames that are denoised together and see each other.

    start, stop: their numbers in the video.
    first:       oldest frame outside the sink that they attend to.
    committed:   their keys and values are final.
    in_place:    they are written to the ring and read from there, with no copy.
    own:         their slots.
    past:        slots of the frames that are read from the ring and are not their own; unused in place.
    whole:       slots of everything they attend to, where that is read in place.
    places:      of what they attend to, their own included, where positions are counted from 0.
    tokens:      rows of the pass that are theirs.
    fresh:       rows of the pass that they attend to without the ring, their own included.
    """

    start: int
    stop: int
    first: int
    committed: bool
    in_place: bool
    own: Runs
    past: Runs
    whole: tuple[int, int]
    places: tuple[int, ...]
    tokens: slice
    fresh: slice


@dataclass(frozen=True)
class Opening:
    """The blocks of one forward pass, which follow the last committed frame."""

    frames: tuple[int, ...]
    committed: int  # frames up to here are final afterwards
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Plan:
    """Lays out the blocks of a pass.

    places: where frames lie.
    tokens: rows of a frame.
    done:   frames that are committed; the pass follows them.
    oldest: frames before it, and outside the sink, are not attended to.
    pinned: slots of the pinned frames.
    plain:  what lies in the slots can be attended to as it is.
    absent: frames of the only block, counted from its first, that are left out.
    """

    places: Places
    tokens: int
    done: int
    oldest: int
    pinned: list[int]
    plain: bool
    absent: frozenset[int] = frozenset()

    def blocks(self, sizes: Sequence[int], commit: int) -> list[Block]:
        """Blocks of so many frames each, of which the first ``commit`` become final.

        Raises:
            ValueError: a block does not fit into the ring, or nothing is left of it.
        """
        if self.absent and (commit or len(sizes) > 1 or not self.absent < set(range(sizes[0]))):
            raise ValueError(
                f"got frames {sorted(self.absent)} to leave out of blocks of {list(sizes)} frames, {commit} of them to "
                "commit; allowed: some, not all, of the frames of one block that is open"
            )
        start, opened, made = self.done, self.done + sum(sizes[:commit]), []
        for index, size in enumerate(sizes):
            self._check(start, size, opened)
            alone = index < commit or index == commit == len(sizes) - 1  # no other open block needs what it overwrites
            made.append(self._block(start, start + size, index < commit, alone, min(opened, start)))
            start += size
        return made

    def _check(self, start: int, size: int, opened: int) -> None:
        places, stop = self.places, start + size
        if size < 1 or (size > places.ring and stop > places.window):
            raise ValueError(
                f"a block of {size} frames does not fit into a window of {places.window} frames with a sink of "
                f"{places.sink}; allowed: 1 to {places.ring}. Take a larger window or smaller chunks."
            )
        if opened < min(places.sink, start) and places.first(stop, self.oldest) > places.sink:
            raise ValueError(
                f"frames {opened} to {stop} are open at once, and a sink of {places.sink} among them; allowed: open "
                f"frames up to {places.window} until the sink is committed. Commit the first block before."
            )

    def _block(self, start: int, stop: int, committed: bool, alone: bool, opened: int) -> Block:
        """Frames from ``opened`` up to the block are open too, so they are not read from the ring."""
        places, seen = self.places, self.places.live(stop, self.oldest)
        whole = self.oldest <= max(places.sink, stop - places.ring)  # nothing in the ring is left out
        past = [frame for frame in seen if frame < opened]
        leading = sum(frame < places.sink for frame in past)
        slots = [*map(places.slot, past[:leading]), *self.pinned, *map(places.slot, past[leading:])]
        first_fresh, row = seen[len(past)], self.tokens
        places_of = tuple(at for at in range(len(slots) + len(seen) - len(past)) if at - len(slots) not in self.absent)
        less = len(self.absent)
        return Block(
            start=start,
            stop=stop,
            first=places.first(stop, self.oldest),
            committed=committed,
            in_place=alone and whole and self.plain and not less,
            own=places.runs(range(start, stop)),
            past=joined(slots),
            whole=(places.pins - len(self.pinned), places.pins + min(stop, places.window)),
            places=places_of,
            tokens=slice((start - self.done) * row, (stop - self.done - less) * row),
            fresh=slice((first_fresh - self.done) * row, (stop - self.done - less) * row),
        )
