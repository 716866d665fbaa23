"""A class that an object wears for a while in place of its own."""

from __future__ import annotations

from typing import Any


def disguised(cls: Any, *before: type, **names: Any) -> Any:
    """A subclass of ``cls`` of the same name, module and docstring.

    Args:
        cls: what the object is an instance of.
        before: bases that come before it.
        names: attributes of the subclass.
    """
    looks = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (*before, cls), {**looks, **names})
