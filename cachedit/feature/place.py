"""What every kind of site has in common once it has been found in a denoiser."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from cachedit.kernels import forecast, low_pass
from cachedit.strategy import Site

Residual = tuple[torch.Tensor, ...]
Weights = Sequence[torch.Tensor] | None


class Forecast:
    """What a reused pass gives for each tensor of a site: a weighted sum of its computed ones, perhaps corrected.

    Attributes:
        history: per tensor of the site, the computed ones, oldest first.
        weights: one tensor per computed one, that broadcasts to it; None gives the newest.
        low: difference of the low band's weights from ``weights``; None without bands.
        cut: share of the frequencies that is low.
        correction: scale and shift, one number per channel; None leaves the sum as it is.
    """

    def __init__(
        self,
        history: Sequence[Residual] = (),
        weights: Weights = None,
        low: Weights = None,
        cut: float = 0.0,
        correction: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        self.history = list(zip(*history, strict=True))
        self.weights, self.low, self.cut, self.correction = weights, low, cut, correction

    def value(self, k: int, x: torch.Tensor | None = None) -> torch.Tensor:
        """The forecast of tensor ``k``, added to ``x`` if there is one; without it perhaps the newest one itself."""
        history = self.history[k]
        weights = self.weights if self.weights is None else _fitted(self.weights, history[-1])
        if self.low is None and self.correction is None:
            return forecast(x, history, weights)
        total = forecast(None, history, weights)
        if self.low is not None:
            total = total + low_pass(forecast(None, history, self.low), self.cut)
        if self.correction is not None:
            scale, shift = (along_channels(row, total) for row in self.correction)
            total = (total.float() * scale + shift).to(total.dtype)
        return total if x is None else x + total


def _fitted(weights: Sequence[torch.Tensor], x: torch.Tensor) -> Weights:
    """Weights of every sample or channel on the device of ``x``, repeated where the model folds frames into samples."""
    if not weights[0].ndim:
        return weights
    fitted = [weight.to(x.device, non_blocking=True) for weight in weights]
    if fitted[0].ndim > 1:
        fitted = [weight.repeat_interleave(len(x) // len(weight), 0) for weight in fitted]
    return fitted


def along_channels(row: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A row with one number per channel in the form that broadcasts to ``x``.

    Channels are the last axis of tokens [B, N, C], the second of pictures [B, C, H, W] and videos [B, C, F, H, W].
    """
    row = row.to(x.device)
    return row.reshape(-1, *[1] * (x.ndim - 2)) if x.ndim > 3 else row


class Place:
    """A site that was found in one denoiser.

    The runner calls ``begin`` before every tracked pass and ``end`` after it. In between, a place that is reused gives
    what its forecast says and does not run what the site covers; any other place notes what it is to capture. Outside
    of tracked passes the denoiser runs as if nothing were attached.

    Attributes:
        site: what the strategy asked for.
    """

    def __init__(self, site: Site) -> None:
        self.site = site

    def attach(self) -> None:
        """Put in place what makes the site watched and reusable."""

    def detach(self) -> None:
        """Take it out; nothing remains."""

    def refresh(self) -> None:
        """A run begins: take notice of blocks or modules that were replaced since the last one."""

    def begin(self, reused: bool | Collection[int], forecast: Forecast | None) -> None:
        """A pass begins.

        Args:
            reused: whether the site is reused; of a site of many modules perhaps the indices of those that are.
            forecast: what a reused pass gives; None on a pass that is not reused.
        """
        raise NotImplementedError

    def end(self) -> None:
        """The pass is over, however it ended. What was captured stays until it is released."""
        raise NotImplementedError

    def captured(self) -> Residual | None:
        """The tensors of the last pass that was not reused; None if the site was not reached."""
        raise NotImplementedError

    def release(self) -> None:
        """Drop every tensor."""
        raise NotImplementedError
