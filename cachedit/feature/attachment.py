"""Putting a session on an object and taking it off again, all or nothing."""

from __future__ import annotations

import functools
import weakref
from pathlib import Path
from typing import Any

from torch import nn

from cachedit.disguise import disguised
from cachedit.errors import ProfileError, UnsupportedModelError
from cachedit.feature.clock import Clock
from cachedit.feature.families import block_lists, family
from cachedit.feature.network import check_sites
from cachedit.feature.options import Options
from cachedit.feature.options import split_options as split_options
from cachedit.feature.runner import ATTRIBUTE, Runner
from cachedit.feature.session import Observer, Pipeline, Session
from cachedit.profile import Profile
from cachedit.run import Run
from cachedit.shipped import fingerprint, resolve
from cachedit.strategy import FeatureStrategy

DENOISERS = ("transformer", "transformer_2", "unet", "prior")
_last_runs: weakref.WeakKeyDictionary[Any, Run] = weakref.WeakKeyDictionary()


def prepare(
    target: Any,
    strategy: FeatureStrategy,
    profile: Profile | str | Path | None,
    options: Options,
    observer: Observer | None = None,
) -> Session:
    """Build a session without touching ``target``; every error is raised here.

    An observer is shown every computed step and its residuals.
    """
    denoisers = find_denoisers(target)
    inner = list(denoisers.values())
    rows = [family(module) for module in inner]
    for module in inner:
        check_sites(module, strategy, options.blocks)
    name, chosen = type(strategy).__name__, None
    if strategy.needed_arrays or (strategy.profile_arrays and profile is not None):
        prints = fingerprint(inner[0], block_lists(inner[0], options.blocks), len(inner))
        called = getattr(getattr(target, "config", None), "_name_or_path", "") or ""
        chosen = resolve(profile, prints, str(called), name, strategy.needed_arrays or strategy.profile_arrays)
    elif profile is not None:
        raise TypeError(f"{name} reads no profile; drop profile={str(profile)[:80]!r}")
    configured = _configured(strategy, chosen)
    for module in inner:
        check_sites(module, configured, options.blocks)  # the profile may have said what is cached
    clock = Clock(options.timesteps, options.num_inference_steps, rows[0].ascending, strategy.needs_response)
    pipeline = None if isinstance(target, nn.Module) else Pipeline(target)
    session = Session(configured, chosen, options, clock, pipeline, observer)
    if pipeline is None:
        session.check_schedule(type(target).__name__)
    session.runners = [Runner(module, expert, session) for expert, module in denoisers.items()]
    return session


def _configured(strategy: FeatureStrategy, profile: Profile | None) -> FeatureStrategy:
    """The strategy with its open options filled in; the profile may recommend what is impossible."""
    try:
        return strategy.configured(profile)
    except ProfileError:
        raise
    except ValueError as error:
        if profile is None:
            raise
        raise ProfileError(
            f"profile {profile.name or 'without a name'} says what cannot be: {error}. Calibrate again, correct its "
            "field 'defaults', or give the option to wrap."
        ) from error


def find_denoisers(target: Any) -> dict[str, nn.Module]:
    """Name -> denoiser of a pipeline, or the module itself.

    Raises:
        UnsupportedModelError: there is none.
    """
    if isinstance(target, nn.Module):
        return {"transformer": _inner(target)}
    found = {name: getattr(target, name, None) for name in DENOISERS}
    modules = {name: _inner(module) for name, module in found.items() if isinstance(module, nn.Module)}
    if not modules:
        raise UnsupportedModelError(
            f"{type(target).__name__} has no denoiser. Allowed: an nn.Module, or a pipeline with one of "
            f"{', '.join(DENOISERS)}."
        )
    return modules


def attach(target: Any, session: Session) -> None:
    """Put the session on ``target`` and its denoisers; whatever was on them is taken off first."""
    for runner in session.runners:
        old = find(runner.denoiser)
        if old is not None:
            detach(old)
    try:
        for runner in session.runners:
            runner.attach()
        if session.pipeline is not None:
            target.__dict__[ATTRIBUTE] = session
            if session.sampler is not None:
                session.sampler.attach(target)
            cls: Any = type(target)
            target.__class__ = _called_through_session(cls)
    except BaseException:
        detach(session)
        raise


def watch(target: Any, strategy: FeatureStrategy, observer: Observer | None = None, **options: Any) -> None:
    """Attach a strategy that reads no profile, in place of what is on ``target``, and an observer (for calibration).

    Options are those that ``wrap`` takes for every strategy.
    """
    session = prepare(target, strategy, None, split_options(options)[1], observer)
    remove(target)
    attach(target, session)


def detach(session: Session) -> None:
    """Take the session off; nothing remains but the record of its last run."""
    run = session.latest()
    session.close()
    target = session.pipeline.object if session.pipeline is not None else None
    for owner in [target, *[runner.denoiser for runner in session.runners]]:
        if owner is not None and run is not None:
            _last_runs[owner] = run
    for runner in session.runners:
        runner.detach()
    if session.sampler is not None:
        session.sampler.detach()
    if target is not None and target.__dict__.pop(ATTRIBUTE, None) is not None:
        target.__class__ = type(target).__base__


def remove(target: Any) -> None:
    """Take the session off that is on ``target``; nothing if there is none."""
    session = find(target)
    if session is not None:
        detach(session)


def find(target: Any) -> Session | None:
    """The session on ``target``; None if it is not wrapped."""
    found = getattr(_inner(target), "__dict__", {}).get(ATTRIBUTE)
    return found.session if isinstance(found, Runner) else found


def last_run(target: Any) -> Run | None:
    """Record of the last run on ``target``, wrapped or since unwrapped; None before the first."""
    session = find(target)
    run = session.latest() if session is not None else None
    return run if run is not None else _last_runs.get(_inner(target))


def _inner(target: Any) -> Any:
    """The module itself where torch.compile has wrapped it: both are one target."""
    return getattr(target, "_orig_mod", target) if isinstance(target, nn.Module) else target


@functools.cache
def _called_through_session(cls: Any) -> Any:
    """A pipeline class whose calls run inside the session, and which is otherwise ``cls``."""

    @functools.wraps(cls.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__[ATTRIBUTE].call(functools.partial(cls.__call__, self), *args, **kwargs)

    return disguised(cls, __call__=call)
