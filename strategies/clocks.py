"""Times at which features were computed, on the clocks that strategies count by."""

from __future__ import annotations

from typing import Any, Literal

from cachedit.strategy import Context, Schedule

Clock = Literal["step", "sigma"]


def check_clock(clock: str, strategy: str) -> None:
    """Raise ValueError unless ``clock`` is one."""
    if clock not in ("step", "sigma"):
        raise ValueError(f"{strategy} clock={clock!r}; allowed: 'step', 'sigma'")


def times(ctx: Context, clock: Clock) -> tuple[list[float], float]:
    """When the kept features were computed, oldest first, and now.

    Args:
        ctx: the step that is forecast.
        clock: "step" for step indices; "sigma" for noise levels, unless they are unknown or two of them are equal.
    """
    steps = [*ctx.computed_steps, ctx.step]
    sigmas = ctx.schedule.sigmas
    if clock == "sigma" and sigmas is not None:
        levels = [sigmas[step] for step in steps]
        if len(set(levels)) == len(levels):
            return levels[:-1], levels[-1]
    return [float(step) for step in steps[:-1]], float(ctx.step)


def training_time(schedule: Schedule, step: int) -> float:
    """Timestep of a step on the scale of training: 1000 at pure noise, falling to 0."""
    timesteps, sigmas = schedule.timesteps, schedule.sigmas
    if timesteps is not None and max(timesteps) > 10 and timesteps[0] >= timesteps[-1]:  # others count to 1, or upwards
        return timesteps[step]
    return 1000 * (sigmas[step] if sigmas is not None else 1 - schedule.position(step))


def check_timesteps(strategy: str, name: str, limits: Any) -> None:
    """Raise ValueError unless ``limits`` are two numbers in rising order."""
    numbers = isinstance(limits, tuple) and len(limits) == 2 and all(type(limit) in (int, float) for limit in limits)
    if not numbers or not limits[0] < limits[1]:
        raise ValueError(f"{strategy} {name}={limits!r}; allowed: a tuple of two rising numbers on the scale 0 to 1000")
