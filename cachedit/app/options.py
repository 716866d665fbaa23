"""The options of a strategy as controls: made from the fields of its dataclass and from its docstring."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Union

import gradio as gr

from cachedit.evaluate.configuration import parse_options
from cachedit.strategy import Strategy

OPEN = "default"  # what a choice shows where the option is left at None
SLIDERS = {"target_speedup": (1.0, 4.0, 0.05, 2.0)}
"""Field -> lowest, highest, step, and what None stands for: options that are nicer to pull than to type."""

Known = dict[str, dict[str, Any]]
"""Strategy -> option -> value, of the controls that were touched."""


@dataclass(frozen=True)
class Option:
    """One field of a strategy.

    Attributes:
        name: of the field.
        kind: its type without None: bool, int, float, a tuple of choices, or str for all that is typed as a literal.
        default: its value where it is left alone.
        text: what the docstring says of it.
    """

    name: str
    kind: Any
    default: Any
    text: str

    def control(self, value: Any) -> Any:
        """A component that edits it, set to ``value``."""
        shown: dict[str, Any] = {"label": self.name, "info": self.text, "interactive": True}
        if self.name in SLIDERS:
            low, high, step, standing = SLIDERS[self.name]
            return gr.Slider(low, high, standing if value is None else value, step=step, **shown)
        if isinstance(self.kind, tuple) or (self.kind is bool and self.default is None):
            choices = self.kind if isinstance(self.kind, tuple) else (True, False)
            named = [(str(choice), str(choice)) for choice in choices]
            unset = [(OPEN, "")] if self.default is None else []
            return gr.Dropdown([*unset, *named], value="" if value is None else str(value), **shown)
        if self.kind is bool:
            return gr.Checkbox(value, **shown)
        if self.kind in (int, float) and self.default is not None:
            precision, step = (0, 1) if self.kind is int else (None, 0.01)
            return gr.Number(value, precision=precision, step=step, **shown)
        text = "" if value == self.default else str(value)
        return gr.Textbox(text, placeholder=OPEN if self.default is None else str(self.default), max_lines=1, **shown)

    def read(self, value: Any) -> Any:
        """The option's value from that of its control.

        Raises:
            ValueError: a number is asked for, and it is none.
        """
        standing = SLIDERS[self.name][3] if self.name in SLIDERS else ""
        if value is None or value in ("", standing):
            return self.default
        if isinstance(self.kind, tuple):
            return next((choice for choice in self.kind if str(choice) == value), value)
        if self.kind is bool:
            return value in (True, "True")
        if self.kind in (int, float):
            return number(value, self.name, self.kind)
        if isinstance(value, str):
            return parse_options([f"value={value}"])["value"]
        return value


def number(value: Any, name: str, kind: type = float) -> Any:
    """What a field holds, as a number.

    Raises:
        ValueError: it is none.
    """
    try:
        if kind is int and float(value) != int(float(value)):
            raise ValueError
        return int(float(value)) if kind is int else float(value)
    except (ValueError, OverflowError) as error:
        allowed = "a whole number" if kind is int else "a number"
        raise ValueError(f"{name} got {str(value)[:40]!r}; allowed: {allowed}.") from error


def options_of(cls: type[Strategy]) -> list[Option]:
    """The options of a strategy."""
    types_, texts = typing.get_type_hints(cls), _texts(cls)
    fields = dataclasses.fields(cls)
    return [Option(f.name, _kind(types_[f.name]), f.default, texts.get(f.name, "")) for f in fields]


def chosen(cls: type[Strategy], values: dict[str, Any]) -> dict[str, Any]:
    """Options for ``cachedit.wrap`` from what controls show: those that differ from their defaults."""
    read = {
        option.name: (option.read(values[option.name]), option) for option in options_of(cls) if option.name in values
    }
    return {name: value for name, (value, option) in read.items() if value != option.default}


def show_options(strategy: Any, values: Any, tab: str, kind: type[Strategy]) -> None:
    """Controls for the options of the chosen strategy, made anew when another is chosen.

    What is typed is noted in the state of the session itself, so nothing is made anew by it.

    Args:
        strategy: the component that says which one is chosen.
        values: the state of the session, ``Known``.
        tab: where they are.
        kind: base of the strategies of that tab; one name may mean another class in each.
    """

    @gr.render([strategy, values], show_progress="hidden")
    def controls(name: str, known: Known) -> None:
        cls = kind.of_kind()[name]
        gr.Markdown((cls.__doc__ or "").partition("\n")[0], elem_id=f"{tab}-summary")
        with gr.Row():
            for option in options_of(cls):
                control = option.control(known.get(name, {}).get(option.name, option.default))

                def note(value: Any, known: Known, name: str = name, option: str = option.name) -> None:
                    known.setdefault(name, {})[option] = value

                control.change(
                    note, [control, values], None, queue=False, show_progress="hidden", api_visibility="private"
                )


def _kind(annotation: Any) -> Any:
    parts = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    known = [part for part in parts if part is not type(None)]
    if set(known) == {int, float}:
        return str  # a share or a count: typed, since 1 and 1.0 are not the same
    if len(known) != 1:
        return str
    if typing.get_origin(known[0]) is Literal:
        return typing.get_args(known[0])
    return known[0] if known[0] in (bool, int, float) else str


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (Union, types.UnionType)


def _texts(cls: type[Strategy]) -> dict[str, str]:
    """Field -> text, from the docstring's lines "name: text" and "name, name: text", and those that go on with them."""
    fields = {field.name for field in dataclasses.fields(cls)}
    texts: dict[str, str] = {}
    names: list[str] = []
    for line in _lines(cls):
        found = re.match(r"([\w, ]+):\s+(.*)", line)
        heads = found[1].split(", ") if found else []
        if found and fields.issuperset(heads):
            names, line = heads, found[2]
        elif not line:
            names = []
        for name in names:
            texts[name] = f"{texts.get(name, '')} {line}".strip()
    return texts


def _lines(cls: type[Strategy]) -> Iterator[str]:
    return (line.strip() for line in (cls.__doc__ or "").splitlines())
