"""The options that every text strategy accepts beside its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

Attention = Literal["full", "prefix", "block"]
ATTENTION: tuple[Attention, ...] = ("full", "prefix", "block")


@dataclass(frozen=True)
class TextOptions:
    """How the model is called; None where the model or the pipeline tells.

    Attributes:
        attention: "full" if every token sees every other, "prefix" if those of the prompt do not see the answer,
            "block" if none sees a block later than its own.
        block_length: tokens of a block.
        mask_token_id: id of a token that is not yet decided.
        shift: the logits at a token are for the token so many places later.
    """

    attention: Attention | None = None
    block_length: int | None = None
    mask_token_id: int | None = None
    shift: int | None = None

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range.
        """
        if self.attention not in (None, *ATTENTION):
            raise ValueError(f"attention={self.attention!r}; allowed: {', '.join(map(repr, ATTENTION))}, None")
        for name, lowest in (("block_length", 1), ("mask_token_id", 0), ("shift", 0)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < lowest):
                raise ValueError(f"{name}={value!r}; allowed: an integer, {lowest} or more, None")
        if self.shift not in (None, 0, 1):
            raise ValueError(f"shift={self.shift!r}; allowed: 0, or 1 for models that were autoregressive once, None")


COMMON = tuple(field.name for field in fields(TextOptions))


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], TextOptions]:
    """The strategy's own options, and those that every text strategy takes.

    Raises:
        ValueError: one of the latter has an impossible value.
    """
    common = {name: value for name, value in options.items() if name in COMMON}
    return {name: value for name, value in options.items() if name not in COMMON}, TextOptions(**common)
