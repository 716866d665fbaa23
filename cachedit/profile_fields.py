"""What the fields of a profile must be, wherever it comes from: a file may be damaged, or made to do harm."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from cachedit.errors import ProfileError

if TYPE_CHECKING:
    from cachedit.profile import Profile

MOST_AXES, MOST_DEPTH = 8, 32  # far beyond what calibration writes, far below what exhausts Python's stack


def check_fields(profile: Profile) -> None:
    """Raise ProfileError naming the first field that is not as it must be."""
    if not isinstance(profile.arrays, dict) or not profile.arrays:
        raise ProfileError("field 'arrays' must map array names to branches")
    if not isinstance(profile.axes, dict):
        raise ProfileError("field 'axes' must be an object")
    lengths, pairs = set[int](), set[int]()
    for name, rows in profile.arrays.items():
        axes = _axes(profile, name)
        shape = _common_shape(name, rows, axes)
        lengths |= {shape[0]} if axes[0] == "step" else set()
        pairs |= {shape[0]} if axes[0] == "pair" else set()
    if len(lengths) > 1:
        raise ProfileError(f"field 'arrays': rows have different lengths {sorted(lengths)}")
    if lengths and not pairs <= {math.comb(min(lengths), 2)}:
        raise ProfileError(
            f"field 'arrays': rows over pairs have {sorted(pairs)} entries; allowed: {math.comb(min(lengths), 2)}, "
            f"one per pair of {min(lengths)} steps"
        )
    if profile.sigmas is not None:
        sigmas = _numbers(profile.sigmas, "sigmas")
        if lengths and len(sigmas) not in lengths:
            raise ProfileError(f"field 'sigmas' has {len(sigmas)} entries, the arrays have {lengths.pop()}")
        if any(later > earlier for earlier, later in zip(sigmas, sigmas[1:], strict=False)):
            raise ProfileError("field 'sigmas' must not increase")
        if sigmas[0] > 1 or sigmas[-1] < 0:
            raise ProfileError(f"field 'sigmas' must be noise levels in [0, 1], runs from {sigmas[0]} to {sigmas[-1]}")
    if profile.model is not None:
        for key, kind in (("class", str), ("fingerprint", dict), ("names", list)):
            if not isinstance(profile.model, dict) or not isinstance(profile.model.get(key), kind):
                raise ProfileError(f"field 'model.{key}' must be a {kind.__name__}")
        if not all(isinstance(name, str) for name in profile.model["names"]):
            raise ProfileError("field 'model.names' must be a list of texts")
    objects, texts = ("sampler", "defaults", "provenance", "versions"), ("name", "strategy", "date", "command")
    for kind, keys in ((dict, objects), (str, texts)):
        for key in keys:
            if not isinstance(getattr(profile, key), kind):
                raise ProfileError(f"field '{key}' must be {'an object' if kind is dict else 'a text'}")
    for name, value in profile.defaults.items():
        if value is None:
            raise ProfileError(f"field 'defaults.{name}' is null; allowed: a value of that option. Leave it out")
    for key in ("model", *objects):
        if _deeper(getattr(profile, key), MOST_DEPTH):
            raise ProfileError(f"field '{key}' is nested more than {MOST_DEPTH} deep")


def _axes(profile: Profile, name: str) -> list[str]:
    """The axes of an array."""
    axes = profile.axes.get(name, ["step"])
    if not isinstance(axes, list) or not axes or not all(isinstance(axis, str) for axis in axes):
        raise ProfileError(f"field 'axes.{name}' must be a list of axis names")
    if len(axes) > MOST_AXES or (name == "magnitude_ratio" and len(axes) > 1):
        most = 1 if name == "magnitude_ratio" else MOST_AXES
        raise ProfileError(f"field 'axes.{name}' names {len(axes)} axes; allowed: at most {most}")
    return axes


def _common_shape(name: str, rows: Any, axes: list[str]) -> tuple[int, ...]:
    """Lengths of an array along its axes, which its branches share; only of modules may each kind have its number."""
    if not isinstance(rows, dict) or not rows:
        raise ProfileError(f"field 'arrays.{name}' must map branches to lists of numbers")
    shapes = set()
    for branch, row in rows.items():
        shape = _shape(row, f"arrays.{name}.{branch}", len(axes))
        shapes.add(tuple([count for count, axis in zip(shape, axes, strict=True) if axis != "module"]))
        if name == "magnitude_ratio" and min(row) <= 0:
            raise ProfileError(f"field 'arrays.{name}.{branch}' must be positive, has {min(row)}")
    if len(shapes) > 1:
        listed = " and ".join(" x ".join(map(str, shape)) for shape in sorted(shapes))
        raise ProfileError(
            f"field 'arrays.{name}': rows have different lengths, {listed}; allowed: one for all branches"
        )
    return shape


def _numbers(values: Any, where: str) -> list[float]:
    if not isinstance(values, list) or not values or not all(map(_is_number, values)):
        raise ProfileError(f"field '{where}' must be a list of finite numbers")
    return values


def _shape(values: Any, where: str, ndim: int) -> tuple[int, ...]:
    """Lengths of nested lists of numbers; all lists at one depth must have one length."""
    if ndim == 1:
        return (len(_numbers(values, where)),)
    if not isinstance(values, list) or not values:
        raise ProfileError(f"field '{where}' must be a list of {ndim - 1}-fold nested lists of finite numbers")
    shapes = {_shape(item, where, ndim - 1) for item in values}
    if len(shapes) > 1:
        raise ProfileError(f"field '{where}' has rows of different lengths")
    return (len(values), *shapes.pop())


def _is_number(value: Any) -> bool:
    """True for a finite number that a float can hold."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _deeper(value: Any, most: int) -> bool:
    """True if objects and lists lie in each other more than ``most`` deep."""
    level: Iterable[Any] = [value]
    for _ in range(most + 1):
        level = [entry for node in level if isinstance(node, (dict, list)) for entry in _entries(node)]
    return bool(level)


def _entries(node: dict[Any, Any] | list[Any]) -> Iterable[Any]:
    return node.values() if isinstance(node, dict) else node
