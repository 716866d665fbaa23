"""The block list as a coroutine: its iteration yields the real blocks, watched, or feather-light stand-ins.

The model's own loop does everything else, so per-layer arguments, LoRA, offload, quantised blocks and whatever the
model adds between its blocks keep working.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from cachedit.disguise import disguised
from cachedit.errors import UnsupportedModelError
from cachedit.feature.families import Layout, family, find_stack, read_layout
from cachedit.feature.parts import Ask, Either, End, Entry, Mark, Part, Probe, Reuse, StandIn, Watched
from cachedit.feature.place import Forecast, Place, Residual
from cachedit.strategy import Stack

Position = tuple[int, int]


class StackPlace(Place):
    """A range of the stack. Where the model joins or splits its streams inside it, it falls into several parts."""

    def __init__(self, site: Stack, tap: Tap) -> None:
        super().__init__(site)
        self.reused = False
        covered, count = _range(site, len(tap.order)), len(tap.order)
        if tap.row.long_skips and covered.start < count / 2 and covered.stop < count - covered.start:
            raise UnsupportedModelError(
                f"{tap.model}: blocks {covered.start} to {covered.stop - 1} of {count} hand their output to later ones "
                "that are not reused with them. Allowed for this model: the whole stack, or a range up to its end."
            )
        self.covered = tap.order[covered]
        self.parts: list[Part] = []
        self.ends: list[tuple[Position, Position]] = []
        with_text = self.covered[-1] != tap.order[-1]  # blocks behind the range read the text
        for group in tap.groups:
            inside = [at for at in self.covered if at[0] in group]
            if inside:
                layout = tap.layouts[group[0]]
                streams = layout.streams + (layout.texts if with_text else ())
                self.parts.append(Part(streams, tap.row, sum(len(part.streams) for part in self.parts)))
                self.ends.append((inside[0], inside[-1]))

    def mark(self, at: Position, group: Sequence[int]) -> Mark | None:
        """Where a block of a group of lists lies in its part of this range; None outside of it."""
        if at not in self.covered:
            return None
        here = next(k for k, (first, _) in enumerate(self.ends) if first[0] in group)
        first, last = self.ends[here]
        return Mark(self.parts[here], at == first, at == last)

    def begin(self, reused: bool | Collection[int], forecast: Forecast | None) -> None:
        """Take the forecast for the pass that follows."""
        self.reused = bool(reused)
        for part in self.parts:
            part.forecast = forecast

    def end(self) -> None:
        """Nothing to do: the tap is told."""

    def captured(self) -> Residual | None:
        """The residuals of the last computed pass, all streams of all parts; None if one is missing."""
        whole: Residual = ()
        for part in self.parts:
            if part.captured is None:
                return None
            whole += part.captured
        return whole

    def release(self) -> None:
        """Drop every tensor."""
        for part in self.parts:
            part.release()


class Tap:
    """What the block lists of one denoiser and its runner share.

    Attributes:
        active: True while a tracked call is inside the denoiser; outside it the lists iterate as ever.
        reuse: True if this pass runs stand-ins; while ``ask`` is to be asked, its answer decides.
        watch_all: False once a watched pass has shown that nothing is added between blocks for this kind of call.
        model: name of the denoiser's class; ``names``: of its block lists.
        order: (list, block) of every block, in execution order.
        places: the ranges that the strategy asked for.
        ask: told what entered the stack and what came out of the probe, says whether to reuse; None once it was asked.
        listening: True for a pass in which ``ask`` is asked.
    """

    def __init__(
        self,
        denoiser: nn.Module,
        blocks: Sequence[str] | None = None,
        sites: Sequence[Stack] = (Stack(),),
        where: str = "",
    ) -> None:
        self.active = self.reuse = self.listening = False
        self.watch_all = True
        self.ask: Ask | None = None
        self.entered: Any = None
        self.model, self.names = type(denoiser).__name__, find_stack(denoiser, blocks)
        self.lists: list[nn.ModuleList] = [denoiser.get_submodule(name) for name in self.names]  # type: ignore[misc]
        self.layouts = [read_layout(denoiser, name) for name in self.names]
        self.row, self.groups = family(denoiser), _group(self.layouts)
        self.order = _order([len(blocks) for blocks in self.lists], self.row.interleaved)
        self.places = [StackPlace(site, self) for site in sites]
        self.probe: int | None = None  # number of leading blocks that a signal lets through, up to the first site
        if where == "attention":
            self.probe = 0
            _attention(self.blocks[0])  # refuses a model without one before anything is touched
        elif where == "blocks":
            self.probe = self.order.index(self.places[0].covered[0])
        self._classes: list[type[nn.ModuleList]] = []
        self._blocks: list[tuple[nn.Module, ...]] = []
        self._chosen: Any = None
        self._hook: Any = None

    @property
    def blocks(self) -> list[nn.Module]:
        """Every block, in execution order."""
        return [self.lists[i][k] for i, k in self.order]

    def attach(self) -> None:
        """Swap the class of every list, so that its iteration asks this tap."""
        self._prepare()
        for blocks in self.lists:
            self._classes.append(type(blocks))
            blocks.__class__ = _tapped(type(blocks))

    def _inside(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Ask at the attention of the first block, and leave the block if the pass is reused."""
        if self.active and self.ask is not None:
            ask, self.ask = self.ask, None
            self.reuse = ask(None, args[0] if args else next(iter(kwargs.values())))
            if self.reuse:
                raise Reuse

    def detach(self) -> None:
        """Give every list its own class back."""
        for blocks, cls in zip(self.lists, self._classes, strict=False):
            for name in ("_tap", "_watched", "_ends", "_stand_ins", "_asking"):
                blocks.__dict__.pop(name, None)
            blocks.__class__ = cls
        self._classes = []
        if self._hook is not None:
            self._hook.remove()

    def refresh(self) -> None:
        """Prepare the lists again if a block has been replaced."""
        if self._blocks != [tuple(blocks._modules.values()) for blocks in self.lists]:
            self._prepare()

    def begin(self, hollow: bool, ask: Ask | None, watch_all: bool = True) -> None:
        """Choose what the lists yield in the pass that follows, once the places have been told."""
        self.ask, self.listening, self.watch_all = ask, ask is not None, watch_all
        self.reuse = hollow
        chosen = []
        for place in self.places:
            chosen.append(place.reused)
            self.reuse = self.reuse or place.reused
        if self.reuse and self._chosen != (hollow or chosen):
            self._chosen = hollow or chosen
            for i, blocks in enumerate(self.lists):
                stand_ins = [self._stand_in(i, k, chosen, hollow) for k in range(len(self._blocks[i]))]
                blocks.__dict__["_stand_ins"] = stand_ins
        self.active = True

    def end(self) -> None:
        """The pass is over, however it ended."""
        self.active, self.ask, self.entered = False, None, None

    def _prepare(self) -> None:
        """Lay out what the iteration of the lists yields: all watched, or watched ends only, or what is to be asked."""
        self._blocks = [tuple(blocks._modules.values()) for blocks in self.lists]
        self._chosen = None
        for i, blocks in enumerate(self.lists):
            watched, ends = [], []
            for k, block in enumerate(self._blocks[i]):
                marks = [mark for place in self.places if (mark := place.mark((i, k), self._group_of(i))) is not None]
                at_end = [mark for mark in marks if mark.head or mark.tail]
                watched.append(Watched(block, marks) if marks else block)
                ends.append(End(block, at_end) if at_end else block)
            blocks.__dict__.update(_tap=self, _watched=watched, _ends=ends)
        if self._hook is not None:  # a block may have been replaced
            self._hook.remove()
        if self.probe == 0:
            self._hook = _attention(self.blocks[0]).register_forward_pre_hook(self._inside, with_kwargs=True)
        if self.probe is not None:
            for i, blocks in enumerate(self.lists):
                blocks.__dict__["_asking"] = [self._asked(i, k) for k in range(len(self._blocks[i]))]

    def _asked(self, i: int, k: int) -> Any:
        """What stands for a block in a pass that is decided under way."""
        place, block = self.order.index((i, k)), self._blocks[i][k]
        assert self.probe is not None
        if place < self.probe:
            return Probe(self, block, self.layouts[i].streams[0], place == 0, place == self.probe - 1)
        every = [True] * len(self.places)
        computed = [self.lists[i].__dict__[name][k] for name in ("_watched", "_ends")]
        return (Entry if place == 0 else Either)(self, block, computed, self._stand_in(i, k, every, False))

    def _stand_in(self, i: int, k: int, chosen: Sequence[bool], hollow: bool) -> Any:
        """What stands for a block when these places are reused: the block itself where none of them covers it."""
        block, layout = self._blocks[i][k], self.layouts[i]
        if hollow:
            return StandIn(block, layout, None, k == 0)
        for place, reused in zip(self.places, chosen, strict=True):
            mark = place.mark((i, k), self._group_of(i)) if reused else None
            if mark is not None:
                return StandIn(block, layout, mark, k == 0)
        return block

    def _group_of(self, i: int) -> list[int]:
        return next(group for group in self.groups if i in group)

    @property
    def open(self) -> bool:
        """True if something was added between blocks in the last watched pass."""
        return True in [part.open for place in self.places for part in place.parts]


class TappedList(nn.ModuleList):
    """A ModuleList whose iteration asks its tap, a slice of it likewise; an index keeps giving the real block."""

    _tap: Tap | None = None

    def __iter__(self) -> Iterator[Any]:
        tap = self._tap
        if tap is None or not tap.active:
            return super().__iter__()
        if tap.listening:
            return iter(self._asking)  # type: ignore[arg-type]
        if tap.reuse:
            return iter(self._stand_ins)  # type: ignore[arg-type]
        if torch.compiler.is_dynamo_compiling() or tap.watch_all:
            return iter(self._watched)  # type: ignore[arg-type]
        return iter(self._ends)  # type: ignore[arg-type]

    def __getitem__(self, index: Any) -> Any:
        if self._tap is not None and self._tap.active and isinstance(index, slice):
            return list(self)[index]  # a model that runs its list in several loops slices it
        return super().__getitem__(index)


def _tapped(cls: type[nn.ModuleList]) -> type[nn.ModuleList]:
    return TappedList if cls is nn.ModuleList else disguised(cls, TappedList)


def _attention(block: nn.Module) -> nn.Module:
    """The first attention of a block, whose input is what the timestep has modulated."""
    for name, module in block.named_modules():
        if re.match(r"attn|attention|self_attn", name.rpartition(".")[2]):
            return module
    raise UnsupportedModelError(
        f"{type(block).__name__} has no attention whose input could be listened to (it has "
        f"{', '.join(name for name, _ in block.named_children())}). Allowed: a strategy that needs no such signal."
    )


def _order(lengths: Sequence[int], interleaved: bool) -> list[Position]:
    """Every (list, block) in execution order."""
    if interleaved:
        return [(i, k) for k in range(max(lengths)) for i, length in enumerate(lengths) if k < length]
    return [(i, k) for i, length in enumerate(lengths) for k in range(length)]


def _range(site: Stack, count: int) -> slice:
    """The blocks of a stack of ``count`` that a site covers."""

    def index(value: float) -> int:
        if isinstance(value, float) and value:  # a share is at least one block
            value = math.copysign(max(round(abs(value) * count), 1), value)
        return int(value) + count if value < 0 else int(value)

    start, stop = index(site.start), count if site.stop is None else index(site.stop)
    if not 0 <= start < stop <= count:
        raise UnsupportedModelError(
            f"the stack has {count} blocks, and blocks {start} to {stop - 1} of it were asked for. Allowed: at least "
            f"one block within 0 to {count - 1}; choose a smaller number of blocks for this model."
        )
    return slice(start, stop)


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
