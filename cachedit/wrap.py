"""wrap, unwrap, cached, last_run: the two verbs, the context manager and the record."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cachedit.profile import Profile
from cachedit.run import Run
from cachedit.strategy import FeatureStrategy, Strategy

if TYPE_CHECKING:
    from cachedit.feature.session import Observer

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
    return attach(target, strategy, profile=profile, **options)


def attach(
    target: T,
    strategy: str | Strategy,
    *,
    profile: Profile | str | Path | None = None,
    observer: Observer | None = None,
    **options: Any,
) -> T:
    """``wrap``, with an observer that is shown every computed step and its residuals (for calibration)."""
    from cachedit import strategies  # noqa: F401  (fills the registry)
    from cachedit.feature import attachment
    from cachedit.feature.options import split_options

    own, common = split_options(options)
    found = Strategy.find(strategy, own)
    if not isinstance(found, FeatureStrategy):
        raise TypeError(f"{type(found).__name__} is not a feature cache; allowed here: feature caches of the registry")
    session = attachment.prepare(target, found, profile, common, observer)
    unwrap(target)
    attachment.attach(target, session)
    return target


def unwrap(target: T) -> T:
    """Take the cache off; the object is exactly what it was. Does nothing to an object that is not wrapped."""
    from cachedit.feature import attachment

    session = attachment.find(target)
    if session is not None:
        attachment.detach(session)
    return target


@contextmanager
def cached(target: T, strategy: str | Strategy, **options: Any) -> Iterator[T]:
    """``wrap`` on entry, ``unwrap`` on exit. Takes the arguments of ``wrap``."""
    wrap(target, strategy, **options)
    try:
        yield target
    finally:
        unwrap(target)


def last_run(target: Any) -> Run | None:
    """Record of the last finished or aborted run of a wrapped (or since unwrapped) target; None before the first."""
    from cachedit.feature import attachment

    return attachment.last_run(target)
