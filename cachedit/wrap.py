"""wrap, unwrap, cached, last_run: the two verbs, the context manager and the record."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from cachedit.engine import engine_of, loaded_engines
from cachedit.profile import Profile
from cachedit.registry import Strategy

T = TypeVar("T")


def wrap(target: T, strategy: str | Strategy, *, profile: Profile | str | Path | None = None, **options: Any) -> T:
    """Attach a cache to a pipeline or a denoiser. Wrapping again replaces it.

    Args:
        target: a ``DiffusionPipeline``, or a denoiser module that you drive yourself.
        strategy: a name in any spelling ("magcache", "mag-cache", "MagCache") or an instance.
        profile: a Profile, the path of one, ``"hub:org/name"`` (``profile.json`` of a hub repository), or the name of
            one that you calibrated or that is shipped. None: the one of this model, yours before the shipped one.
        **options: the strategy's own options (its dataclass fields), and for every strategy

            * ``blocks``: names of the block lists, in execution order, where they cannot be found;
            * ``timesteps`` or ``num_inference_steps``: the schedule of a module that is driven by hand;
            * ``timestep_arg``: name of the denoiser's timestep argument, where it cannot be found;
            * ``few_step_guard``: False lifts "no reuse up to 4 steps, one in a row up to 8";
            * ``cache_device``, ``cache_dtype``: where and how residuals are kept;
            * ``process_group``: ranks that share one model, for strategies that listen to a signal.

    Returns:
        ``target`` itself.

    Raises:
        UnsupportedModelError: the model cannot be cached, with the reason.
        ProfileError: no profile fits.
        TypeError, ValueError: an unknown strategy or an impossible option. ``target`` is untouched after any error.
    """
    from cachedit import strategies  # noqa: F401  (fills the registry)

    engine = engine_of(Strategy.named(strategy).serving(target))
    own, common = engine.split_options(options)
    session = engine.prepare(target, Strategy.find(strategy, own, target), profile, common)
    unwrap(target)
    engine.attach(target, session)
    return target


def unwrap(target: T) -> T:
    """Take the cache off; the object is exactly what it was. Does nothing to an object that is not wrapped."""
    for engine in loaded_engines():
        engine.remove(target)
    return target


@contextmanager
def cached(target: T, strategy: str | Strategy, **options: Any) -> Iterator[T]:
    """``wrap`` on entry, ``unwrap`` on exit. Takes the arguments of ``wrap``."""
    wrap(target, strategy, **options)
    try:
        yield target
    finally:
        unwrap(target)


def last_run(target: Any) -> Any:
    """Record of the last finished or aborted run of a wrapped (or since unwrapped) target; None before the first.

    A ``Run`` for feature caches; the engines for text and video have records of their own.
    """
    found = (engine.last_run(target) for engine in loaded_engines())
    return next((run for run in found if run is not None), None)
