"""Which strategy runs on which denoiser of the installed diffusers: found by running every pair of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from arrays import made
from conftest import drive, equal_steps, record_of
from still import Still
from torch import nn

import cachedit
from cachedit import UnsupportedModelError
from zoo.case import Case
from zoo.models import CASES
from zoo.more_images import MORE_IMAGES
from zoo.more_sounds import MORE_SOUNDS
from zoo.more_unets import MORE_UNETS
from zoo.more_videos import MORE_VIDEOS
from zoo.rows import DENOISERS, TRANSFORMERS
from zoo.rows import UNETS as UNET_CLASSES
from zoo.unet_models import UNETS

STEPS = 10
SIGMAS = [1 - i / STEPS for i in range(STEPS)]
MIDDLE = STEPS // 2
STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "magcache": ("mag_cache", {}),
    "taylorseer": ("taylor_seer", {}),
    "delta-cache": ("delta_cache", {}),
    "auto": ("auto", {}),
    "deepcache": ("deep_cache", {}),
    "auto, output": ("auto", {"cached": "output"}),
}
"""What is tried: four for stacks of blocks, and for other models DeepCache and auto over the whole output."""
PREFACE = """Every transformer and every UNet class of diffusers {version}, each from a tiny configuration of its own
with random weights. A *yes* was run: a computed step is equal to the unwrapped model's to the last bit, a step that was
reused on unchanged inputs is equal up to rounding (2e-6), and it ran fewer layers. A dash is refused with a reason
before the first step; what stands empty was not tried. DeepCache and *auto, output* (auto over the output of the whole
model) are tried where there is no stack of blocks to cache. Made by `python benchmarks/support.py`; a test compares."""
STACKED = ("magcache", "taylorseer", "delta-cache", "auto")


def cases() -> dict[str, Case]:
    """The tiny models of transformers and UNets by class; of the UNet with most uses, Stable Diffusion's."""
    first = [case for case in [*UNETS.values(), *CASES.values()] if case.name != "plain"]
    more = [*MORE_IMAGES, *MORE_SOUNDS, *MORE_VIDEOS, *MORE_UNETS]
    found = {case.name: case for case in more if case.name in DENOISERS}
    for case in first:
        found.setdefault(type(case.build()).__name__, case)
    return dict(sorted(found.items()))


@dataclass(frozen=True)
class Verdict:
    """What a strategy did on a model.

    refusal: why it was refused before the first step; empty if it was accepted.
    strip:   its record of a run, a box per step.
    wrong:   computed steps that were not bit-equal to the bare model's.
    error:   largest difference of a reused step from a computed one on the same inputs, over the largest value.
    saved:   share of the model's layers that a reused step did not run.
    """

    refusal: str = ""
    strip: str = ""
    wrong: tuple[int, ...] = ()
    error: float = 0.0
    saved: float = 0.0


def supported(found: dict[str, Verdict]) -> bool:
    """True if one of the strategies runs on the model."""
    return not all(verdict.refusal for verdict in found.values())


def page(found: Mapping[str, Mapping[str, Verdict]]) -> str:
    """What was found in Markdown: counts, a table, and the reasons of the refusals."""
    missing = {name: _refusal(name) for name in DENOISERS if name not in found and name != "MotionAdapter"}
    lines = ["# Supported models", "", PREFACE.format(version=diffusers.__version__), ""]
    for title, group in (("transformers", TRANSFORMERS), ("UNets", UNET_CLASSES)):
        names = [name for name in sorted({*found, *missing}) if name in group]
        runs = [name for name in names if name in found and supported(found[name])]
        lines += [f"## {len(runs)} of {len(names)} {title}", "", f"| class | {' | '.join(STRATEGIES)} |"]
        lines.append("|---|" + ":-:|" * len(STRATEGIES))
        for name in runs:
            cells = [_cell(found[name].get(strategy)) for strategy in STRATEGIES]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        lines += ["", "Refused:", ""]
        for name in names:
            if name not in runs:
                reason = missing[name] if name in missing else [*found[name].values()][-1].refusal
                lines.append(f"* {reason}")
        lines.append("")
    return "\n".join(lines)


def _cell(verdict: Verdict | None) -> str:
    """Empty where it was not tried, a dash where it was refused."""
    return "" if verdict is None else "–" if verdict.refusal else "yes"


def _refusal(name: str) -> str:
    """Why a class without a tiny model is refused."""
    with torch.device("meta"):
        model = DENOISERS[name]()
    try:
        cachedit.wrap(model, "taylorseer")
    except UnsupportedModelError as error:
        return str(error)
    raise AssertionError(f"{name} has no tiny model, and is accepted")


@torch.no_grad()
def verdicts(case: Case) -> dict[str, Verdict]:
    """Run every strategy on the model, one after the other; those for other models only where it has no stack.

    Raises:
        AssertionError: a refusal or an unwrap left something behind.
    """
    model = case.build()
    plain = drive(model, case, SIGMAS)
    bare = _traces(model)
    found: dict[str, Verdict] = {}
    for strategy in STRATEGIES:
        if strategy in STACKED or all(found[name].refusal for name in STACKED):
            found[strategy] = _verdict(case, model, plain, strategy)
            assert _traces(model) == bare, f"{strategy} left something behind"
    return found


def _verdict(case: Case, model: nn.Module, plain: list[torch.Tensor], strategy: str) -> Verdict:
    try:
        _wrap(model, model, case, strategy)
    except UnsupportedModelError as error:
        return Verdict(refusal=str(error))
    outputs = drive(model, case, SIGMAS)
    record = record_of(model)
    cachedit.unwrap(model)
    touched = {step.index for step in record.steps if not step.computed}
    wrong = set(range(STEPS)) - touched - set(equal_steps(outputs, plain))
    error, saved = _still(case, model, plain[MIDDLE], strategy)
    return Verdict(strip=record.strip(), wrong=tuple(sorted(wrong)), error=error, saved=saved)


def _still(case: Case, model: nn.Module, plain: torch.Tensor, strategy: str) -> tuple[float, float]:
    """Error of the reused steps of a run whose inputs never change, and the share of layers that they left out."""
    pipe = Still(model, STEPS)
    _wrap(pipe, model, case, strategy)
    error, layers = 0.0, []
    with _counted(model) as count:
        for step in range(STEPS):
            pipe.scheduler._step_index = step
            count.clear()
            (output,) = drive(model, case, [SIGMAS[MIDDLE]])
            layers.append(len(count))
            error = max(error, float((output - plain).abs().max() / plain.abs().max()))
    cachedit.unwrap(pipe)
    return error, 1 - min(layers) / max(layers)


def _wrap(target: Any, model: nn.Module, case: Case, strategy: str) -> None:
    name, options = STRATEGIES[strategy]
    own = cachedit.strategies()[name](**options)  # type: ignore[operator]
    settings = {"profile": made(own, model, case, STEPS)} if own.needed_arrays else {}
    if target is model:
        settings["num_inference_steps"] = STEPS
    cachedit.wrap(target, name, **options, **settings)


def _traces(model: nn.Module) -> dict[str, Any]:
    """Classes, attributes and hooks of all modules; not what the attributes are, for some models renew theirs."""
    hooks = "_forward_pre_hooks", "_forward_hooks"
    return {
        path: (type(module), sorted(vars(module)), [len(getattr(module, name)) for name in hooks])
        for path, module in model.named_modules()
    }


@contextmanager
def _counted(model: nn.Module) -> Iterator[list[int]]:
    """Every run of a layer that has no layers of its own."""
    calls: list[int] = []
    leaves = [module for module in model.modules() if not any(module.children())]
    handles = [leaf.register_forward_pre_hook(lambda *_: calls.append(1)) for leaf in leaves]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
