"""A pipeline, the prompts to run it on, and the ways in which calibration runs it."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from cachedit.calibration.work import Work
from cachedit.errors import UnsupportedModelError
from cachedit.feature.attachment import find_denoisers, watch
from cachedit.feature.families import block_lists
from cachedit.feature.place import Place, Residual
from cachedit.profile import Profile
from cachedit.run import Step
from cachedit.strategy import Context, FeatureStrategy, Site, Stack
from cachedit.wrap import cached, last_run, unwrap

K = TypeVar("K")
T = TypeVar("T")
FRESH_SEEDS = 10_000  # far from the seeds of the prompts themselves
Watcher = Callable[[Step, Mapping[Site, Residual]], None]


@dataclass(frozen=True)
class Watching(FeatureStrategy, abstract=True):
    """Computes every step, with these sites under watch."""

    history: ClassVar[int] = 0
    needs_response: ClassVar[bool] = True
    watched: tuple[Site, ...] = ()
    heard: str = ""

    @property
    def signal(self) -> str:  # type: ignore[override]
        """What is heard at every step."""
        return self.heard

    @property
    def sites(self) -> tuple[Site, ...]:
        """What is watched."""
        return self.watched

    def should_compute(self, ctx: Context) -> bool | str:
        """Always."""
        return True


@dataclass(frozen=True)
class ReusingOnce(FeatureStrategy, abstract=True):
    """Reuses one site at one step and computes everything else."""

    step: int = 0
    chosen: tuple[Site, ...] = (Stack(),)

    @property
    def sites(self) -> tuple[Site, ...]:
        """The one."""
        return self.chosen

    def should_compute(self, ctx: Context) -> bool:
        """All but that step."""
        return ctx.step != self.step


class Trial:
    """Runs of one pipeline on a few prompts, always from the same noise.

    Args:
        pipe: a diffusers pipeline; every run leaves it as it was.
        prompts: one run each.
        num_inference_steps: steps of every run.
        seed: of the first prompt's generator; the next prompt uses ``seed + 1`` and so on.
        call_options: further arguments of the pipeline call.
        work: does units of work, and counts the steps of every run; None does them here and keeps nothing.

    Attributes:
        sigmas: step -> noise level, of the runs that were watched.
        response: of the sampler in the run that was watched last, ``cachedit.feature.response``; None if unknown.
    """

    def __init__(
        self,
        pipe: Any,
        prompts: Sequence[str],
        num_inference_steps: int,
        seed: int = 0,
        call_options: Mapping[str, Any] | None = None,
        work: Work | None = None,
    ) -> None:
        self.pipe, self.prompts, self.num_inference_steps, self.seed = pipe, prompts, num_inference_steps, seed
        self.work, self.call_options = work or Work(), dict(call_options or {})
        self._options = dict(self.call_options)
        self._parameters = inspect.signature(type(pipe).__call__).parameters
        if "output_type" in self._parameters:
            self._options = {"output_type": "latent", **self._options}  # pixels are not measured
        self._uncached: dict[int, torch.Tensor] = {}
        self.sigmas: dict[int, float | None] = {}
        self.response: Sequence[float] | None = None

    @property
    def depth(self) -> int:
        """Number of blocks in the stack of the first denoiser."""
        denoiser = next(iter(find_denoisers(self.pipe).values()))
        lists = [denoiser.get_submodule(name) for name in block_lists(denoiser)]
        return sum(len(blocks) for blocks in lists if isinstance(blocks, nn.ModuleList))

    def map(self, name: str, keys: Sequence[K], work: Callable[[K], T]) -> list[T]:
        """Results of units of work in the order of their keys; see ``Work.map``."""
        return self.work.map(name, keys, work)

    def allows(self, sites: Sequence[Site], signal: str = "") -> bool:
        """True if these sites of the model can be watched, and the signal heard."""
        try:
            watch(self.pipe, Watching(tuple(sites), signal))
        except UnsupportedModelError:
            return False
        unwrap(self.pipe)
        return True

    def watch(self, k: int, sites: Sequence[Site], watcher: Watcher, signal: str = "") -> torch.Tensor:
        """Run prompt ``k`` uncached, show every call of the denoiser to the watcher, and return the final latents."""

        def observe(step: Step, places: Sequence[Place], captured: Sequence[Residual | None]) -> None:
            self.sigmas[step.index] = step.sigma
            watcher(
                step,
                {place.site: value for place, value in zip(places, captured, strict=True) if value is not None},
            )

        watch(self.pipe, Watching(tuple(sites), signal), observe)
        try:
            self._uncached[k] = self._run(k)
        finally:
            unwrap(self.pipe)
        record = last_run(self.pipe)
        self.response = None if record is None else record.response
        return self._uncached[k]

    def learn(self, k: int, latents: torch.Tensor, sigmas: Mapping[int, float | None]) -> None:
        """What ``watch`` of prompt ``k`` found, here or elsewhere."""
        self._uncached[k] = latents
        self.sigmas |= sigmas

    def latents(self, k: int, strategy: FeatureStrategy | None = None, profile: Profile | None = None) -> torch.Tensor:
        """Final latents of prompt ``k``, uncached or under a strategy."""
        if strategy is not None:
            with cached(self.pipe, strategy, profile=profile), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a trial that cannot reuse its step is no surprise
                return self._run(k)
        if k not in self._uncached:
            self._uncached[k] = self._run(k)
        return self._uncached[k]

    def change(self, k: int, step: int, sites: tuple[Site, ...] = (Stack(),)) -> tuple[float, float] | None:
        """Mean absolute and root mean square change of the final latents if the sites are reused at one step alone.

        Args:
            k: prompt.
            step: at which they are.
            sites: what is reused.

        Returns:
            None where that step could not be reused.
        """
        latents, record = self.latents(k, ReusingOnce(step, sites)), last_run(self.pipe)
        if record is None or record.reused_steps != [step]:
            return None
        difference = latents - self.latents(k)
        return float(difference.abs().mean()), float(difference.square().mean().sqrt())

    def rerun(self, k: int) -> torch.Tensor:
        """Final latents of prompt ``k`` of the pipeline as it is now, with whatever hooks are on it."""
        return self._run(k)

    def fresh_run(self, count: int) -> torch.Tensor:
        """As ``rerun``, of the prompts in turn and from a new noise for every ``count``."""
        return self._run(count % len(self.prompts), FRESH_SEEDS + count)

    def _run(self, k: int, seed: int | None = None) -> torch.Tensor:
        counted = 0

        def count(pipe: Any, index: int, timestep: Any, inputs: Any) -> dict[str, Any]:
            nonlocal counted
            if counted < self.num_inference_steps:  # samplers of a higher order call more often
                counted += 1
                self.work.tally.add(1, self.prompts[k])
            return {}

        options = {"callback_on_step_end": count} if "callback_on_step_end" in self._parameters else {}
        generator = torch.Generator().manual_seed(self.seed + k if seed is None else seed)
        with torch.no_grad():
            output = self.pipe(
                prompt=self.prompts[k],
                num_inference_steps=self.num_inference_steps,
                generator=generator,
                **options | self._options,
            )
        self.work.tally.add(self.num_inference_steps - counted, self.prompts[k])
        return torch.as_tensor(output[0]).float().cpu()
