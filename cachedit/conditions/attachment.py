"""Putting a condition session on a pipeline and taking it off again, all or nothing."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from cachedit.conditions.processors import attach as attach_processors
from cachedit.conditions.processors import detach as detach_processors
from cachedit.conditions.record import ConditionRun
from cachedit.conditions.session import ConditionSession, check_pipeline
from cachedit.conditions.strategy import ConditionStrategy
from cachedit.disguise import disguised
from cachedit.profile import Profile

ATTRIBUTE = "_cachedit_conditions"
_last_runs: weakref.WeakKeyDictionary[Any, ConditionRun] = weakref.WeakKeyDictionary()


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], None]:
    """All options are the strategy's own."""
    return dict(options), None


def prepare(
    target: Any, strategy: ConditionStrategy, profile: Profile | str | Path | None, options: None
) -> ConditionSession:
    """Build a session without touching ``target``; every error is raised here.

    Raises:
        UnsupportedModelError: not a pipeline whose model can attend to a bank.
        TypeError: a profile, which these strategies do not read.
    """
    if profile is not None:
        raise TypeError(f"{type(strategy).__name__} reads no profile; drop profile={str(profile)[:80]!r}")
    check_pipeline(target)
    return strategy.session(target)


def attach(target: Any, session: ConditionSession) -> None:
    """Put the session on the pipeline and its model, and our processors on the model's blocks."""
    model = target.transformer
    try:
        target.__dict__[ATTRIBUTE] = model.__dict__[ATTRIBUTE] = session
        attach_processors(model, session.current)
        model.__class__ = _model_through(cast(Any, type(model)))
        target.__class__ = _pipeline_through(cast(Any, type(target)))
    except BaseException:
        remove(target)
        raise


def remove(target: Any) -> None:
    """Take off what is on the pipeline; nothing if there is nothing."""
    session = _find(target)
    if session is None:
        return
    if session.run is not None:
        _last_runs[target] = session.run
    detach_processors(target.transformer)
    for part in (target.transformer, target):
        part.__dict__.pop(ATTRIBUTE, None)
        if getattr(type(part), ATTRIBUTE, False):
            part.__class__ = type(part).__base__


def last_run(target: Any) -> ConditionRun | None:
    """Record of the last run of a pipeline, wrapped or since unwrapped; None before the first."""
    session = _find(target)
    if session is not None and session.run is not None:
        return session.run
    try:
        return _last_runs.get(target)
    except TypeError:  # what cannot be referred to weakly was never wrapped
        return None


def _find(target: Any) -> ConditionSession | None:
    return getattr(target, "__dict__", {}).get(ATTRIBUTE)


@functools.cache
def _pipeline_through(cls: Any) -> Any:
    """A pipeline class whose calls are the session's, and which is otherwise ``cls``."""

    @functools.wraps(cls.__call__)
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        return self.__dict__[ATTRIBUTE].call(self, functools.partial(cls.__call__, self), *arguments, **named)

    return disguised(cls, __call__=call, **{ATTRIBUTE: True})


@functools.cache
def _model_through(cls: Any) -> Any:
    """A model class whose calls are the session's; ``__call__``, as offloading hooks replace ``forward``."""
    names = list(inspect.signature(cls.forward).parameters)[1:]

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        inputs = {**dict(zip(names, arguments, strict=False)), **named}
        return self.__dict__[ATTRIBUTE].forward(self, functools.partial(cls.__call__, self), **inputs)

    return disguised(cls, __call__=call, **{ATTRIBUTE: True})
