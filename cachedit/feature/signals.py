"""What a signal-driven policy listens to: one number per step and sample, and who decides by it.

Every sample of a batch is listened to as if it were alone, and a step is computed as soon as one of them would be.
Features are copied before they are kept: models and pipelines write into theirs, and CUDA graphs over theirs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed
from torch.utils._pytree import tree_leaves

from cachedit.errors import UnsupportedModelError
from cachedit.feature.outputs import tensors_of
from cachedit.kernels import capture
from cachedit.strategy import Context, FeatureStrategy

Rows = tuple[torch.Tensor, ...]
"""Features with one row per sample: one tensor [B, everything else], or B of [1, everything else]."""


class Signal:
    """Something that is measured at every step, before it is decided.

    Class attributes:
        name: under which a strategy asks for it.
        where: "input" of the denoiser, "attention" of the first block, or behind the leading "blocks".
    """

    kinds: ClassVar[dict[str, type[Signal]]] = {}
    where: ClassVar[str] = "blocks"

    def __init_subclass__(cls, name: str, **kwargs: Any) -> None:
        """Enter the class under its name."""
        super().__init_subclass__(**kwargs)
        cls.kinds[name] = cls

    def measure(self, entered: Any, left: Any, samples: int | None) -> torch.Tensor:
        """One number per sample [B]; not finite while there is nothing to compare with, and where that is zero.

        Args:
            entered: what entered the denoiser or its stack; None at the attention.
            left: what came out of the leading blocks, or what enters the attention of the first; None at the input.
            samples: size of the batch, where the model may have folded frames or tokens into it.
        """
        raise NotImplementedError

    def settle(self, fired: Sequence[bool]) -> None:
        """This step is computed; it is the one to compare with from now on, for the samples that ``fired``."""

    def observe(self, output: Any) -> None:
        """Look at the output of a computed step."""

    def trend(self) -> torch.Tensor | None:
        """How the probe of every sample has moved [B]; None if the signal does not tell."""
        return None


class ModulatedInput(Signal, name="modulated_input"):
    """Relative L1 change of what enters the first block's attention since the step before (arXiv 2411.19108)."""

    where = "attention"
    _before: Rows | None = None

    def measure(self, entered: Any, left: Any, samples: int | None) -> torch.Tensor:
        """``mean |m_i - m_{i-1}| / mean |m_{i-1}|``."""
        now, before = _rows(left, samples), self._before
        self._before = now
        return _change(now, before)


class FirstBlocks(Signal, name="first_blocks"):
    """Relative L1 change of the leading blocks' residual since the last computed step (ParaAttention)."""

    _computed: Rows | None = None

    def measure(self, entered: Any, left: Any, samples: int | None) -> torch.Tensor:
        """``mean |d_i - d_a| / mean |d_a|``, a the last computed step."""
        self._now, change = _captured(entered, left, samples, self._computed)
        return change

    def settle(self, fired: Sequence[bool]) -> None:
        """Compare with this step from now on."""
        self._computed = _taken(fired, self._now, self._computed)


class ProbeGap(Signal, name="probe_gap"):
    """How much more the leading blocks' state changed in a step than what entered them (arXiv 2508.17356)."""

    _before: tuple[Rows, Rows] | None = None
    _newest: Rows | None = None
    _older: Rows | None = None

    def measure(self, entered: Any, left: Any, samples: int | None) -> torch.Tensor:
        """``|change of the state - change of what entered|``, both relative L1 since the step before."""
        self._residual, _ = _captured(entered, left, samples)
        now, before = (_rows(entered, samples), _rows(left, samples)), self._before
        self._before = now
        if before is None:
            return _change(now[0], None)
        return (_change(now[1], before[1]) - _change(now[0], before[0])).abs()

    def settle(self, fired: Sequence[bool]) -> None:
        """Keep the residuals of the two last computed steps: of all samples, because the cache keeps theirs."""
        self._newest, self._older = self._residual, self._newest

    def trend(self) -> torch.Tensor | None:
        """Way of the probe from the older computed step to here, over its way to the newer one; 1 if it stood still."""
        if self._newest is None or self._older is None:
            return None
        way = _mean(_difference(self._newest, self._older))
        ratio = _mean(_difference(self._residual, self._older)) / way
        return torch.where(ratio.isfinite(), ratio, 1.0)


class OutputChange(Signal, name="output_change"):
    """Change of the output, foretold from that of the latent by their ratio at computed steps (arXiv 2507.02860)."""

    where = "input"
    _now: Rows | None = None
    _computed: tuple[Rows, Rows] | None = None
    _rate: Rows | None = None
    _fired: Sequence[bool] = ()

    def measure(self, entered: Any, left: Any, samples: int | None) -> torch.Tensor:
        """``rate * mean |x_i - x_{i-1}| / mean |v_a|``, a the last computed step."""
        before, self._now, self._fired = self._now, _rows(entered, samples), ()
        if before is None or self._computed is None or self._rate is None:
            return _change(self._now, None)
        return _ratio(self._rate[0] * _mean(_difference(self._now, before)), _mean(self._computed[1]))

    def settle(self, fired: Sequence[bool]) -> None:
        """Compare with this step once its output is known."""
        self._fired = fired

    def observe(self, output: Any) -> None:
        """Take the rate ``mean |v_a - v_b| / mean |x_a - x_b|`` between the two last computed steps a and b."""
        fired, last = self._fired, self._computed
        if not fired or self._now is None:
            return
        now = self._now, _rows(output, len(fired))
        if last is None:
            self._computed = now
            return
        moved, changed = (_mean(_difference(a, b)) for a, b in zip(now, last, strict=True))
        self._rate = _taken(fired, (_ratio(changed, moved),), self._rate)
        self._computed = _taken(fired, now[0], last[0]), _taken(fired, now[1], last[1])


class Listener:
    """Hears a signal along one run of one denoiser, and asks the strategy for every sample.

    Args:
        strategy: that decides.

    Attributes:
        group: process group whose ranks run one model, so that all hear the loudest of them; None for one process.
    """

    def __init__(self, strategy: FeatureStrategy) -> None:
        self.strategy = strategy
        self.group: Any = None
        self.where = Signal.kinds[strategy.signal].where
        self.forget()

    def forget(self) -> None:
        """Begin a new run."""
        self.release()
        self._branch, self._trends = "", [1.0]
        self._trails: list[list[float]] = []
        self._computed: list[list[int]] = []
        self._fired: list[bool] = []

    def release(self) -> None:
        """Drop every tensor; what was heard stays."""
        self.signal = Signal.kinds[self.strategy.signal]()

    def hear(self, entered: Any, left: Any, samples: int | None = None, branch: str = "") -> float | None:
        """Measure this step as ``Signal.measure`` does; the loudest sample's value, None if it is not finite.

        Two branches are not compared: after a change of ``branch`` the signal has nothing to compare with.
        """
        if branch != self._branch:
            self.release()
            self._branch = branch
        values, trend = self.signal.measure(entered, left, samples), self.signal.trend()
        heard = torch.stack([values, torch.ones_like(values) if trend is None else trend])  # [2, B]
        heard = heard.nan_to_num(nan=math.inf, posinf=math.inf)
        if self.group is not None:
            torch.distributed.all_reduce(heard, torch.distributed.ReduceOp.MAX, self.group)
        loudness, trends = heard.tolist()  # here, once a step, the host waits for the device
        self._trends = trends if trend is not None else [1.0]
        if len(self._trails) != len(loudness):
            self._trails, self._computed = [[] for _ in loudness], [[] for _ in loudness]
        for trail, value in zip(self._trails, loudness, strict=True):
            trail.append(value)
        self._fired = [True] * len(loudness)
        loudest = max(loudness)
        return loudest if math.isfinite(loudest) else None

    def should_compute(self, ctx: Context, most_reused: int | None = None) -> bool | str:
        """The strategy's answer, of the sample that needs the step most.

        Args:
            ctx: of the run; every sample is asked for with its own signals and its own computed steps.
            most_reused: most reused steps in a row, whatever the strategy says; None leaves it to the strategy.
        """
        answers = [self._answer(one, most_reused) for one in self._contexts(ctx)]
        self._fired = [bool(answer) for answer in answers]
        return next((answer for answer in answers if answer), False)

    def settle(self, step: int, computed: bool) -> None:
        """The step is decided; the samples that asked for it count from here, or all if none did and it is computed."""
        if not computed:
            return
        if True not in self._fired:
            self._fired = [True] * len(self._fired)
        for trail, steps, fired in zip(self._trails, self._computed, self._fired, strict=True):
            if fired:
                trail.clear()
                steps.append(step)
        self.signal.settle(self._fired)

    def trends(self) -> list[float]:
        """The trend of every sample; a single 1 if the signal has none."""
        return self._trends

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        held = {id(x): x for x in tree_leaves(vars(self.signal)) if isinstance(x, torch.Tensor)}
        return sum([x.nbytes for x in held.values()])

    def _answer(self, one: Context, most_reused: int | None) -> bool | str:
        if not math.isfinite(sum(one.signals)):
            return "nothing finite to compare with"
        if most_reused is not None and one.step - one.computed_steps[-1] > most_reused:
            return f"at most {most_reused} reused in a row in a short run"
        return self.strategy.should_compute(one)

    def _contexts(self, ctx: Context) -> list[Context]:
        trends = self._trends if len(self._trends) == len(self._trails) else self._trends * len(self._trails)
        return [
            replace(ctx, signals=tuple(trail), trend=trend, computed_steps=computed or ctx.computed_steps)
            for trail, computed, trend in zip(self._trails, self._computed, trends, strict=True)
        ]


def _rows(features: Any, samples: int | None) -> Rows:
    """A copy of features, one row per sample."""
    rows = [x.clone(memory_format=torch.contiguous_format) for x in tensors_of(features)]
    if not isinstance(features, torch.Tensor):
        return tuple([x.reshape(1, -1) for x in rows])
    return tuple([x.reshape(_count(x, samples), -1) for x in rows])


def _captured(entered: Any, left: Any, samples: int | None, before: Rows | None = None) -> tuple[Rows, torch.Tensor]:
    """What leaves the probe minus what entered it, one row per sample, and its relative L1 change from ``before``."""
    if entered.shape != left.shape:
        raise UnsupportedModelError(
            f"the leading blocks take {list(entered.shape)} and return {list(left.shape)}, because the model joins, "
            "splits or turns its streams between them. Allowed: leading blocks of one list; choose fewer."
        )
    count = _count(left, samples)
    comparable = before is not None and before[0].shape == (count, left.numel() // count)
    compared = before[0].view(left.shape) if before and comparable else None
    residual, sums = capture(entered, left, compared, ("change", "previous"))
    change, level = (x.reshape(count, -1).sum(1) for x in (sums.change, sums.previous))  # both zero without ``before``
    return (residual.reshape(count, -1),), _ratio(change, level)


def _count(x: torch.Tensor, samples: int | None) -> int:
    """Number of rows: the samples, if each of them is some whole rows of ``x``."""
    return samples if samples is not None and len(x) % samples == 0 else len(x)


def _difference(a: Rows, b: Rows) -> Rows:
    return tuple([x - y for x, y in zip(a, b, strict=True)])


def _mean(rows: Rows) -> torch.Tensor:
    """Mean magnitude of every row [B], in fp32 at least."""
    return torch.cat([x.abs().mean(1, dtype=torch.promote_types(x.dtype, torch.float32)) for x in rows])


def _ratio(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a / b``; infinite where ``b`` is zero, even if ``a`` is, too."""
    return torch.where(b > 0, a / b, math.inf)


def _change(now: Rows, before: Rows | None) -> torch.Tensor:
    """Relative L1 change of every row; infinite if it cannot be told."""
    if before is None or [x.shape for x in now] != [x.shape for x in before]:
        return torch.full_like(_mean(now), math.inf)
    return _ratio(_mean(_difference(now, before)), _mean(before))


def _taken(fired: Sequence[bool], now: Rows, before: Rows | None) -> Rows:
    """``now`` for the samples that fired and ``before`` for the others."""
    if before is None or all(fired):
        return now
    if len(now) > 1:
        return tuple([a if one else b for one, a, b in zip(fired, now, before, strict=True)])
    (a,), (b,) = now, before
    # Not blocking: the host must not wait for the device here.
    mask = torch.tensor(fired).to(a.device, non_blocking=True).reshape(-1, *[1] * (a.ndim - 1))
    return (torch.where(mask, a, b),)
