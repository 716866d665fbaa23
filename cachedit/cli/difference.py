"""What tells two profiles apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from cachedit.cli.description import flat

if TYPE_CHECKING:
    from cachedit.profile import Profile

Numbers = dict[str, list[Any]]


def compare_profiles(a: Profile, b: Profile) -> dict[str, Any]:
    """The differences of two profiles.

    Returns:
        ``equal``; ``metadata``: dotted field -> [of a, of b], None where one lacks it; ``arrays``: for each array, and
        for ``sigmas``, that is not the same in both, ``largest`` relative difference and where it is, or ``reason`` why
        there is none.
    """
    numbers = [_numbers(profile) for profile in (a, b)]
    words = [_metadata(profile) for profile in (a, b)]
    metadata = {
        name: [fields.get(name) for fields in words]
        for name in dict.fromkeys([*words[0], *words[1]])
        if words[0].get(name) != words[1].get(name)
    }
    arrays = dict(_apart(*numbers))
    return {"equal": not metadata and not arrays, "metadata": metadata, "arrays": arrays}


def _numbers(profile: Profile) -> dict[str, Numbers]:
    levels = {} if profile.sigmas is None else {"sigmas": {"": profile.sigmas}}
    return {**levels, **profile.arrays}


def _metadata(profile: Profile) -> dict[str, Any]:
    fields = {field.name: getattr(profile, field.name) for field in dataclasses.fields(profile)}
    return flat({name: value for name, value in fields.items() if name not in ("arrays", "sigmas")})


def _apart(a: dict[str, Numbers], b: dict[str, Numbers]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in dict.fromkeys([*a, *b]):
        if name not in a or name not in b:
            yield name, {"reason": f"only in {'the first' if name in a else 'the second'}"}
        elif list(a[name]) != list(b[name]):
            yield name, {"reason": f"of {', '.join(a[name])} and of {', '.join(b[name])}"}
        elif a[name] != b[name]:
            yield name, _largest(a[name], b[name])


def _largest(a: Numbers, b: Numbers) -> dict[str, Any]:
    """The largest |x - y| / max(|x|, |y|), with its place."""
    import numpy as np

    found: list[tuple[float, str]] = []
    for key in a:
        x, y = np.asarray(a[key], dtype=float), np.asarray(b[key], dtype=float)
        if x.shape != y.shape:
            return {"reason": f"{key or 'it'} has shape {list(x.shape)} and {list(y.shape)}"}
        larger = np.maximum(np.abs(x), np.abs(y))
        relative = np.abs(x - y) / np.where(larger > 0, larger, 1)
        place = np.unravel_index(int(relative.argmax()), relative.shape)
        found.append((float(relative.max()), f"{key}[{', '.join(str(int(index)) for index in place)}]"))
    largest, where = max(found)
    return {"largest": largest, "at": where}


def told(name: str, difference: Mapping[str, Any]) -> str:
    """One line about an array."""
    if "reason" in difference:
        return f"{name}: {difference['reason']}"
    return f"{name}: largest relative difference {difference['largest']:.3g} at {difference['at']}"
