"""The attention and feed-forward modules of a denoiser as a site: what they give, before its gate.

The class of every such module is swapped for a subclass that overrides ``__call__`` only. A reused module hands out
its forecast without being run; gates, residual additions and norms lie outside of it and stay fresh. Its forward,
hooks, parameters and names are its own, so LoRA, offload and quantised layers keep working.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cachedit.disguise import disguised
from cachedit.errors import UnsupportedModelError
from cachedit.feature.place import Forecast, Place, Residual
from cachedit.strategy import Module

NAMES: dict[str, tuple[str, ...]] = {
    "attn": (
        *("attn", "attn1", "self_attn", "self_attention", "attention", "audio_attn1"),
        # Between two streams that are denoised together: as in joint attention, either side moves.
        *("audio_to_video_attn", "video_to_audio_attn", "va_cross_attention", "av_cross_attention"),
    ),
    "cross": ("attn2", "cross_attn", "cross_attention", "audio_attn2"),
    "mlp": (
        *("ff", "ffn", "mlp", "feed_forward", "audio_ff", "ff_context", "txt_ff", "img_mlp", "txt_mlp", "ff_i", "ff_t"),
        "mlp_moe_gen",
        # Written out in the block, or fused with attention in what follows: the hidden state is cached.
        *("proj_mlp", "ff_in", "gate_proj", "up_proj"),
    ),
}
"""Kind -> last part of the names that the field gives to such modules."""
TEMPORAL = ("temporal_transformer_blocks", "motion_modules", "temp_attentions")
"""Lists in whose blocks self-attention runs along time: it is of kind "temporal" and not "attn"."""
UNET_SECTIONS = ("down_blocks", "mid_block", "up_blocks")
_KIND_OF = {name: kind for kind, names in NAMES.items() for name in names}
_KEY = "_cachedit_unit"
_UNCOUNTED = -1
Form = Any  # what a module returned, with the class Tensor in the place of every tensor


@dataclass
class Pass:
    """What the units of one place share, so that a pass begins without a walk over them.

    Attributes:
        active: True while a tracked pass is inside the denoiser.
        reused: indices of the units that are reused.
        forecast: what they give.
        captures: True if the units note what they give.
    """

    active: bool = False
    reused: frozenset[int] = frozenset()
    forecast: Forecast | None = None
    captures: bool = True


class Unit:
    """One module of the site.

    A module that is called several times in a pass (one feed-forward for two streams, or for chunks of one) is told
    apart by the order of its calls.

    Attributes:
        name: path of the module in the denoiser.
        layer: index of its block; in a UNet blocks are counted from the way in to the way out.
        kind: "attn", "temporal", "cross" or "mlp".
        index: its place among the units.
        forms: what every call returns, without the tensors; empty until that is known.
        starts: place of every call's first tensor among those of the site.
        kept: form, tensors and their versions of every call in the last pass that was not reused.
    """

    def __init__(self, name: str, layer: int, kind: str, index: int, current: Pass) -> None:
        self.name, self.layer, self.kind, self.index = name, layer, kind, index
        self.current = current
        self.calls = 0
        self.forms: tuple[Form, ...] = ()
        self.starts: tuple[int, ...] = ()
        self.kept: list[tuple[Form, Residual, list[int]]] = []

    @property
    def reused(self) -> bool:
        """True if the call that begins is to be given; one that no computed pass has shown is run."""
        return self.index in self.current.reused and self.calls < len(self.forms)

    def give(self) -> Any:
        """What the module would return."""
        forecast = self.current.forecast
        assert forecast is not None
        values = (_own(forecast.value(k)) for k in itertools.count(self.starts[self.calls]))
        out = _filled(self.forms[self.calls], values)
        self.note(out)
        return out

    def note(self, out: Any) -> None:
        """Note what a call gave."""
        self.calls += 1
        if self.current.captures:
            tensors: list[torch.Tensor] = []
            form = self._taken_apart(out, tensors)
            self.kept.append((form, tuple(tensors), [_version(x) for x in tensors]))

    def _taken_apart(self, out: Any, tensors: list[torch.Tensor]) -> Form:
        if isinstance(out, torch.Tensor):
            tensors.append(_own(out))
            return torch.Tensor
        if out is None:
            return None
        if type(out) in (tuple, list):
            return type(out)([self._taken_apart(x, tensors) for x in out])
        raise UnsupportedModelError(
            f"{self.name} returns a {type(out).__name__}, which cannot be cached. Allowed: tensors, None, and tuples "
            "or lists of these. Use a strategy that caches the stack or the output."
        )

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that are kept; raises UnsupportedModelError if the model has written into one."""
        kept = [pair for _, tensors, versions in self.kept for pair in zip(tensors, versions, strict=True)]
        if any(version not in (_UNCOUNTED, _version(x)) for x, version in kept):
            raise UnsupportedModelError(
                f"the model writes into what {self.name} gives, so it cannot be kept. "
                "Allowed: `x = gate * x` instead of `x *= gate`."
            )
        return [x for x, _ in kept]


class Reusable(nn.Module):
    """A module whose call is given by its unit in a pass that reuses it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module or give its forecast."""
        unit: Unit | None = self.__dict__.get(_KEY)
        if unit is None or not unit.current.active:
            return super().__call__(*args, **kwargs)
        if unit.reused:
            return unit.give()
        out = super().__call__(*args, **kwargs)
        unit.note(out)
        return out


class ModulePlace(Place):
    """Every module of one kind in the blocks of a denoiser; ``captured`` has their tensors in the order of the units.

    A unit that the model does not call in the first passes of a run takes no part in that run. A pass that misses one
    which was called before, because a site around it is reused or the model leaves its block out, captures nothing.

    Args:
        site: the kind.
        denoiser: the model.
        blocks: the blocks of its stack in execution order; None for a UNet, whose ways down and up are searched.

    Attributes:
        units: the modules in execution order.

    Raises:
        UnsupportedModelError: the blocks have no such module.
    """

    def __init__(self, site: Module, denoiser: nn.Module, blocks: Sequence[nn.Module] | None = None) -> None:
        super().__init__(site)
        self.kind, self.denoiser = site.kind, denoiser
        self.roots: Sequence[str] | None = None
        if blocks is not None:
            names = {id(module): name for name, module in denoiser.named_modules()}
            self.roots = [names[id(block)] for block in blocks]
        self._current = Pass()
        self._plain: list[tuple[nn.Module, type[nn.Module]]] = []
        self._find()

    def _find(self) -> None:
        everything = [*find_modules(self.denoiser, self.roots)]
        found = [(name, layer, module) for name, layer, kind, module in everything if kind == self.kind]
        if not found:
            there = [f"{kind!r} ({count})" for kind, count in Counter(kind for _, _, kind, _ in everything).items()]
            raise UnsupportedModelError(
                f"{type(self.denoiser).__name__} has no module of kind {self.kind!r} in its blocks. Its kinds: "
                f"{', '.join(there) or 'none'}. Choose one of these, or a strategy that caches the stack or the output."
            )
        self.modules = [module for _, _, module in found]
        self.units = [Unit(name, layer, self.kind, k, self._current) for k, (name, layer, _) in enumerate(found)]
        self._all, self._total, self._holds = frozenset(range(len(found))), 0, False

    def attach(self) -> None:
        """Swap the class of every module, so that its call asks its unit."""
        if any(_KEY in vars(module) for module in self.modules):
            raise ValueError(f"another place watches the {self.kind!r} modules already; detach that one first.")
        for unit, module in zip(self.units, self.modules, strict=True):
            cls: Any = type(module)
            self._plain.append((module, cls))
            module.__class__, module.__dict__[_KEY] = _reusable(cls), unit

    def detach(self) -> None:
        """Give every module its own class back."""
        for module, cls in self._plain:
            module.__dict__.pop(_KEY, None)
            module.__class__ = cls
        self._plain = []

    def refresh(self) -> None:
        """Look again if modules have been replaced, and forget what those of the last run returned."""
        found = [id(module) for _, _, kind, module in find_modules(self.denoiser, self.roots) if kind == self.kind]
        if found != [*map(id, self.modules)]:
            attached = bool(self._plain)
            self.detach()
            self._find()
            if attached:
                self.attach()
        self._total = 0
        for unit in self.units:
            unit.forms = ()

    def begin(self, reused: bool | Collection[int], forecast: Forecast | None) -> None:
        """A pass begins; a forecast of another number of tensors than the units have is not used."""
        chosen: frozenset[int] = frozenset()
        if reused is not False and forecast is not None and len(forecast.history) == self._total:
            chosen = self._all if reused is True else frozenset(reused)
        captures = chosen != self._all
        if captures and self._holds:
            self.release()
        self._holds = self._holds or captures
        current = self._current
        current.active, current.reused, current.forecast, current.captures = True, chosen, forecast, captures

    def end(self) -> None:
        """The pass is over."""
        self._current.active, self._current.forecast = False, None
        for unit in self.units:
            unit.calls = 0

    def captured(self) -> Residual | None:
        """The tensors of all units in the last pass that was not reused; None if it did not reach one of them."""
        forms = [tuple([form for form, _, _ in unit.kept]) for unit in self.units]
        if any(unit.forms and unit.forms != now for unit, now in zip(self.units, forms, strict=True)):
            return None
        whole: list[torch.Tensor] = []
        for unit, now in zip(self.units, forms, strict=True):
            unit.forms, sizes = now, [len(tensors) for _, tensors, _ in unit.kept]
            unit.starts = tuple(itertools.accumulate(sizes, initial=len(whole)))
            whole += unit.tensors()
        self._total = len(whole)
        return tuple(whole) or None

    def release(self) -> None:
        """Drop every tensor."""
        self._current.forecast, self._holds = None, False
        for unit in self.units:
            unit.kept = []


def find_modules(denoiser: nn.Module, roots: Sequence[str] | None = None) -> Iterator[tuple[str, int, str, nn.Module]]:
    """Name, layer, kind and module of all in the blocks ``roots`` that can be a unit, but not what lies inside of one.

    Without ``roots`` the sections of a UNet are searched, or everything where there are none.
    """
    sections = [name for name in UNET_SECTIONS if isinstance(getattr(denoiser, name, None), nn.Module)]
    seen: set[int] = set()
    layers: dict[str, int] = {}
    for at, root in enumerate(sections or [""] if roots is None else roots):
        for name, kind, module in _walk(denoiser.get_submodule(root), root, seen):
            if roots is None:  # a block is the innermost entry of a list
                block = name[: max(i.end() for i in re.finditer(r"^|\.\d+(?=\.)", name))]
                at = layers.setdefault(block, len(layers))
            yield name, at, kind, module


def _walk(module: nn.Module, path: str, seen: set[int]) -> Iterator[tuple[str, str, nn.Module]]:
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        kind = kind_of(inner, child)
        if id(child) not in seen:
            seen.add(id(child))
            yield from [(inner, kind, child)] if kind is not None else _walk(child, inner, seen)


def kind_of(name: str, module: nn.Module) -> str | None:
    """Kind of the module of that name; None if it is no unit, or adds its input itself and so hides the stream."""
    *path, last = name.split(".")
    kind = _KIND_OF.get(last)
    if kind is None or getattr(module, "residual_connection", False):
        return None
    crosses = getattr(module, "is_cross_attention", None)
    if kind != "mlp" and isinstance(crosses, bool):  # double self-attention, or cross-attention alone
        kind = "cross" if crosses else "attn"
    return "temporal" if kind == "attn" and any(part in TEMPORAL for part in path) else kind


def _filled(form: Form, values: Iterator[torch.Tensor]) -> Any:
    if form is torch.Tensor:
        return next(values)
    return None if form is None else type(form)([_filled(part, values) for part in form])


def _own(x: torch.Tensor) -> torch.Tensor:
    """``x``, or a copy of it if writing into it would leave no trace."""
    return x.clone() if not torch.compiler.is_dynamo_compiling() and x.is_inference() else x


def _version(x: torch.Tensor) -> int:
    """Number of in-place writes to ``x``, where they are counted."""
    return _UNCOUNTED if torch.compiler.is_dynamo_compiling() or x.is_inference() else x._version


@functools.cache
def _reusable(cls: Any) -> Any:
    return disguised(cls, Reusable)
