"""One pipeline that is wrapped, run, broken off and unwrapped again and again, and a fresh wrap for every run of it."""

from __future__ import annotations

import contextlib
import copy
import gc
import random
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from conftest import FLAT, dissect

import cachedit
from zoo.built import Built, run
from zoo.image_pipelines import flux_true_cfg

STRATEGIES: list[tuple[str, dict[str, Any]]] = [
    ("mag_cache", {"profile": FLAT}),
    ("mag_cache", {"profile": FLAT, "cache_dtype": torch.bfloat16}),
    ("taylor_seer", {"interval": 3, "order": 2}),
    ("taylor_seer", {"interval": 2, "warmup": 1, "few_step_guard": False}),
    ("newton", {"interval": 3}),
    ("hi_cache", {}),
    ("fo_ca", {}),
    ("freq_ca", {}),
    ("spectrum", {}),
    ("mean_cache", {}),
    ("abcache", {}),
    ("delta_cache", {}),
    ("fora", {"interval": 2}),
    ("pab", {}),
    ("faster_cache", {}),
    ("mix_cache", {}),
    ("first_block_cache", {"threshold": 0.4}),
    ("tea_cache", {"threshold": 0.5}),
    ("easy_cache", {"threshold": 0.3}),
    ("dbcache", {"front": 1, "back": 1, "threshold": 0.5}),
    ("di_cache", {"threshold": 0.5}),
]
ENDS = ("finished", "finished", "finished", "exception", "ctrl-c", "interrupt", "block")


@dataclass(frozen=True)
class Request:
    """A run: the arguments of the pipeline, and how and when it ends."""

    seed: int
    steps: int
    height: int
    width: int
    images: int
    guidance: float
    end: str
    at: int


@dataclass
class Outcome:
    """What a run gave: the latents behind every step, the strip of every guidance branch, how it failed."""

    latents: list[torch.Tensor] = field(default_factory=list)
    steps: list[tuple[int, bool, str]] = field(default_factory=list)
    error: str = ""

    def same(self, other: Outcome) -> bool:
        """True if both are equal to the last bit."""
        alike = (len(self.latents), self.steps, self.error) == (len(other.latents), other.steps, other.error)
        return alike and all(map(torch.equal, self.latents, other.latents))


class Turns:
    """A seeded series of turns on one tiny Flux; every turn checks itself.

    Attributes:
        tally: how often what was done.
        strangers: number of tensors that were alive behind every turn, beside those of pipelines and schedulers.
        objects: number of objects that the collector knew of behind every turn without a wrap.
        reused: strategy -> steps that it reused.
    """

    def __init__(self, seed: int = 0) -> None:
        self.draw = random.Random(seed)
        self.built = flux_true_cfg()
        run(self.built, steps=1)  # a pipeline that was never called has fewer attributes
        self.stock = copy.deepcopy(self.built.pipe)
        self.bare = traces(self.built.pipe)
        self.wrapped: tuple[str, dict[str, Any]] | None = None
        self.tally: Counter[str] = Counter()
        self.reused: Counter[str] = Counter()
        self.strangers: list[int] = []
        self.objects: list[int] = []
        self.strangers_before = self._strangers()

    def turn(self) -> None:
        """Perhaps wrap, wrap again or unwrap; run; and compare with a fresh pipeline under a fresh wrap.

        What is held behind the run is noted, too.

        Raises:
            AssertionError: the run differs, tensors are held behind it, or something is left after an unwrap.
        """
        chance, pipe = self.draw.random(), self.built.pipe
        if self.wrapped is not None and chance < 0.15:
            self._unwrap()
        elif self.wrapped is None or chance < 0.6:
            self.tally["wrapped" if self.wrapped is None else "wrapped again"] += 1
            self.wrapped = self.draw.choice(STRATEGIES)
            cachedit.wrap(pipe, self.wrapped[0], **self.wrapped[1])
        request = self._request()
        fresh = Built(copy.deepcopy(self.stock), self.built.kwargs)
        if self.wrapped is not None:
            cachedit.wrap(fresh.pipe, self.wrapped[0], **self.wrapped[1])
        ours, theirs = outcome(self.built, request, self.wrapped), outcome(fresh, request, self.wrapped)
        assert ours.same(theirs), f"{self.wrapped} {request}: {ours.steps} {ours.error!r}, {theirs.error!r}"
        self.tally["equal to a fresh wrap"] += 1
        self._count(request, ours)
        del fresh, ours, theirs
        self.strangers.append(self._strangers() - self.strangers_before)
        if self.wrapped is None:
            self.objects.append(len(gc.get_objects()))
        assert self.strangers[-1] <= 0, f"{self.wrapped} {request}: {self.strangers[-1]} tensors are held behind a run"

    def finish(self) -> None:
        """Unwrap at last."""
        if self.wrapped is not None:
            self._unwrap()

    def _unwrap(self) -> None:
        cachedit.unwrap(self.built.pipe)
        self.wrapped = None
        assert traces(self.built.pipe) == self.bare, "something is left after an unwrap"
        self.tally["unwrapped without a trace"] += 1

    def _strangers(self) -> int:
        gc.collect()
        pipes = (self.built.pipe, self.stock)
        known = [value for pipe in pipes for owner in (pipe, pipe.scheduler) for value in vars(owner).values()]
        known += self.built.kwargs.values()
        ours = {id(value) for value in known}
        return sum(type(one) is torch.Tensor and id(one) not in ours for one in gc.get_objects())

    def _request(self) -> Request:
        draw, steps = self.draw, self.draw.randint(1, 16)
        return Request(
            seed=draw.randrange(1000),
            steps=steps,
            height=draw.choice((16, 24, 32)),
            width=draw.choice((16, 24, 32)),
            images=draw.choice((1, 1, 2, 3)),
            guidance=draw.choice((1.0, 2.0)),
            end=draw.choice(ENDS),
            at=draw.randrange(steps),
        )

    def _count(self, request: Request, ours: Outcome) -> None:
        name = "no strategy" if self.wrapped is None else self.wrapped[0]
        self.reused[name] += sum(not computed for _, computed, _ in ours.steps)
        self.tally["runs"] += 1
        self.tally["runs without a cache"] += self.wrapped is None
        self.tally["steps"] += len(ours.latents)
        if request.end != "finished":
            self.tally[f"ended by {request.end}"] += bool(ours.error) or request.end == "interrupt"


def outcome(built: Built, request: Request, wrapped: Any) -> Outcome:
    """Run the request."""
    found = Outcome()

    def callback(pipe: Any, index: int, timestep: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        found.latents.append(inputs["latents"].clone())
        if index == request.at:
            if request.end in ("exception", "ctrl-c"):
                raise {"exception": ValueError, "ctrl-c": KeyboardInterrupt}[request.end]("the user stopped")
            pipe._interrupt = request.end == "interrupt"
        return {}

    with _failing_block(built.pipe.transformer, request), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            last = run(
                built,
                request.seed,
                request.steps,
                height=request.height,
                width=request.width,
                num_images_per_prompt=request.images,
                true_cfg_scale=request.guidance,
                callback_on_step_end=callback,
            )
            found.latents.append(last)
        except (ValueError, KeyboardInterrupt) as error:
            found.error = f"{type(error).__name__}: {error}"
    record = cachedit.last_run(built.pipe) if wrapped is not None else None
    if record is not None:
        found.steps = [(step.index, step.computed, step.branch) for step in record.steps]
    return found


@contextlib.contextmanager
def _failing_block(transformer: Any, request: Request) -> Iterator[None]:
    """The second block fails once it has been passed through so often, which a reused step does not count for."""
    passes = request.at

    def fail(*_: Any) -> None:
        nonlocal passes
        passes -= 1
        if passes < 0:
            raise ValueError("the device is out of memory")

    handle = transformer.transformer_blocks[1].register_forward_hook(fail) if request.end == "block" else None
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


def traces(pipe: Any) -> dict[str, Any]:
    """Everything that a wrap could leave behind on a pipeline, its denoiser or its scheduler."""
    return {**dissect(pipe), "scheduler": (type(pipe.scheduler), sorted(vars(pipe.scheduler)))}
