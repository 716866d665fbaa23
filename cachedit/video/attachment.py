"""Putting a video session on a pipeline and taking it off again, all or nothing."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from cachedit.disguise import disguised
from cachedit.errors import UnsupportedModelError
from cachedit.profile import Profile
from cachedit.video.forcing import ATTRIBUTE as FORCING
from cachedit.video.forcing import DiffusionForcing, forced
from cachedit.video.network import attach as attach_processors
from cachedit.video.network import check_model
from cachedit.video.network import detach as detach_processors
from cachedit.video.record import VideoRun
from cachedit.video.session import VideoSession
from cachedit.video.strategy import VideoStrategy

ATTRIBUTE = "_cachedit_video"
Session = VideoSession | DiffusionForcing
_last_runs: weakref.WeakKeyDictionary[Any, VideoRun] = weakref.WeakKeyDictionary()


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], None]:
    """All options are the strategy's own."""
    return dict(options), None


def prepare(target: Any, strategy: VideoStrategy, profile: Profile | str | Path | None, options: None) -> Session:
    """Build a session without touching ``target``; every error is raised here.

    Raises:
        UnsupportedModelError: not a Wan pipeline with one denoiser.
        TypeError: a profile, which video does not read.
    """
    if profile is not None:
        raise TypeError(f"{type(strategy).__name__} reads no profile; drop profile={str(profile)[:80]!r}")
    name, model = type(target).__name__, getattr(target, "transformer", None)
    forcing = hasattr(target, "generate_timestep_matrix")
    if model is None or not hasattr(target, "encode_prompt") or not hasattr(target, "video_processor"):
        raise UnsupportedModelError(
            f"{name} cannot be rolled out. Allowed: a WanPipeline or a SkyReels-V2 diffusion forcing pipeline, whose "
            "other parts are needed too; cachedit.video.CausalNetwork drives a transformer by hand."
        )
    if getattr(target, "transformer_2", None) is not None:
        raise UnsupportedModelError(
            f"{name} has two denoisers, one of which would have to attend to what the other wrote. Allowed: one."
        )
    check_model(model)
    if forcing != type(model).__name__.startswith("SkyReels"):
        raise UnsupportedModelError(
            f"{name} with a {type(model).__name__} cannot be rolled out. Allowed: a WanPipeline, or a SkyReels-V2 "
            "pipeline for diffusion forcing."
        )
    plan = strategy.plan()
    if forcing and plan.recalled:
        raise UnsupportedModelError(
            f"{name} has a window that is its own, and nothing to recall. Allowed: a WanPipeline, or recalled=0."
        )
    return DiffusionForcing(repr(strategy), plan.quant) if forcing else VideoSession(repr(strategy), plan)


def attach(target: Any, session: Session) -> None:
    """Put the session on the pipeline and our processors on its transformer."""
    cls, model = cast(Any, type(target)), target.transformer
    try:
        target.__dict__[ATTRIBUTE] = session
        attach_processors(model, session.current)
        if isinstance(session, DiffusionForcing):
            model.__dict__[FORCING] = session
            model.__class__ = forced(cast(Any, type(model)))
        target.__class__ = _called_through(cls, not isinstance(session, DiffusionForcing))
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
    model = target.transformer
    detach_processors(model)
    if model.__dict__.pop(FORCING, None) is not None and getattr(type(model), FORCING, False):
        model.__class__ = type(model).__base__
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


def _find(target: Any) -> Session | None:
    return getattr(target, "__dict__", {}).get(ATTRIBUTE)


@functools.cache
def _called_through(cls: Any, streams: bool) -> Any:
    """A pipeline class whose calls are the session's, perhaps with ``stream``, and which is otherwise ``cls``."""

    def rolled_out(self: Any, prompt: Any = None, **arguments: Any) -> Any:
        return self.__dict__[ATTRIBUTE].call(self, prompt, **arguments)

    def stream(self: Any, prompt: Any = None, **arguments: Any) -> Any:
        return self.__dict__[ATTRIBUTE].stream(self, prompt, **arguments)

    @functools.wraps(cls.__call__)
    def kept(self: Any, *arguments: Any, **named: Any) -> Any:
        return self.__dict__[ATTRIBUTE].call(self, functools.partial(cls.__call__, self), *arguments, **named)

    rolled_out.__doc__, stream.__doc__ = VideoSession.call.__doc__, VideoSession.stream.__doc__
    calls = {"__call__": rolled_out, "stream": stream} if streams else {"__call__": kept}
    return disguised(cls, **calls, **{ATTRIBUTE: True})
