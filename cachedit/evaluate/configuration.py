"""A cache to compare with the bare pipeline, and its form on the command line."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from cachedit.engine import engine_of
from cachedit.feature.attachment import find
from cachedit.profile import Profile
from cachedit.strategy import Strategy
from cachedit.text.decode import Request
from cachedit.text.strategy import TextStrategy
from cachedit.wrap import wrap

EXAMPLE = "magcache:threshold=0.12,max_skip_steps=3"
BASELINE = "baseline"
"""How rows call what the caches are compared with."""
SEPARATOR = re.compile(r",(?=\s*\w+\s*=)")  # a comma before "key=": lists and texts keep theirs


@dataclass(frozen=True)
class Configuration:
    """A cache to compare with the bare pipeline.

    Attributes:
        strategy: a name in any spelling, or an instance.
        options: for ``cachedit.wrap``.
        profile: for ``cachedit.wrap``; None: the one that is found for the model.
        label: how rows call it; "" takes the name of the strategy.
    """

    strategy: str | Strategy
    options: dict[str, Any] = field(default_factory=dict)
    profile: Profile | str | Path | None = None
    label: str = ""

    @property
    def name(self) -> str:
        """The label, or the strategy's name as it was given."""
        return self.label or (self.strategy if isinstance(self.strategy, str) else self.strategy.name)

    def reference(self) -> Configuration | None:
        """What this cache is compared with; None for the bare pipeline."""
        found = self.found().reference()
        return None if found is None else Configuration(found, label=BASELINE)

    def found(self) -> Strategy:
        """The strategy with its options.

        Raises:
            ValueError, TypeError: there is none of that name, or an option is impossible.
        """
        return Strategy.find(self.strategy, own_options(Strategy.named(self.strategy), self.options))

    def attach(self, pipe: Any) -> str:
        """Put this cache on ``pipe``, in place of any other; returns which profile it reads, "none" without one."""
        wrap(pipe, self.strategy, profile=self.profile, **self.options)
        session = find(pipe)
        found = session.profile if session is not None else None
        if found is None:
            return "none"
        return str(self.profile) if isinstance(self.profile, (str, Path)) else found.name or "without a name"


def parse_configuration(text: str) -> Configuration:
    """A strategy with its options in one word: "hyca", "magcache:threshold=0.12,max_skip_steps=3".

    The whole text becomes the label, so that a strategy can be there several times. ``profile`` names a profile and
    ``label`` another label; all other options are those of ``cachedit.wrap``, for text those of ``cachedit.generate``.

    Raises:
        ValueError: the text has another form, or no strategy has that name.
        TypeError: an option that the strategy does not have, whatever it is put on.
    """
    from cachedit import strategies  # noqa: F401  (fills the registry)

    name, colon, rest = text.partition(":")
    name = name.strip()
    if not name or (colon and not rest.strip()):
        raise ValueError(f"got the configuration {text!r}; allowed: NAME or NAME:KEY=VALUE,..., for example {EXAMPLE}.")
    options = parse_options([part.strip() for part in SEPARATOR.split(rest)] if colon else [], "a configuration")
    profile, label = options.pop("profile", None), str(options.pop("label", text))
    _check(Strategy.named(name), options)
    return Configuration(name, options, None if profile is None else str(profile), label)


def _check(named: type[Strategy], options: dict[str, Any]) -> None:
    """Raise ValueError or TypeError unless one of the classes of that name takes these options."""
    refused: list[Exception] = []
    for variant in named.variants():
        try:
            own = own_options(variant, options)
            variant.check_options(own)
            variant(**own)
        except (TypeError, ValueError) as error:
            refused.append(error)
        else:
            return
    raise refused[0]


def own_options(strategy: type[Strategy], options: dict[str, Any]) -> dict[str, Any]:
    """Those of some options that are a strategy's own, and not for all of its kind or, for text, of the call.

    Raises:
        ValueError: an option of its kind has an impossible value.
    """
    own, _ = engine_of(strategy).split_options(options)
    if not issubclass(strategy, TextStrategy):
        return own
    return {key: value for key, value in own.items() if key not in {field.name for field in fields(Request)}}


def parse_options(pairs: list[str], asked: str = "--option") -> dict[str, Any]:
    """``key=value`` texts as options of ``cachedit.wrap``.

    Values are read as Python or JSON literals ("0.1", "true", "[1, 2]"), ``torch.bfloat16`` as a dtype, and anything
    else as text.

    Args:
        pairs: the texts.
        asked: what they were given to, for the error.

    Raises:
        ValueError: a text without ``=``.
    """
    options = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise ValueError(f"{asked} got {pair!r}; allowed: key=value, for example threshold=0.1.")
        options[key] = _literal(value)
    return options


def _literal(text: str) -> Any:
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    if text.startswith("torch."):
        import torch

        found = getattr(torch, text.removeprefix("torch."), text)
        return found if isinstance(found, torch.dtype) else text
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return tuple(value) if isinstance(value, list) else value
