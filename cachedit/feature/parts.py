"""Consecutive blocks under watch, and the stand-ins that take their place on a reused pass.

What is captured is the blocks' own residual, sum of (out - in): a block that receives the very tensor its predecessor
returned had nothing added in between.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from cachedit.errors import UnsupportedModelError
from cachedit.feature.families import Family, Layout, Stream
from cachedit.feature.place import Forecast, Residual

HOOKS = "_diffusers_hook"  # looked for in a block's __dict__, as a module takes long to say that it lacks an attribute
DIVIDES = "cp_input"  # how the names of diffusers' hooks begin that divide the tokens among ranks


class Part:
    """Consecutive blocks through which the same streams run: one residual per stream.

    Attributes:
        captured: the residuals of the last computed pass, one per stream; None before it has come through.
        forecast: what a reused pass adds; None lets the streams through as they are.
        offset: place of this part's first stream among those of its site.
        open: True if something was added between blocks in the last watched pass.
    """

    first: list[Any]
    entering: list[Any]
    leaving: list[Any]
    summed: list[Any]
    captured: Residual | None

    def __init__(self, streams: Sequence[Stream], row: Family, offset: int) -> None:
        self.streams, self.offset = streams, offset
        self.sealed, self.in_place = row.sealed, row.in_place
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

    def add(self, passed: Any) -> Any:
        """What leaves the part on a reused pass: what was ``passed`` on, or what entered if sealed, plus forecasts."""
        forecast, offset = self.forecast, self.offset
        if forecast is None:
            return passed
        if self.streams[0].index is None:
            return forecast.value(offset, self.first[0] if self.sealed else passed)
        out = list(passed)
        for k, stream in enumerate(self.streams):
            x = self.first[k] if self.sealed else out[stream.index]  # type: ignore[index]
            out[stream.index] = forecast.value(offset + k, x)  # type: ignore[index]
        return tuple(out)

    def release(self) -> None:
        """Drop every tensor."""
        count = len(self.streams)
        self.first, self.entering, self.leaving = [None] * count, [None] * count, [None] * count
        self.summed, self.version = [None] * count, [0] * count
        self.captured = None
        self.forecast: Forecast | None = None
        self.open = False


class Mark:
    """Where a block lies in a part: whether it is its first and whether it is its last."""

    def __init__(self, part: Part, head: bool, tail: bool) -> None:
        self.part, self.head, self.tail = part, head, tail


class Guise:
    """Stands where a block stood; attributes are the block's own."""

    def __init__(self, block: nn.Module) -> None:
        self.block: Any = block

    def __getattr__(self, name: str) -> Any:
        if "block" not in self.__dict__:  # while a copy is being made
            raise AttributeError(name)
        return getattr(self.block, name)


class Watched(Guise):
    """A real block, with a note of what enters and leaves it."""

    def __init__(self, block: nn.Module, marks: Sequence[Mark]) -> None:
        super().__init__(block)
        self.marks = marks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block."""
        received, named = _received(self.block, args, kwargs)
        for mark in self.marks:
            mark.part.enter(received, named, mark.head)
        out = self.block(*args, **kwargs)
        for mark in self.marks:
            mark.part.leave(out, mark.tail, True)
        return out


class End(Watched):
    """The first or last block of a part in which nothing is added between blocks."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block."""
        for mark in self.marks:
            if mark.head:
                hooked = HOOKS in self.block.__dict__
                mark.part.enter(*(_received(self.block, args, kwargs) if hooked else (args, kwargs)), True)
        out = self.block(*args, **kwargs)
        for mark in self.marks:
            if mark.tail:
                mark.part.leave(out, True, False)
        return out


Role = tuple[tuple[tuple[str, int], ...] | None, str, int, bool, Part | None, Part | None]
"""What a stand-in returns, name and position of its main stream, if it is the first, the parts it begins and ends."""


@functools.cache
def _passes_on(layout: Layout) -> Role:
    """Role of a block between the ends of a part."""
    stream = layout.streams[0]
    return layout.returns, stream.name, stream.position, False, None, None


class StandIn(Guise):
    """Takes a block's place and hands its streams on; the last one of a part adds the forecast residual.

    Args:
        block: the block.
        layout: of its list.
        mark: where it lies in a part that is reused; None if it only hands on.
        first: True for the first block of its list, where a model may divide its tokens among ranks.
    """

    def __init__(self, block: nn.Module, layout: Layout, mark: Mark | None, first: bool = False) -> None:
        super().__init__(block)
        entered = mark.part if mark is not None and mark.head and mark.part.sealed else None
        left = mark.part if mark is not None and mark.tail else None
        # One object, for beside a __getattr__ Python looks up attributes the slow way, and one for all blocks between
        # the ends, for the first look at each costs a trip to memory.
        self.role: Role = _passes_on(layout)
        if first or entered is not None or left is not None:
            self.role = *self.role[:3], first, entered, left

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the block would, in form."""
        returns, name, position, first, entered, left = self.role
        if first and HOOKS in self.block.__dict__:
            args, kwargs = _received(self.block, args, kwargs)
        if entered is not None:
            entered.enter(args, kwargs, True)
        if returns is None:
            x = kwargs[name] if name in kwargs else args[position]
            return x if left is None else left.add(x)
        out: tuple[Any, ...]
        if len(returns) == 2:  # nearly all; a loop would cost as much as the rest of the stand-in
            (one, i), (two, j) = returns
            out = kwargs[one] if one in kwargs else args[i], kwargs[two] if two in kwargs else args[j]
        else:
            out = tuple([kwargs[name] if name in kwargs else args[position] for name, position in returns])
        return out if left is None else left.add(out)


Ask = Callable[[Any, torch.Tensor], bool]


class Asker(Protocol):
    """What a block that is decided under way needs to know of its tap."""

    reuse: bool
    watch_all: bool
    ask: Ask | None
    entered: Any


class Probe(Guise):
    """One of the leading blocks, which always run; after the last of them the pass is decided."""

    def __init__(self, tap: Asker, block: nn.Module, stream: Stream, head: bool, tail: bool) -> None:
        super().__init__(block)
        self.tap, self.stream, self.head, self.tail = tap, stream, head, tail

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block."""
        if self.head:
            name, position = self.stream.name, self.stream.position
            received, named = _received(self.block, args, kwargs)
            self.tap.entered = named[name] if name in named else received[position]
        out = self.block(*args, **kwargs)
        if self.tail:
            ask, self.tap.ask = self.tap.ask, None
            entered, self.tap.entered = self.tap.entered, None
            assert ask is not None
            self.tap.reuse = ask(entered, out if self.stream.index is None else out[self.stream.index])
        return out


class Either(Guise):
    """A block behind the point at which the pass is decided."""

    def __init__(self, tap: Asker, block: nn.Module, computed: Sequence[Any], stand_in: Any) -> None:
        super().__init__(block)
        self.tap, self.computed, self.stand_in = tap, computed, stand_in

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block or what stands for it."""
        chosen = self.stand_in if self.tap.reuse else self.computed[0 if self.tap.watch_all else 1]
        return chosen(*args, **kwargs)


class Reuse(Exception):
    """Raised inside the first block, at the point where the pass is decided to be reused."""


class Entry(Either):
    """The first block where the pass is decided inside it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block, or only the beginning of it."""
        # A block that was compiled by itself cannot be left in its middle.
        compiled = getattr(self.block, "_compiled_call_impl", None) is not None
        try:
            with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
                return super().__call__(*args, **kwargs)
        except Reuse:
            return self.stand_in(*args, **kwargs)


def _received(block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a block gets of these arguments: this rank's tokens, if diffusers' context parallelism divides them there.

    The hook that divides them is private and may be missing or named otherwise; what it gives is a view.
    """
    registry = block.__dict__.get(HOOKS)
    if registry is not None:
        for name, hook in registry.hooks.items():
            if name.startswith(DIVIDES):
                args, kwargs = hook.pre_forward(block, *args, **kwargs)
    return args, kwargs


def _version(x: torch.Tensor) -> int:
    """Number of in-place writes to ``x``; inference tensors and traced ones do not count theirs."""
    return 0 if torch.compiler.is_dynamo_compiling() or x.is_inference() else x._version


def _may_have_changed(x: torch.Tensor, version: int, in_doubt: bool) -> bool:
    """True if somebody has written into ``x`` since; ``in_doubt`` for inference tensors, which cannot tell."""
    if torch.compiler.is_dynamo_compiling():
        return False
    return in_doubt if x.is_inference() else x._version != version
