"""The places of one denoiser, and what lets a pass run as little of it as possible."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import nn

from cachedit.errors import UnsupportedModelError
from cachedit.feature.blocks import StackPlace, Tap
from cachedit.feature.families import is_unet
from cachedit.feature.modules import ModulePlace
from cachedit.feature.outputs import EndPlace, GuidancePlace, OutputPlace
from cachedit.feature.parts import Ask
from cachedit.feature.place import Forecast, Place, Residual
from cachedit.feature.signals import Signal
from cachedit.feature.unet import SkipPlace, UNetBody
from cachedit.strategy import FeatureStrategy, Guidance, Module, Output, Site, Skip, Stack

Reused = bool | Collection[int]


class Network:
    """One denoiser with the places that a strategy asked for.

    Attributes:
        places: in the order of the strategy's sites.
        ends: those that replace the output.
        guidance: the one that forecasts a branch from another; None if none was asked for.
        halves: True in a pass that runs half of a batch of two branches.
        reused: which places the current pass reuses.
        active: True while a tracked pass is inside the denoiser.
        traceable: True if torch.compile may trace what follows the denoiser's forward.
    """

    def __init__(self, denoiser: nn.Module, strategy: FeatureStrategy, blocks: Sequence[str] | None) -> None:
        self.denoiser = denoiser
        self.tap: Tap | None = None
        self.unet: UNetBody | None = None
        self._lacking: UnsupportedModelError | None = None
        sites = strategy.sites
        if is_unet(denoiser) and blocks is None:
            if not all(isinstance(site, Module) for site in sites):
                self.unet = UNetBody(denoiser)
        else:
            self.tap = Tap(denoiser, blocks, [site for site in sites if isinstance(site, Stack)], _where(strategy))
        ranges = iter(self.tap.places if self.tap is not None else ())
        found = [next(ranges) if isinstance(site, Stack) else self._find(site) for site in sites]
        self.places = [place for place in found if place is not None]
        if not self.places:
            assert self._lacking is not None
            raise self._lacking
        self.ends = [place for place in self.places if isinstance(place, EndPlace)]
        self.guidance = next((place for place in self.places if isinstance(place, GuidancePlace)), None)
        self.traceable = all(isinstance(place, StackPlace) for place in self.places)
        self.halves = self.hollow = self.active = False
        self.reused: list[Reused] = [False] * len(self.places)
        self._ending = [place for place in self.places if not isinstance(place, StackPlace)]

    def _find(self, site: Site) -> Place | None:
        """The place of a site; None for a kind of modules that the model has not got."""
        if isinstance(site, Module):
            try:
                return ModulePlace(site, self.denoiser, self.tap.blocks if self.tap is not None else None)
            except UnsupportedModelError as error:
                self._lacking = error
                return None
        if isinstance(site, Output):
            return OutputPlace(site)
        if isinstance(site, Guidance):
            return GuidancePlace(site)
        if isinstance(site, Skip) and self.unet is not None:
            return self.unet.place(site)
        raise UnsupportedModelError(
            f"{type(self.denoiser).__name__} has no way up with skip connections, so there is nothing to cache there. "
            "Allowed for this strategy: UNets; `cachedit strategies` lists the others."
        )

    # -- attach and detach ----------------------------------------------------------------------------------------

    @property
    def _bodies(self) -> list[Any]:
        return [body for body in (self.tap, self.unet) if body is not None]

    def attach(self) -> None:
        """Put everything in place."""
        for body in [*self._bodies, *self.places]:
            body.attach()

    def detach(self) -> None:
        """Take everything out; nothing remains."""
        for body in [*self.places, *self._bodies]:
            body.detach()

    def refresh(self) -> None:
        """A run begins: take notice of what was replaced since the last one."""
        for body in [*self._bodies, *self.places]:
            body.refresh()

    # -- one pass -------------------------------------------------------------------------------------------------

    def choose(self, reused: list[Reused], leads: bool) -> list[Reused]:
        """Settle which places the pass reuses; ``leads`` for the first branch of a step.

        Returns:
            ``reused``, without the guidance where there is nothing to which a difference could be added.
        """
        self.halves = False
        if self.guidance is not None:
            at = self.places.index(self.guidance)
            self.guidance.leads = leads
            if not self.guidance.ready:
                reused[at] = False
            self.halves = bool(reused[at]) and self.guidance.batched
        self.reused = reused
        return reused

    def load(self, forecasts: Sequence[Forecast | None]) -> None:
        """Hand every place its forecast; None to one that is not reused."""
        for place, chosen, forecast in zip(self.places, self.reused, forecasts, strict=True):
            place.begin(chosen, forecast)

    def begin(self, ask: Ask | None, watch_all: bool) -> None:
        """A pass begins, in which ``ask`` may still be asked whether to reuse.

        Args:
            ask: asked inside the stack; None if it is decided.
            watch_all: True while it is not known that nothing is added between blocks for this kind of call.
        """
        if self.ends:
            self.hollow = not self.halves and any(end.reused for end in self.ends)
        if self.tap is not None:
            self.tap.begin(self.hollow, ask, watch_all)
        if self.unet is not None:
            self.unet.begin(self.hollow)
        self.active = True

    def end(self) -> None:
        """The pass is over, however it ended."""
        self.active = False
        if self.tap is not None:
            self.tap.end()
        if self.unet is not None:
            self.unet.end()
        for place in self._ending:
            place.end()

    def leave(self, inputs: Any, output: Any) -> Any:
        """The output that the caller is to get."""
        for end in self.ends:
            output = end.leave(inputs, output)
        return output

    def captured(self) -> list[Residual | None]:
        """What each place captured in the last pass; None for one that was reused or not reached."""
        captured: list[Residual | None] = []
        for place, reused in zip(self.places, self.reused, strict=True):
            captured.append(None if reused is True or self.hollow else place.captured())
        return captured

    def check_reached(self, captured: Sequence[Residual | None]) -> None:
        """Raise UnsupportedModelError if the block lists were not iterated in a computed pass."""
        for place, residual in zip(self.places, captured, strict=True):
            if residual is None and isinstance(place, (StackPlace, SkipPlace)):
                names = self.tap.names if self.tap is not None else ("down_blocks", "up_blocks")
                raise UnsupportedModelError(
                    f"{type(self.denoiser).__name__} did not iterate its block lists ({', '.join(names)}), so nothing "
                    "can be reused. Name the lists that its forward iterates: cachedit.wrap(..., blocks=[...])."
                )

    def release(self) -> None:
        """Drop every tensor."""
        for place in self.places:
            place.release()

    @property
    def open(self) -> bool:
        """True if something was added between blocks in the last watched pass."""
        return self.tap is not None and self.tap.open


def check_sites(denoiser: nn.Module, strategy: FeatureStrategy, blocks: Sequence[str] | None) -> None:
    """Raise UnsupportedModelError if a strategy that works on a stack is asked of a UNet."""
    stacked = any(isinstance(site, Stack) for site in strategy.sites) or _where(strategy) in ("attention", "blocks")
    if stacked and is_unet(denoiser) and blocks is None:
        raise UnsupportedModelError(
            f"{type(denoiser).__name__} is a UNet: its blocks are joined by skip connections, so there is no stack "
            f"whose residual {type(strategy).__name__} could cache. Allowed: strategies that cache the skip features, "
            "the modules or the output; `cachedit strategies` lists them."
        )


def _where(strategy: FeatureStrategy) -> str:
    return Signal.kinds[strategy.signal].where if strategy.signal else ""
