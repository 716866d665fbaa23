"""The engine of text strategies: a cache on a language model, or on a pipeline that calls one."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import Any

from torch import nn

from cachedit.disguise import disguised
from cachedit.errors import UnsupportedModelError
from cachedit.profile import Profile
from cachedit.text.dropin import DropIn
from cachedit.text.options import TextOptions
from cachedit.text.options import split_options as split_options
from cachedit.text.record import TextRun
from cachedit.text.session import ATTRIBUTE, Setting, latest
from cachedit.text.strategy import TextStrategy


def prepare(target: Any, strategy: TextStrategy, profile: Profile | str | Path | None, options: TextOptions) -> DropIn:
    """What stands in for the forward of the target's model; every error is raised here, ``target`` is not touched."""
    model = target if isinstance(target, nn.Module) else getattr(target, "model", None)
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(
            f"{type(target).__name__} has no language model. Allowed: a language model, or a pipeline that has one as "
            "pipe.model, such as diffusers' LLaDA2Pipeline."
        )
    setting = Setting.of(model, strategy, options, profile)
    if target is not model and setting.strategy.needs_foresight:
        raise ValueError(
            f"{setting.strategy} must know the order of the commits beforehand, and {type(target).__name__} decides by "
            "confidence. Allowed: another strategy, or cachedit.generate(..., order='random')."
        )
    return DropIn(setting, None if target is model else target)


def attach(target: Any, session: DropIn) -> None:
    """Put it on the model, and the pipeline's calls through it."""
    remove(session.setting.model)
    session.attach()
    if session.pipeline is not None:
        target.__dict__[ATTRIBUTE] = session
        cls: Any = type(target)
        target.__class__ = _called_through(cls)


def remove(target: Any) -> None:
    """Take off what is on ``target``; nothing if there is nothing."""
    session = _find(target)
    if session is None:
        return
    session.detach()
    pipeline = session.pipeline
    if pipeline is not None and pipeline.__dict__.pop(ATTRIBUTE, None) is not None:
        pipeline.__class__ = type(pipeline).__base__


def last_run(target: Any) -> TextRun | None:
    """Record of the last run on ``target``; None before the first."""
    return latest(target)


def setting_on(model: Any) -> Setting | None:
    """How a model is wrapped; None if it is not."""
    session = _find(model)
    return None if session is None else session.setting


def _find(target: Any) -> DropIn | None:
    found: DropIn | None = getattr(target, "__dict__", {}).get(ATTRIBUTE)
    return found


@functools.cache
def _called_through(cls: Any) -> Any:
    """A pipeline class whose calls tell the cache where a run starts and ends, and which is otherwise ``cls``."""
    signature = inspect.signature(cls.__call__)

    @functools.wraps(cls.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        session: DropIn = self.__dict__[ATTRIBUTE]
        with session.run(signature.bind_partial(self, *args, **kwargs).arguments):
            return cls.__call__(self, *args, **kwargs)

    return disguised(cls, __call__=call)
