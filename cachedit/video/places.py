"""Where the frames of a sink and a ring lie: closed-form arithmetic, so that nothing is ever moved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Places:
    """Slots of frames: frame f lies at f in the sink, else at ``sink + (f - sink) mod ring``; pins lie before all.

    Until the ring is full its slots are in order, and once it is full all of them are live. So what a chunk attends to
    is always one contiguous run of slots, and softmax does not mind their order.

    sink: leading frames that keep their slots for good.
    ring: slots that the other frames share.
    pins: slots in front for frames that are kept although they have left the ring.
    """

    sink: int
    ring: int
    pins: int = 0

    @property
    def window(self) -> int:
        """Frames that a chunk attends to at most, pinned ones aside."""
        return self.sink + self.ring

    def slot(self, frame: int) -> int:
        """The slot of a frame of the sink or the ring."""
        return self.pins + (frame if frame < self.sink else self.sink + (frame - self.sink) % self.ring)

    def first(self, stop: int, oldest: int = 0) -> int:
        """The oldest frame outside the sink that a chunk ending at ``stop`` attends to."""
        return max(self.sink, stop - self.ring, oldest)

    def live(self, stop: int, oldest: int = 0) -> list[int]:
        """Frames that a chunk ending at ``stop`` attends to, its own included."""
        return [*range(min(self.sink, stop)), *range(self.first(stop, oldest), stop)]

    def runs(self, frames: Iterable[int]) -> list[tuple[int, int]]:
        """Slots of some frames, joined to runs [start, stop) where they follow each other."""
        return joined(self.slot(frame) for frame in frames)


def joined(slots: Iterable[int]) -> list[tuple[int, int]]:
    """Numbers as runs [start, stop), in their order."""
    runs: list[tuple[int, int]] = []
    for slot in slots:
        if runs and runs[-1][1] == slot:
            runs[-1] = (runs[-1][0], slot + 1)
        else:
            runs.append((slot, slot + 1))
    return runs
