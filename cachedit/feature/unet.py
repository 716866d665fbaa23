"""A UNet whose deep part is replaced by a forecast of the feature that it last gave (DeepCache, arXiv 2312.00858).

A reused pass runs the outermost layers of the way down and of the way up, and no other. No forward is patched: lists of
blocks, and of layers in the blocks at the boundary, are of a class that overrides iteration only and then yields real
blocks and stand-ins. The model's own loop does everything else, so what a ControlNet or a T2I adapter adds, FreeU, LoRA
and offload keep working. What is added at depth is part of the cached feature; to layers that run it is added fresh.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from cachedit.disguise import disguised
from cachedit.errors import UnsupportedModelError
from cachedit.feature.parts import Guise
from cachedit.feature.place import Forecast, Place, Residual
from cachedit.strategy import Skip

LAYERS = ("resnets", "temp_convs", "attentions", "temp_attentions", "motion_modules")  # a layer runs them in turn
SAMPLERS = ("downsamplers", "upsamplers")
ARGUMENTS = ("hidden_states", "res_hidden_states_tuple")  # the first two of every up block
NUMBER = 0  # hidden states that no block will see: an adapter adds to them, in place if they are a tensor
Plan = list[tuple[nn.Module, Any]]  # what lists yield in a pass, and whether the middle block is left out


class Around(Guise):
    """A block with something else around its call. Its attributes are those in ``own`` and the block's."""

    def __init__(self, block: Any, **own: Any) -> None:
        super().__init__(block)
        self.__dict__.update(own)


class Watched(Around):
    """A block of which ``place`` notes what enters it, if ``entry``, or what leaves it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block."""
        if self.entry:
            self.place.note(_argument(args, kwargs, 0))
        out = self.block(*args, **kwargs)
        if not self.entry:
            self.place.note(out if isinstance(out, torch.Tensor) else out[0])
        return out


class Resumed(Around):
    """An up block that goes on from the forecast of ``place``: its lists yield its last layers only."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run those layers."""
        given = (self.place.value(), _argument(args, kwargs, 1)[: self.place.site.layer + 1])
        named = dict(zip(ARGUMENTS[len(args) :], given[len(args) :], strict=True))
        return self.block(*given[: len(args)], *args[2:], **{**kwargs, **named})


class Shortened(Around):
    """A down block whose lists yield ``taken`` layers only, and no downsampler; in form it ``gives`` all it should."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run those layers."""
        if self.taken < len(self.block.resnets):
            kwargs.pop("additional_residuals", None)  # belongs to the last layer, and would go to the last that runs
        _, skips = self.block(*args, **kwargs)
        absent = (_nothing(args, kwargs),) * (self.gives - self.taken)
        # without a downsampler the block's output is its last skip connection, which an adapter must not write into
        return NUMBER, (*skips[: self.taken], *absent)


class DownStandIn(Around):
    """Takes the place of a down block that does not run and ``gives`` so many skip connections."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the block would, in form."""
        return NUMBER, (_nothing(args, kwargs),) * self.gives


class UpStandIn(Around):
    """Takes the place of an up block that does not run; the ``last`` returns what the first convolution gave."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the block would, in form."""
        return _argument(args, kwargs, 1)[0] if self.last else NUMBER


class SkipPlace(Place):
    """The feature that enters a layer on a UNet's way up, before it meets the skip connection. The body attaches it.

    Attributes:
        block: index of the up block; ``index`` is that of the layer in it.
        skips: number of skip connections, from the outside in, that a reused pass needs.
        reused: whether this pass is asked to reuse the feature.
    """

    site: Skip

    def __init__(self, site: Skip, layers: list[int]) -> None:
        super().__init__(site)
        self.block = len(layers) - 1 - site.level
        self.index = layers[self.block] - 1 - site.layer
        self.skips = sum(layers[self.block :]) - self.index
        self.reused = False
        self._forecast: Forecast | None = None
        self._feature: torch.Tensor | None = None

    def begin(self, reused: bool | Collection[int], forecast: Forecast | None) -> None:
        """A pass begins; ``UNetBody.begin`` follows."""
        self.reused, self._forecast = bool(reused), forecast
        if not reused:
            self._feature = None

    def end(self) -> None:
        """The pass is over."""
        self.reused, self._forecast = False, None

    def captured(self) -> Residual | None:
        """The feature [B, C, H, W] of the last pass that was not reused; None if the layer was not reached."""
        return None if self._feature is None else (self._feature,)

    def release(self) -> None:
        """Drop every tensor."""
        self._forecast = self._feature = None

    def note(self, feature: torch.Tensor) -> None:
        """Keep what enters the layer. A copy: FreeU writes into the original before the layer runs."""
        self._feature = feature.clone()

    def value(self) -> torch.Tensor:
        """The forecast feature; never a kept one itself, for the same reason."""
        assert self._forecast is not None
        value = self._forecast.value(0)
        return value.clone() if value is self._forecast.history[0][-1] else value


class UNetBody:
    """The blocks of one UNet, which run as a whole, in part or not at all.

    Around every tracked pass the places' ``begin`` comes first, then the body's, and their ``end`` afterwards. One
    place is reused in a pass, the outermost that is asked; others are captured as far as they are reached.

    Attributes:
        active: True while a tracked pass is inside the denoiser; ``hollow``: no block runs in it, because its output
            will be replaced.

    Raises:
        UnsupportedModelError: the denoiser is not built as needed.
    """

    def __init__(self, denoiser: nn.Module) -> None:
        _check(denoiser)
        self.denoiser: Any = denoiser
        self.active = self.hollow = False
        self.places: list[SkipPlace] = []
        self._plans: list[Plan] = []  # computed, hollow, then one per place; none while not attached
        self._current: Plan = []
        self._swapped: list[tuple[nn.Module, Any]] = []
        self._seen: list[nn.Module] = []

    def place(self, site: Skip) -> SkipPlace:
        """The place of ``site``; ask for all of them before ``attach``.

        Raises:
            ValueError: the model has no such layer.
        """
        layers = _check(self.denoiser)
        if not 0 <= site.level < len(layers) or not 0 <= site.layer < layers[-1 - site.level]:
            allowed = ", ".join(f"0 to {count - 1} in level {level}" for level, count in enumerate(layers[::-1]))
            raise ValueError(
                f"{site} does not exist in {type(self.denoiser).__name__}. Allowed: layer {allowed}, both counted from "
                "the outside in. Skip(0, 0) runs least."
            )
        self.places.append(SkipPlace(site, layers))
        return self.places[-1]

    def attach(self) -> None:
        """Swap the class of every list that a plan names, and of the middle block."""
        self.detach()
        layers = _check(self.denoiser)
        self._plans = [self._plan(sum(layers), 0), self._plan(0, len(layers))]
        self._plans += [self._plan(place.skips, place.block, place) for place in self.places]
        self._seen = list(self.denoiser.modules())
        for module in dict.fromkeys(module for plan in self._plans for module, _ in plan):
            self._swapped.append((module, type(module)))
            module.__class__ = _planned(self._swapped[-1][1])

    def detach(self) -> None:
        """Give every list and the middle block its own class back."""
        self.end()
        for module, cls in self._swapped:
            module.__dict__.pop("_planned", None)
            module.__class__ = cls
        self._plans, self._swapped, self._seen = [], [], []

    def refresh(self) -> None:
        """A run begins: attach anew if a module has been replaced since the last one."""
        if self._plans and list(self.denoiser.modules()) != self._seen:
            self.attach()

    def begin(self, hollow: bool = False) -> None:
        """A tracked pass begins; ``hollow`` runs no block, and the model returns the right form without meaning."""
        self.end()
        self.active, self.hollow = True, hollow
        asked = [(place.skips, k) for k, place in enumerate(self.places) if place.reused]
        self._current = self._plans[1 if hollow else 2 + min(asked)[1] if asked else 0]
        for module, planned in self._current:
            module.__dict__["_planned"] = planned

    def end(self) -> None:
        """The pass is over, however it ended: outside of passes all lists iterate as ever."""
        for module, _ in self._current:
            module.__dict__["_planned"] = None
        self._current, self.active, self.hollow = [], False, False

    def _plan(self, skips: int, start: int, entry: SkipPlace | None = None) -> Plan:
        """A pass with the first ``skips`` skip connections, and the up blocks from ``start`` on, or from ``entry``."""
        plan: Plan = []
        downs, ups = list(self.denoiser.down_blocks), list(self.denoiser.up_blocks)
        wanted = skips - 1  # the first one is that of the first convolution
        for d, block in enumerate(downs):
            gives = _gives(block)
            taken = min(max(wanted, 0), gives)
            wanted -= gives
            if taken == 0:
                downs[d] = DownStandIn(block, gives=gives)
            elif taken < gives:
                downs[d] = Shortened(block, taken=taken, gives=gives)
                plan += [(modules, tuple(modules)[:taken]) for modules in _lists(block, LAYERS)]
                plan += [(modules, ()) for modules in _lists(block, SAMPLERS)]
        for u, block in enumerate(ups):
            if u < start:
                ups[u] = UpStandIn(block, last=u == len(ups) - 1)
                continue
            yields = [list(modules) for modules in _lists(block, LAYERS)]
            for place in self.places:
                if place.block == u and place.index == 0:
                    ups[u] = Watched(ups[u], place=place, entry=True)
                elif place.block == u:
                    yields[-1][place.index - 1] = Watched(yields[-1][place.index - 1], place=place, entry=False)
            first = 0
            if entry is not None and u == start:  # what was watched up to here does not run
                ups[u], first = Resumed(block, place=entry), entry.index
            pairs = zip(_lists(block, LAYERS), yields, strict=True)
            plan += [(modules, tuple(own[first:])) for modules, own in pairs if own[first:] != list(modules)]
        plan += [(self.denoiser.down_blocks, tuple(downs)), (self.denoiser.up_blocks, tuple(ups))]
        computed = entry is None and start == 0
        return plan if computed or self.denoiser.mid_block is None else [*plan, (self.denoiser.mid_block, True)]


@functools.cache
def _planned(cls: Any) -> Any:
    """A class of lists whose iteration, or of blocks whose call, follows ``_planned``; it is otherwise ``cls``."""

    def iterate(self: Any) -> Iterator[Any]:
        return cls.__iter__(self) if self._planned is None else iter(self._planned)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return cls.__call__(self, *args, **kwargs) if self._planned is None else _nothing(args, kwargs)

    own = {"__iter__": iterate} if issubclass(cls, nn.ModuleList) else {"__call__": call}
    return disguised(cls, _planned=None, **own)


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], k: int) -> Any:
    """The hidden states or the skip connections among the arguments of an up block."""
    return kwargs[ARGUMENTS[k]] if ARGUMENTS[k] in kwargs else args[k]


def _nothing(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Stands for a tensor that no block will see: it has a size, and a control input of any size can be added to it."""
    return next(x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)).new_empty(())


def _lists(block: Any, names: tuple[str, ...]) -> list[Any]:
    """The lists of those names that a block has."""
    return [block._modules[name] for name in names if block._modules.get(name) is not None]


def _gives(block: Any) -> int:
    """Number of skip connections that a down block gives: one per layer and one for the downsampler."""
    return len(block.resnets) + len(_lists(block, SAMPLERS))


def _check(denoiser: Any) -> list[int]:
    """Number of layers of every up block; UnsupportedModelError if the model is not built as needed."""
    for reason in _obstacles(denoiser):
        raise UnsupportedModelError(
            f"{type(denoiser).__name__} has no skip connections that can be cached: {reason}. Allowed: conv_in, and "
            "down_blocks, mid_block and up_blocks made of resnets, attentions, temporal ones, motion_modules and "
            "samplers, as in UNet2DConditionModel. Use a strategy that caches another site."
        )
    return [len(block.resnets) for block in denoiser.up_blocks]


def _obstacles(denoiser: Any) -> Iterator[str]:
    """What keeps the model from being cached."""
    lists = [n for n in ("down_blocks", "up_blocks") if not isinstance(getattr(denoiser, n, None), nn.ModuleList)]
    missing = [name for name in ("conv_in", "mid_block") if not hasattr(denoiser, name)] + lists
    if missing:
        yield f"it has no {', '.join(missing)}"
    for name, expected in (("down_blocks", ARGUMENTS[:1]), ("up_blocks", ARGUMENTS)):
        for block in getattr(denoiser, name):
            children, kind = dict(block.named_children()), f"{type(block).__name__} in {name}"
            counts = {child: len(children[child]) for child in LAYERS if isinstance(children.get(child), nn.ModuleList)}
            others = children.keys() - {*LAYERS, *SAMPLERS}
            if others or not counts.get("resnets") or len(set(counts.values())) > 1:
                yield f"{kind} consists of {', '.join(f'{counts.get(child, 1)} {child}' for child in children)}"
            takes = tuple(inspect.signature(inspect.unwrap(type(block).forward)).parameters)[1 : 1 + len(expected)]
            if takes != expected:
                yield f"{kind} takes {', '.join(takes)} first, not {', '.join(expected)}"
    given, taken = 1 + sum(map(_gives, denoiser.down_blocks)), sum(len(block.resnets) for block in denoiser.up_blocks)
    if given != taken:
        yield f"its way down gives {given} of them and its way up takes {taken}"
