"""Condition and edit caches: keys and values of tokens that need not be in the sequence at every step."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cachedit.conditions.bank import KVBank as KVBank
    from cachedit.conditions.invariant import Invariants as Invariants
    from cachedit.conditions.invariant import step_invariant as step_invariant
    from cachedit.conditions.network import ConditionedNetwork as ConditionedNetwork

_HOMES = {
    "ConditionedNetwork": "network",
    "Invariants": "invariant",
    "KVBank": "bank",
    "step_invariant": "invariant",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    """What is public loads on first use, as the strategies alone need none of it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'cachedit.conditions' has no attribute {name!r}")
    return getattr(importlib.import_module(f"cachedit.conditions.{_HOMES[name]}"), name)
