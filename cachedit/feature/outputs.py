"""Sites at the end of the denoiser: its output, and what the branches of a step differ by."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from cachedit.feature.place import Forecast, Place, Residual
from cachedit.strategy import Output, Site

LOOKS = 2


class EndPlace(Place):
    """A site that is given by replacing the output of a pass in which the denoiser ran as little as possible.

    Attributes:
        reused: True in a pass whose output is replaced.
    """

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.reused = False
        self._captured: Residual | None = None
        self._forecast: Forecast | None = None

    def begin(self, reused: bool | Collection[int], forecast: Forecast | None) -> None:
        """Take the forecast for the pass that follows."""
        self.reused, self._forecast = bool(reused), forecast

    def end(self) -> None:
        """Nothing to do: the output is looked at once the denoiser has been left."""

    def captured(self) -> Residual | None:
        """What the last pass gave; None on a reused pass, and on one that has nothing to differ from."""
        return self._captured

    def release(self) -> None:
        """Drop every tensor."""
        self.reused, self._captured, self._forecast = False, None, None

    def leave(self, inputs: Any, output: Any) -> Any:
        """Note the output of a pass, or put the forecast in its place; returns what the caller is to get."""
        raise NotImplementedError


class OutputPlace(EndPlace):
    """The model output, or what it differs by from the latent.

    A reused output is the forecast and nothing else: what the pass itself would add, a control input for instance, is
    in it as it was when it was computed. With ``residual`` the latent is fresh, where output and latent have one shape.
    """

    site: Output

    def leave(self, inputs: Any, output: Any) -> Any:
        """Note the output, or replace it by the forecast."""
        given = list(_floats(output))
        latents = tensors_of(inputs) if self.site.residual else ()
        bases = [x if x.shape == y.shape else None for x, y in zip(latents, given, strict=False)]
        bases += [None] * (len(given) - len(bases))
        if self._forecast is None:
            pairs = zip(given, bases, strict=True)
            self._captured = tuple([y.clone() if x is None else y - x for y, x in pairs])
            return output
        values = [self._forecast.value(k, x) for k, x in enumerate(bases)]
        return _filled(output, iter([_own(v, y.dtype) for v, y in zip(values, given, strict=True)]))


class GuidancePlace(EndPlace):
    """What the later branches of a step differ by from its first.

    With guidance in one batch, what the first half of the batch differs by from the second; a reused pass then runs
    the second half alone. Everything that reaches the first branch, control inputs included, is fresh in the others.

    Attributes:
        batched: True if the two halves of the current batch are two branches of the same latents.
        leads: True in the pass of the first branch of a step.
    """

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._begun = False
        self.refresh()

    def refresh(self) -> None:
        """A run begins: nothing is known of its branches."""
        self.batched, self.leads = False, True
        self._looks: dict[str, int] = {}
        self._passes = self._passes_before = 0
        self._lead: Residual = ()

    def look_at(self, branch: str, latents: Any) -> None:
        """See whether a batch is that of two branches: the halves of its latents are equal at two steps of a run.

        At the first step alone, two samples that start from the same noise look alike. After that nothing is compared,
        because it would make the host wait for the device.
        """
        looks = self._looks.get(branch, 0)
        if 0 <= looks < LOOKS:
            looks = self._looks[branch] = looks + 1 if _halves_equal(latents) else -1
        self.batched = looks >= LOOKS

    @property
    def ready(self) -> bool:
        """True if this pass has what a difference can be added to."""
        return self.batched or (not self.leads and bool(self._lead))

    def begin(self, reused: bool | Collection[int], forecast: Forecast | None) -> None:
        """Take the forecast for the pass that follows."""
        super().begin(reused, forecast)
        self._begun = True

    def release(self) -> None:
        """Drop every tensor; what the first branch gave, only if no pass has begun since the last release."""
        super().release()
        if not self._begun:
            self._lead = ()
        self._begun = False

    def leave(self, inputs: Any, output: Any) -> Any:
        """Note the difference, or add the forecast of it to what the first branch gave."""
        if self.batched:
            return self._leave_batch(output)
        if self.leads:
            self._passes_before, self._passes = self._passes, 0
            self._lead, self._captured = tuple([x.clone() for x in _floats(output)]), None
        elif self._forecast is None:
            given = list(_floats(output))
            alike = [x.shape for x in given] == [x.shape for x in self._lead]
            self._captured = tuple([a - b for a, b in zip(given, self._lead, strict=True)]) if alike else None
        else:
            output = _filled(output, iter([self._forecast.value(k, lead) for k, lead in enumerate(self._lead)]))
        self._passes += 1
        if self._passes == self._passes_before:  # as many as the step before had: none will ask for it again
            self._lead = ()
        return output

    def _leave_batch(self, output: Any) -> Any:
        if self._forecast is None:
            self._captured = tuple([first - second for first, second in _halves(output)])
            return output
        values = [self._forecast.value(k, x) for k, x in enumerate(_floats(output))]
        return _doubled(output, iter(values))


def second_half(value: Any, latents: Any) -> Any:
    """The arguments of a call, or what is nested in them, for the second half of a batch.

    Cut is what has an entry per sample, or per frame of every sample: tensors, and in models that take lists these.

    Args:
        value: arguments of the call.
        latents: its main input, [B, ...], or a list of B samples.
    """
    batch = len(latents)
    if isinstance(value, torch.Tensor):
        return value[len(value) // 2 :] if value.ndim and len(value) in _lengths(latents) else value
    if isinstance(value, dict):
        return {key: second_half(item, latents) for key, item in value.items()}
    if isinstance(value, list) and len(value) == batch and (isinstance(latents, list) or _is_described(value)):
        return value[batch // 2 :]
    return type(value)([second_half(item, latents) for item in value]) if type(value) in (list, tuple) else value


def tensors_of(output: Any) -> Residual:
    """The tensors of a model's latents or of its main output: one, or one per sample where the model takes a list."""
    main = output if isinstance(output, (torch.Tensor, list)) else output[0]
    return (main,) if isinstance(main, torch.Tensor) else tuple(main)


def _lengths(latents: Any) -> tuple[int, ...]:
    """Lengths of what has an entry per sample, or per frame of every sample of a video [B, C, F, H, W]."""
    batch = len(latents)
    return (batch, batch * latents.shape[2]) if isinstance(latents, torch.Tensor) and latents.ndim == 5 else (batch,)


def _is_described(value: list[Any]) -> bool:
    """True for a list that tells something of every sample, such as its sizes."""
    return all(isinstance(item, (list, tuple)) and not list(_floats(item)) for item in value)


def _halves_equal(latents: Any) -> bool:
    if isinstance(latents, list):
        first, second = latents[: len(latents) // 2], latents[len(latents) // 2 :]
        return len(first) == len(second) > 0 and all(map(torch.equal, first, second))
    if not isinstance(latents, torch.Tensor) or latents.ndim < 2 or len(latents) % 2 or not len(latents):
        return False
    return torch.equal(*latents.chunk(2))


def _floats(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of an output that can be forecast, whatever they are nested in."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _floats(item)


def _halves(value: Any) -> Iterator[Sequence[torch.Tensor]]:
    """First and second half of those of a batch of two branches, in the order in which the second alone has them."""
    if isinstance(value, list):
        yield from zip(value[: len(value) // 2], value[len(value) // 2 :], strict=True)
    elif isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value.chunk(2)
    elif isinstance(value, (dict, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _halves(item)


def _filled(output: Any, values: Iterator[torch.Tensor]) -> Any:
    """An output like ``output`` that holds these values in the place of what can be forecast."""
    if isinstance(output, torch.Tensor):
        return next(values) if output.is_floating_point() else output
    return _like(output, lambda item: _filled(item, values))


def _doubled(output: Any, values: Iterator[torch.Tensor]) -> Any:
    """The output of both halves of a batch from that of the second and these values of the first."""
    if isinstance(output, list):
        return [next(values) for _ in output] + output
    if isinstance(output, torch.Tensor):
        return torch.cat([next(values), output]) if output.is_floating_point() else output
    return _like(output, lambda item: _doubled(item, values))


def _like(output: Any, change: Any) -> Any:
    """An output of the same type with every item changed; what has none is returned as it is."""
    if isinstance(output, dict):
        return type(output)(**{key: change(item) for key, item in output.items()})
    return type(output)([change(item) for item in output]) if type(output) in (list, tuple) else output


def _own(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of that dtype into which the caller may write: the forecast may be a kept tensor itself."""
    return value.clone() if value.dtype == dtype else value.to(dtype)
