"""Engines: what puts the strategies of one kind on an object. Feature caches, text and video have one each."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from cachedit.profile import Profile
from cachedit.registry import Strategy


class Engine(Protocol):
    """The functions of an engine's module; ``Strategy.engine`` names it."""

    def split_options(self, options: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """The strategy's own options, and those that every strategy of this kind takes."""

    def prepare(self, target: Any, strategy: Any, profile: Profile | str | Path | None, options: Any) -> Any:
        """Whatever ``attach`` needs, made without touching ``target``; every error is raised here."""

    def attach(self, target: Any, session: Any) -> None:
        """Put it on ``target``, all or nothing."""

    def remove(self, target: Any) -> None:
        """Take off whatever this engine has put on ``target``; nothing if there is nothing."""

    def last_run(self, target: Any) -> Any:
        """Record of the last run on ``target``; None before the first."""


def engine_of(strategy: type[Strategy]) -> Engine:
    """The engine of a class of strategies."""
    return cast(Engine, importlib.import_module(strategy.engine))


def loaded_engines() -> Iterator[Engine]:
    """Every engine that may have touched an object: those that were never imported have not."""
    for name in dict.fromkeys(cls.engine for cls in Strategy.registry.values()):
        if name in sys.modules:
            yield cast(Engine, sys.modules[name])
