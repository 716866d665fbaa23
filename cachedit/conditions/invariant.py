"""Modules that see neither the latents nor the time, and so need to run once and not at every step."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import nn

from cachedit.disguise import disguised

ATTRIBUTE = "_cachedit_invariant"
BRANCHES = 8  # calls of one module that are kept: guidance makes several in a step


@dataclass
class Invariants:
    """What the modules have given.

    Attributes:
        computed: calls that ran a module.
        reused: calls that were answered from what is kept.
        nbytes: of what is kept; 0 once the context has ended.
    """

    computed: int = 0
    reused: int = 0
    _kept: dict[str, OrderedDict[Any, _Call]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept."""
        calls = (call for kept in self._kept.values() for call in kept.values())
        return sum(x.numel() * x.element_size() for call in calls for x in _tensors(call.output))

    def call(self, name: str, run: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """What a module gives; it runs unless it was called with these very tensors before."""
        given = [*arguments, *named.values()]
        uncounted = torch.is_inference_mode_enabled() or any(x.is_inference() for x in _tensors(given))
        if torch.is_grad_enabled() or uncounted:  # what inference mode makes does not count its changes
            return run(*arguments, **named)
        kept, key = self._kept.setdefault(name, OrderedDict()), (*map(_mark, given), *named)
        found = kept.get(key)
        if found is not None and found.versions == _versions(found.output):
            self.reused += 1
            kept.move_to_end(key)
            return found.output
        output = run(*arguments, **named)
        self.computed += 1
        kept[key] = _Call(given, output, _versions(output))
        if len(kept) > BRANCHES:
            kept.popitem(last=False)
        return output


@dataclass(frozen=True)
class _Call:
    """One call; its inputs are held so that their addresses stay theirs."""

    given: list[Any]
    output: Any
    versions: list[int]


@contextmanager
def step_invariant(model: nn.Module, *names: str) -> Iterator[Invariants]:
    """Inside, modules that are called with the same tensors again give what they gave before.

    FloED keeps the features of its flow branch so (arXiv 2412.00857). It is exact for every module without state whose
    inputs are the same tensors at every step, as those of a condition are: the embedding of a ControlNet's picture, the
    projections of a text and its keys and values. Where an input is another tensor, or was changed in place, or the
    output was, the module runs. What is kept is dropped at the end, so take the context around one run.

    Args:
        model: the module that has them, such as ``pipe.controlnet``.
        *names: of its modules, as ``named_modules`` gives them; ``*`` stands for anything.

    Yields:
        How often they ran.

    Raises:
        ValueError: a name that no module has, or a module that is in such a context already.
    """
    chosen: dict[str, nn.Module] = {}
    for pattern in names:
        found = {name: module for name, module in model.named_modules() if fnmatchcase(name, pattern)}
        if not found:
            raise ValueError(
                f"{type(model).__name__} has no module {pattern!r}; allowed: names of model.named_modules(), in which "
                "* stands for anything, for example '*.attn2.to_k'."
            )
        chosen |= found
    twice = [name for name, module in chosen.items() if getattr(type(module), ATTRIBUTE, False)]
    if twice:
        raise ValueError(f"{twice[0]!r} is step-invariant already; allowed: one context at a time for a module")
    kept = Invariants()
    try:
        for name, module in chosen.items():
            module.__dict__[ATTRIBUTE] = name, kept
            module.__class__ = _asked_first(cast(Any, type(module)))
        yield kept
    finally:
        for module in chosen.values():
            module.__dict__.pop(ATTRIBUTE, None)
            if getattr(type(module), ATTRIBUTE, False):
                module.__class__ = cast(Any, type(module).__base__)
        kept._kept.clear()


@functools.cache
def _asked_first(cls: Any) -> Any:
    """A class whose calls ask what is kept, and which is otherwise ``cls``."""

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        name, kept = self.__dict__[ATTRIBUTE]
        return kept.call(name, functools.partial(cls.__call__, self), arguments, named)

    return disguised(cls, __call__=call, **{ATTRIBUTE: True})


def _mark(x: Any) -> Any:
    """What tells an argument from another: of a tensor which it is and how often it was changed."""
    if isinstance(x, torch.Tensor):
        return id(x), x._version
    if isinstance(x, (list, tuple)):
        return tuple(map(_mark, x))
    if isinstance(x, dict):
        return tuple((name, _mark(value)) for name, value in x.items())
    return (type(x), x if x is None or isinstance(x, (bool, int, float, str)) else id(x))


def _versions(output: Any) -> list[int]:
    return [x._version for x in _tensors(output)]


def _tensors(x: Any) -> Iterator[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, (list, tuple)):
        for part in x:
            yield from _tensors(part)
    elif isinstance(x, dict):
        for part in x.values():
            yield from _tensors(part)
