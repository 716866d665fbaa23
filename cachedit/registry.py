"""What every strategy is, and how it is found by its name."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

K = TypeVar("K", bound="Strategy")


def canonical(name: str) -> str:
    """Spelling without case, ``-`` and ``_``: "PlainCache", "plain-cache" and "plain_cache" are one name."""
    return re.sub(r"[-_\s]", "", name).lower()


@dataclass(frozen=True)
class Strategy:
    """Base of all strategies: a frozen dataclass whose fields are the options. Subclassing registers it."""

    registry: ClassVar[dict[str, type[Strategy]]] = {}
    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    engine: ClassVar[str] = ""  # the module that puts strategies of this kind on an object (``cachedit.engine``)
    common_options: ClassVar[tuple[str, ...]] = ()  # what ``wrap`` takes for every strategy of this kind
    by_default: ClassVar[bool] = False  # True for the one that is used where none is named

    def __init_subclass__(cls, abstract: bool = False, **kwargs: Any) -> None:
        """Enter the class into the registry under its name in snake case."""
        super().__init_subclass__(**kwargs)
        if abstract:
            return
        cls.name = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[0-9])(?=[A-Z][a-z])", "_", cls.__name__).lower()
        known = cls.registry.get(cls.name)
        if known is not None and known.__module__ != cls.__module__:
            raise TypeError(f"strategy {cls.name!r} is already defined in {known.__module__}")
        cls.registry[cls.name] = cls

    def reference(self) -> Strategy | None:
        """What this strategy is compared with on the same object; None for the object without any."""
        return None

    def own_steps(self) -> int | None:
        """Steps of a run, of strategies that say how many; None where whoever calls does."""
        return None

    @classmethod
    def serving(cls, target: Any) -> type[Strategy]:
        """The class that does for ``target`` what this one is asked for; another one where kinds of objects differ."""
        return cls

    @classmethod
    def variants(cls) -> tuple[type[Strategy], ...]:
        """The classes that ``serving`` chooses from."""
        return (cls,)

    @classmethod
    def of_kind(cls: type[K]) -> dict[str, type[K]]:
        """Name -> class of every strategy of this kind, sorted by name: ``FeatureStrategy.of_kind()``."""
        found: dict[str, type[K]] = {}
        for name, named in sorted(cls.registry.items()):
            for variant in named.variants():
                if issubclass(variant, cls):
                    found.setdefault(name, variant)
        return found

    @classmethod
    def unasked(cls) -> type[Strategy]:
        """The class that is used where none is named."""
        return next(found for found in cls.registry.values() if found.by_default)

    @classmethod
    def find(cls, strategy: str | Strategy, options: dict[str, Any], target: Any = None) -> Strategy:
        """The strategy of that name (any spelling) with ``options``, or the instance with them replaced.

        Args:
            strategy: a name or an instance.
            options: fields of the strategy.
            target: what it is for, see ``serving``; None where that is not known.

        Raises:
            ValueError: no strategy has that name.
            TypeError: an option that the strategy does not have.
        """
        found = cls.named(strategy).serving(target)
        if isinstance(strategy, found):
            found.check_options(options)
            return dataclasses.replace(strategy, **options)
        options = ({} if isinstance(strategy, str) else strategy.changed_options()) | options
        found.check_options(options)
        return found(**options)

    def changed_options(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        return {f.name: value for f in dataclasses.fields(self) if (value := getattr(self, f.name)) != f.default}

    @classmethod
    def named(cls, strategy: str | Strategy) -> type[Strategy]:
        """The class of that name (any spelling), or of the instance.

        Raises:
            ValueError: no strategy has that name.
            TypeError: neither a name nor an instance.
        """
        if isinstance(strategy, str):
            by_name = {canonical(name): found for name, found in cls.registry.items()}
            if canonical(strategy) not in by_name:
                raise ValueError(
                    f"no strategy is called {strategy!r}. Allowed: {', '.join(sorted(cls.registry))}. "
                    "`cachedit strategies` describes them."
                )
            return by_name[canonical(strategy)]
        if not isinstance(strategy, Strategy):
            raise TypeError(
                f"strategy is a {type(strategy).__name__}; allowed: a name ({', '.join(sorted(cls.registry))}) "
                f"or an instance such as {next(iter(cls.registry.values())).__name__}()."
            )
        return type(strategy)

    @classmethod
    def check_options(cls, options: dict[str, Any]) -> None:
        """Refuse options that are not fields of this strategy."""
        allowed = [f.name for f in dataclasses.fields(cls)]
        unknown = sorted(set(options) - set(allowed))
        if unknown:
            raise TypeError(
                f"{cls.__name__} has no option {', '.join(map(repr, unknown))}. "
                f"Allowed: {', '.join(allowed) or 'none'}; for every strategy: profile, "
                f"{', '.join(cls.common_options)}."
            )
