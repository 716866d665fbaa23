"""The block list as a coroutine: its iteration yields the real blocks, watched, or feather-light stand-ins.

The model's own loop does everything else, so per-layer arguments, LoRA, offload, quantised blocks and whatever the
model adds between its blocks keep working. What is captured is the blocks' own residual, sum of (out - in): a block
that receives the very tensor its predecessor returned had nothing added in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from cachedit.errors import UnsupportedModelError
from cachedit.feature.families import Family, Layout, Stream, family, find_stack, read_layout
from cachedit.kernels import forecast

Residual = tuple[torch.Tensor, ...]


class Part:
    """Consecutive block lists through which the same streams run: one residual per stream.

    Attributes:
        captured: the residuals of the last computed pass, one per stream; None before it has come through.
        history: per stream, the residuals that the next reused pass adds, oldest first.
        weights: their weights; None adds the newest.
        open: True if something was added between blocks in the last watched pass.
    """

    first: list[Any]
    entering: list[Any]
    leaving: list[Any]
    summed: list[Any]
    captured: Residual | None

    def __init__(self, streams: Sequence[Stream], row: Family) -> None:
        self.streams = streams
        self.sealed, self.in_place = row.sealed, row.in_place
        self.history: tuple[tuple[torch.Tensor, ...], ...] = ()
        self.weights: Sequence[torch.Tensor] | None = None
        self.release()

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any], head: bool) -> None:
        """Note what reaches a block."""
        if head:
            self.open = self.in_place
        for k, stream in enumerate(self.streams):
            x = kwargs[stream.name] if stream.name in kwargs else args[stream.position]
            if head:
                self.first[k], self.summed[k] = x, None
            elif x is not self.leaving[k] or _may_have_changed(x, self.version[k], True):
                self.open = True
            self.entering[k], self.version[k] = x, _version(x)

    def leave(self, out: Any, tail: bool, watched: bool) -> None:
        """Note what a block returned; after the last one the residuals are complete."""
        for k, stream in enumerate(self.streams):
            x = self.leaving[k] = out if stream.index is None else out[stream.index]
            if watched and not self.sealed:
                if x is self.entering[k] or _may_have_changed(self.entering[k], self.version[k], False):
                    raise UnsupportedModelError(
                        "a block writes into the tensor that it is given, so what it adds cannot be told. "
                        "Allowed: `x = x + f(x)` instead of `x += f(x)`."
                    )
                self.version[k] = _version(x)
                own = x - self.entering[k]
                self.summed[k] = own if self.summed[k] is None else self.summed[k] + own
        if tail:
            summed = watched and self.open and not self.sealed
            self.captured = ()
            for k in range(len(self.streams)):
                self.captured += (self.summed[k] if summed else self.leaving[k] - self.first[k],)
            self.summed = [None] * len(self.streams)

    def add(self, x: torch.Tensor, k: int) -> torch.Tensor:
        """What leaves the part on a reused pass: ``x`` (or what entered, if sealed) plus the forecast of stream k."""
        return forecast(self.first[k] if self.sealed else x, self.history[k], self.weights)

    def add_to_all(self, returned: tuple[Any, ...]) -> tuple[Any, ...]:
        """The same for what a block returns as a tuple."""
        out = list(returned)
        for k, stream in enumerate(self.streams):
            out[stream.index] = self.add(out[stream.index], k)  # type: ignore[index]
        return tuple(out)

    def release(self) -> None:
        """Drop every tensor."""
        count = len(self.streams)
        self.first, self.entering, self.leaving = [None] * count, [None] * count, [None] * count
        self.summed, self.version = [None] * count, [0] * count
        self.captured = None
        self.history = ()
        self.open = False


class Watched:
    """A real block, with a note of what enters and leaves it. Attributes are the block's own."""

    def __init__(self, block: nn.Module, part: Part, head: bool, tail: bool) -> None:
        self.block, self.part, self.head, self.tail = block, part, head, tail

    def __getattr__(self, name: str) -> Any:
        if "block" not in self.__dict__:  # while a copy is being made
            raise AttributeError(name)
        return getattr(self.block, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block."""
        self.part.enter(args, kwargs, self.head)
        out = self.block(*args, **kwargs)
        self.part.leave(out, self.tail, True)
        return out


class End(Watched):
    """The first or last block of a part in which nothing is added between blocks."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block."""
        if self.head:
            self.part.enter(args, kwargs, True)
        out = self.block(*args, **kwargs)
        if self.tail:
            self.part.leave(out, True, False)
        return out


class StandIn:
    """Takes a block's place on a reused step and hands its streams on; the last one adds the forecast residual.

    Attributes are the block's own.
    """

    def __init__(self, block: nn.Module, part: Part, layout: Layout, head: bool, tail: bool) -> None:
        self.block, self.part, self.returns = block, part, layout.returns
        self.name, self.position = layout.streams[0].name, layout.streams[0].position
        self.keeps_entry, self.adds = head and part.sealed, tail

    def __getattr__(self, name: str) -> Any:
        if "block" not in self.__dict__:  # while a copy is being made
            raise AttributeError(name)
        return getattr(self.block, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the block would, in form."""
        if self.keeps_entry:
            self.part.enter(args, kwargs, True)
        if self.returns is None:
            x = kwargs[self.name] if self.name in kwargs else args[self.position]
            return self.part.add(x, 0) if self.adds else x
        out: tuple[Any, ...] = ()
        for name, place in self.returns:
            out += (kwargs[name] if name in kwargs else args[place],)
        return self.part.add_to_all(out) if self.adds else out


class Tap:
    """What the block lists of one denoiser and its runner share.

    Attributes:
        active: True while a tracked call is inside the denoiser; outside it the lists iterate as ever.
        reuse: True if this call is reused.
        watch_all: False once a watched pass has shown that nothing is added between blocks for this kind of call.
        parts: the stack, in execution order.
    """

    def __init__(self, denoiser: nn.Module, blocks: Sequence[str] | None = None) -> None:
        self.active = False
        self.reuse = False
        self.watch_all = True
        self.names = find_stack(denoiser, blocks)
        self.lists: list[nn.ModuleList] = [denoiser.get_submodule(name) for name in self.names]  # type: ignore[misc]
        self._plain: list[tuple[type[nn.ModuleList], tuple[nn.Module, ...]]] = []
        self.layouts = [read_layout(denoiser, name) for name in self.names]
        self.groups = _group(self.layouts)
        self.parts = [Part(self.layouts[group[0]].streams, family(denoiser)) for group in self.groups]

    def attach(self) -> None:
        """Swap the class of every list, so that its iteration asks this tap."""
        for i, blocks in enumerate(self.lists):
            self._plain.append((type(blocks), ()))
            self._prepare(i)
            blocks.__class__ = _tapped(type(blocks))

    def refresh(self) -> None:
        """Prepare the lists again in which a block has been replaced."""
        for i, blocks in enumerate(self.lists):
            if tuple(blocks._modules.values()) != self._plain[i][1]:
                self._prepare(i)

    def _prepare(self, i: int) -> None:
        """Lay out what the iteration of list ``i`` yields: watched blocks, watched ends only, or stand-ins."""
        blocks = tuple(self.lists[i]._modules.values())
        group, part = next((g, p) for g, p in zip(self.groups, self.parts, strict=True) if i in g)
        ends = [(i == group[0] and k == 0, i == group[-1] and k == len(blocks) - 1) for k in range(len(blocks))]
        placed = [*zip(blocks, ends, strict=True)]
        self._plain[i] = (self._plain[i][0], blocks)
        self.lists[i].__dict__.update(
            _tap=self,
            _watched=[Watched(block, part, *end) for block, end in placed],
            _ends=[End(block, part, *end) if any(end) else block for block, end in placed],
            _stand_ins=[StandIn(block, part, self.layouts[i], *end) for block, end in placed],
        )

    def detach(self) -> None:
        """Give every list its own class back."""
        for blocks, (cls, _) in zip(self.lists, self._plain, strict=False):
            for name in ("_tap", "_watched", "_ends", "_stand_ins"):
                blocks.__dict__.pop(name, None)
            blocks.__class__ = cls
        self._plain = []

    def release(self) -> None:
        """Drop every tensor."""
        for part in self.parts:
            part.release()

    @property
    def open(self) -> bool:
        """True if something was added between blocks in the last watched pass."""
        return True in [part.open for part in self.parts]

    def captured(self) -> Residual | None:
        """The residuals of the last computed pass, all streams of all parts; None if one is missing."""
        whole: Residual = ()
        for part in self.parts:
            if part.captured is None:
                return None
            whole += part.captured
        return whole

    def load(self, history: Sequence[Residual], weights: Sequence[float] | None) -> None:
        """Hand the residuals (oldest first) that the next pass adds to the parts.

        Weights travel as tensors: torch.compile would build floats into the graph and make a new one at every step.
        """
        streams = tuple(zip(*history, strict=True))
        as_tensors = None if weights is None else torch.tensor(weights).unbind()
        for part in self.parts:
            count = len(part.streams)
            part.history, streams, part.weights = streams[:count], streams[count:], as_tensors


class TappedList(nn.ModuleList):
    """A ModuleList whose iteration asks its tap; indexing keeps giving the real blocks."""

    _tap: Tap | None = None

    def __iter__(self) -> Iterator[Any]:
        tap = self._tap
        if tap is None or not tap.active:
            return super().__iter__()
        if tap.reuse:
            return iter(self._stand_ins)  # type: ignore[arg-type]
        if torch.compiler.is_dynamo_compiling() or tap.watch_all:
            return iter(self._watched)  # type: ignore[arg-type]
        return iter(self._ends)  # type: ignore[arg-type]


def _version(x: torch.Tensor) -> int:
    """Number of in-place writes to ``x``; inference tensors and traced ones do not count theirs."""
    return 0 if torch.compiler.is_dynamo_compiling() or x.is_inference() else x._version


def _may_have_changed(x: torch.Tensor, version: int, in_doubt: bool) -> bool:
    """True if somebody has written into ``x`` since; ``in_doubt`` for inference tensors, which cannot tell."""
    if torch.compiler.is_dynamo_compiling():
        return False
    return in_doubt if x.is_inference() else x._version != version


def _tapped(cls: type[nn.ModuleList]) -> type[nn.ModuleList]:
    return TappedList if cls is nn.ModuleList else type(cls.__name__, (TappedList, cls), {"__module__": cls.__module__})


def _group(layouts: Sequence[Layout]) -> list[list[int]]:
    """Indices of the lists that form one part.

    Lists that carry text beside the main stream share the main stream's layout; where one of them returns a bare
    tensor the model joins or splits the streams in between, and each list is a part of its own.
    """
    groups: list[list[int]] = []
    for i, layout in enumerate(layouts):
        before = layouts[groups[-1][-1]] if groups else None
        if before is not None and layout.returns is not None and before.returns is not None:
            if len(before.streams) != len(layout.streams):
                raise UnsupportedModelError("its block lists carry different numbers of streams")
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups
