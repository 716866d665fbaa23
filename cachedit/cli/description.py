"""What a profile says, as plain data and for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from cachedit.profile import Profile

FRONTIER = "frontier"  # the array of measured budgets: column -> one number per budget


def describe(profile: Profile) -> dict[str, Any]:
    """A profile as plain data, with shapes and ranges in place of its arrays, and its frontier in full."""
    sigmas = profile.sigmas
    return {
        "name": profile.name,
        "strategy": profile.strategy,
        "model": profile.model,
        "sampler": profile.sampler,
        "noise_levels": None if sigmas is None else {"count": len(sigmas), "first": sigmas[0], "last": sigmas[-1]},
        "defaults": profile.defaults,
        "arrays": {
            array: _described(rows, profile.axes.get(array, ["step"])) for array, rows in profile.arrays.items()
        },
        "frontier": named(profile.arrays[FRONTIER]) if FRONTIER in profile.arrays else None,
        "provenance": profile.provenance,
        "versions": profile.versions,
        "date": profile.date,
        "command": profile.command,
    }


def named(columns: Mapping[str, list[float]]) -> dict[str, list[Any]]:
    """A frontier with predictors and criteria by name; the array holds their places."""
    from cachedit.paths import CRITERIA
    from cachedit.solver import PREDICTORS

    names = {"predictor": [*PREDICTORS], "criterion": [*CRITERIA]}
    return {
        column: [names[column][int(place)] for place in values] if column in names else [*values]
        for column, values in columns.items()
    }


def _described(rows: Mapping[str, list[Any]], axes: list[str]) -> dict[str, Any]:
    import numpy as np

    tables = [np.asarray(row, dtype=float) for row in rows.values()]
    return {
        "axes": axes,
        "keys": list(rows),
        "shapes": [list(shape) for shape in dict.fromkeys(table.shape for table in tables)],
        "min": min(float(table.min()) for table in tables),
        "max": max(float(table.max()) for table in tables),
    }


def print_description(console: Console, described: Mapping[str, Any]) -> None:
    """Print what ``describe`` gave: the fields, a table of the arrays, and the frontier."""
    from rich.table import Table
    from rich.text import Text

    fields = Table.grid(padding=(0, 2))
    for name, value in _fields(described):
        fields.add_row(Text(name), Text(value))
    console.print(fields)
    arrays = Table("array", "of", "shape", "smallest", "largest", show_edge=False, pad_edge=False)
    for name, array in described["arrays"].items():
        if name != FRONTIER or described["frontier"] is None:
            cells = (name, ", ".join(array["keys"]), _shape(array), f"{array['min']:.6g}", f"{array['max']:.6g}")
            arrays.add_row(*(Text(cell) for cell in cells))
    console.print()
    console.print(arrays)
    if described["frontier"]:
        print_frontier(console, described["frontier"])


def print_frontier(console: Console, columns: Mapping[str, list[Any]]) -> None:
    """Print what each measured budget costs: one row per budget of what ``named`` gave."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_edge=False, pad_edge=False, title="measured frontier", title_justify="left")
    for name in columns:
        table.add_column(Text(name), justify="right")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*(Text(value if isinstance(value, str) else f"{value:.6g}") for value in row))
    console.print()
    console.print(table)


def plot_frontier(profile: Profile, path: str) -> None:
    """Draw the measured frontier as SVG.

    Raises:
        ValueError: there is none.
    """
    from cachedit.evaluate.frontier_plot import frontier_svg
    from cachedit.files import write_text

    name = profile.name or "without a name"
    if FRONTIER not in profile.arrays:
        raise ValueError(
            f"--plot {path}: profile {name} has no frontier; allowed: one of a calibration for auto. Measure one: "
            "cachedit calibrate MODEL --strategy auto"
        )
    title = f"Speed against fidelity, as profile {name} was measured"
    write_text(path, frontier_svg(profile.arrays[FRONTIER], title))


def _fields(described: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    model, levels = described["model"], described["noise_levels"]
    yield "name", described["name"] or "-"
    yield "strategy", described["strategy"] or "-"
    if model is None:
        yield "model", "any"
    else:
        yield "model", f"{model['class']} ({listed(model['fingerprint'])})"
        yield "called", " or ".join(model["names"]) or "-"
    yield "sampler", listed(described["sampler"])
    steps = "by position in the schedule" if levels is None else "{count}, {first:g} to {last:g}".format(**levels)
    yield "noise levels", steps
    for field in ("defaults", "provenance", "versions"):
        yield field, listed(described[field])
    yield "date", described["date"] or "-"
    yield "command", described["command"] or "-"


def listed(values: Mapping[str, Any]) -> str:
    """The entries of a dictionary in one line; those of inner ones too, and nothing that is not known."""
    known = flat(values).items()
    return ", ".join(f"{name} {value}" for name, value in known if value is not None) or "-"


def flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """The entries of a dictionary, those of inner ones under dotted names; an inner one without entries has none."""
    entries: dict[str, Any] = {}
    for name, value in values.items():
        entries |= flat(value, f"{before}{name}.") if isinstance(value, Mapping) else {f"{before}{name}": value}
    return entries


def _shape(array: Mapping[str, Any]) -> str:
    axes = array["axes"]
    shapes = [
        " x ".join(f"{count} {axis}s" for count, axis in zip(shape, axes, strict=True)) for shape in array["shapes"]
    ]
    return " or ".join(shapes)
