"""Checks of options that many strategies share."""

from __future__ import annotations

import math
from typing import Any


def check_number(strategy: Any, name: str, highest: float = math.inf) -> None:
    """Raise ValueError unless the option is a number from 0 to ``highest``."""
    value = getattr(strategy, name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= highest:
        allowed = "a number, 0 or more" if highest == math.inf else f"a share from 0 to {highest:g}"
        raise ValueError(f"{type(strategy).__name__} {name}={value!r}; allowed: {allowed}")


def check_count(strategy: Any, *names: str, lowest: int = 0) -> None:
    """Raise ValueError unless each of these options is an integer, ``lowest`` or more."""
    for name in names:
        value = getattr(strategy, name)
        if type(value) is not int or value < lowest:
            raise ValueError(f"{type(strategy).__name__} {name}={value!r}; allowed: an integer, {lowest} or more")


def check_choice(strategy: Any, name: str, allowed: tuple[str | None, ...]) -> None:
    """Raise ValueError unless the option has one of these values."""
    value = getattr(strategy, name)
    if value not in allowed:
        raise ValueError(f"{type(strategy).__name__} {name}={value!r}; allowed: {', '.join(map(repr, allowed))}")
