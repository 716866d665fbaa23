"""Rules by which many strategies decide when to compute."""

from __future__ import annotations

from cachedit.strategy import Context


def at_interval(ctx: Context, interval: int, warmup: int) -> bool | str:
    """The warm-up, then one step in ``interval``, counted from its last step; a later expert begins anew.

    ``cachedit.schedules.every`` lists these steps.
    """
    position = ctx.step - ctx.computed_steps[0]
    if position < warmup:
        return "warm-up"
    return (position - warmup + 1) % interval == 0


def over_budget(ctx: Context, change: float, threshold: float, max_skip_steps: int) -> bool | str:
    """The last step, the cap on reused steps in a row, then the change summed since the last computed step."""
    assert ctx.schedule.num_steps is not None
    if ctx.step == ctx.schedule.num_steps - 1:
        return "last step"
    if ctx.step - ctx.computed_steps[-1] > max_skip_steps:
        return "max_skip_steps reached"
    return False if change < threshold else "summed change reached the threshold"
