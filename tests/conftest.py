"""What the behaviour tests share: a strategy that follows a script, runs by hand, and a look at what is held."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import cachedit
from cachedit import Context, FeatureStrategy, Profile
from zoo.models import Case

torch.set_num_threads(1)

STEPS = 10
SIGMAS = tuple(1 - i / STEPS for i in range(STEPS))  # 1.0, 0.9 ... 0.1
FLAT = Profile.from_ratios([1.0] * STEPS)  # no error ever: warm-up and max_skip_steps alone decide


@dataclass(frozen=True)
class Scripted(FeatureStrategy, abstract=True):
    """Computes the listed steps and reuses all others. Abstract keeps it out of the registry.

    compute: steps that are computed.
    """

    compute: tuple[int, ...] = (0,)

    def should_compute(self, ctx: Context) -> bool:
        return ctx.step in self.compute


@dataclass(frozen=True)
class Line(Scripted, abstract=True):
    """As Scripted, but a skipped residual lies on the line through the last two computed ones."""

    history = 2

    def weights(self, ctx: Context) -> Sequence[float] | None:
        if len(ctx.computed_steps) < 2:
            return None
        before, last = ctx.computed_steps[-2:]
        ahead = (ctx.step - last) / (last - before)
        return -ahead, 1 + ahead


def blocks_option(case: Case) -> dict[str, Any]:
    """The ``blocks`` option where the stack has an unusual name."""
    return {"blocks": list(case.stack)} if case.name == "plain" else {}


def attach(model: nn.Module, case: Case, strategy: Any = "magcache", **options: Any) -> nn.Module:
    """Wrap a model of the zoo for runs of 10 steps; MagCache gets the flat profile unless told otherwise."""
    if isinstance(strategy, (str, cachedit.MagCache)):
        options.setdefault("profile", FLAT)
    if "timesteps" not in options:
        options.setdefault("num_inference_steps", STEPS)
    return cachedit.wrap(model, strategy, **blocks_option(case), **options)


def drive(model: nn.Module, case: Case, sigmas: Sequence[float] = SIGMAS, **call: Any) -> list[torch.Tensor]:
    """Call the model once per noise level on constant inputs; what it gives at a step depends on that step alone."""
    return [case.call(model, sigma, **call) for sigma in sigmas]


def equal_steps(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> list[int]:
    """Steps at which both runs are bit-equal."""
    return [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if torch.equal(a, b)]


def record_of(target: Any) -> cachedit.Run:
    """The last run, which must be there."""
    record = cachedit.last_run(target)
    assert record is not None
    return record


def tensors_of_shape(*shape: int) -> list[torch.Tensor]:
    """Every living tensor of that shape."""
    gc.collect()
    return [o for o in gc.get_objects() if type(o) is torch.Tensor and tuple(o.shape) == shape]


def dissect(obj: Any) -> dict[str, Any]:
    """Everything that ``wrap`` could leave behind on a module or on a pipeline and its denoisers."""
    if isinstance(obj, nn.Module):
        return {path: (type(module), _attributes(module)) for path, module in obj.named_modules()}
    denoisers = {name: getattr(obj, name, None) for name in ("transformer", "transformer_2", "unet")}
    found = {name: dissect(module) for name, module in denoisers.items() if isinstance(module, nn.Module)}
    return {"pipeline": (type(obj), sorted(vars(obj))), **found}


def _attributes(module: nn.Module) -> dict[str, Any]:
    # Dicts hold hooks, parameters and submodules; everything else is compared by identity.
    return {key: _entries(value) if isinstance(value, dict) else id(value) for key, value in vars(module).items()}


def _entries(value: dict[Any, Any]) -> list[tuple[Any, int]]:
    return [(key, id(entry)) for key, entry in value.items()]


@pytest.fixture(autouse=True, scope="session")
def _imports_out_of_sight() -> Iterator[None]:
    """Take what the imports made out of the collector's sight; walking it would be slow."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="session")
def _no_profiles_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Whoever runs the tests may have calibrated profiles of the models in them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CACHEDIT_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """No test changes the number of threads for another one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def interpreter() -> Iterator[Any]:
    """Kernels on CPU tensors, in Triton's interpreter; gives what finds a module of the kernels by its name."""
    pytest.importorskip("triton")
    from kernel_builds import file, interpreted

    with interpreted():
        yield file
