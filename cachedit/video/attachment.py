"""Putting a video session on a pipeline and taking it off again, all or nothing."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cachedit.errors import UnsupportedModelError
from cachedit.profile import Profile
from cachedit.video.network import attach as attach_processors
from cachedit.video.network import check_model
from cachedit.video.network import detach as detach_processors
from cachedit.video.record import VideoRun
from cachedit.video.session import VideoSession
from cachedit.video.strategy import VideoStrategy

ATTRIBUTE = "_cachedit_video"
_last_runs: weakref.WeakKeyDictionary[Any, VideoRun] = weakref.WeakKeyDictionary()


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], None]:
    """All options are the strategy's own."""
    return dict(options), None


def prepare(target: Any, strategy: VideoStrategy, profile: Profile | str | Path | None, options: None) -> VideoSession:
    """Build a session without touching ``target``; every error is raised here.

    Raises:
        UnsupportedModelError: not a Wan text-to-video pipeline with one denoiser.
        TypeError: a profile, which video does not read.
    """
    if profile is not None:
        raise TypeError(f"{type(strategy).__name__} reads no profile; drop profile={str(profile)[:80]!r}")
    name, model = type(target).__name__, getattr(target, "transformer", None)
    if model is None or not hasattr(target, "encode_prompt") or not hasattr(target, "video_processor"):
        raise UnsupportedModelError(
            f"{name} cannot be rolled out. Allowed: a WanPipeline, whose text encoder and autoencoder are needed too; "
            "cachedit.video.CausalNetwork drives a transformer by hand."
        )
    if getattr(target, "transformer_2", None) is not None:
        raise UnsupportedModelError(
            f"{name} has two denoisers, one of which would have to attend to what the other wrote. Allowed: one."
        )
    check_model(model)
    return VideoSession(repr(strategy), strategy.plan())


def attach(target: Any, session: VideoSession) -> None:
    """Put the session on the pipeline and our processors on its transformer."""
    cls: Any = type(target)
    try:
        target.__dict__[ATTRIBUTE] = session
        attach_processors(target.transformer, session.current)
        target.__class__ = _rolled_out(cls)
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
    del target.__dict__[ATTRIBUTE]
    if getattr(type(target), ATTRIBUTE, False):
        target.__class__ = type(target).__base__


def last_run(target: Any) -> VideoRun | None:
    """Record of the last rollout of a pipeline, wrapped or since unwrapped; None before the first."""
    session = _find(target)
    run = session.run if session is not None else None
    if run is not None:
        return run
    try:
        return _last_runs.get(target)
    except TypeError:  # what cannot be referred to weakly was never wrapped
        return None


def _find(target: Any) -> VideoSession | None:
    return getattr(target, "__dict__", {}).get(ATTRIBUTE)


@functools.cache
def _rolled_out(cls: Any) -> Any:
    """A pipeline class whose calls are rollouts, with ``stream`` beside, and which is otherwise ``cls``."""

    def call(self: Any, prompt: Any = None, **arguments: Any) -> Any:
        return self.__dict__[ATTRIBUTE].call(self, prompt, **arguments)

    def stream(self: Any, prompt: Any = None, **arguments: Any) -> Any:
        return self.__dict__[ATTRIBUTE].stream(self, prompt, **arguments)

    call.__doc__, stream.__doc__ = VideoSession.call.__doc__, VideoSession.stream.__doc__
    body = {"__call__": call, "stream": stream, "__module__": cls.__module__, "__doc__": cls.__doc__, ATTRIBUTE: True}
    swapped = type(cls.__name__, (cls,), body)
    swapped.__qualname__ = cls.__qualname__
    return swapped
