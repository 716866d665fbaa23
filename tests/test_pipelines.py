"""Pipelines of diffusers end to end: never reusing changes nothing, reusing counts, repeats itself, can be undone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import dissect, record_of
from torch import nn

import cachedit
from cachedit import Context, FeatureStrategy
from zoo.built import Built, run
from zoo.further_images import FURTHER_IMAGES
from zoo.further_modular import FURTHER_MODULAR
from zoo.further_unets import FURTHER_UNETS
from zoo.further_videos import FURTHER_VIDEOS
from zoo.pipelines import PIPELINES
from zoo.unet_pipelines import UNET_PIPELINES

LISTS = ("transformer_blocks", "blocks", "layers", "joint_transformer_blocks")
FURTHER = FURTHER_IMAGES | FURTHER_VIDEOS | FURTHER_UNETS | FURTHER_MODULAR


@dataclass(frozen=True)
class Every(FeatureStrategy, abstract=True):
    """Computes one step in ``interval``, from the first step of the run on."""

    interval: int = 2

    def should_compute(self, ctx: Context) -> bool:
        return (ctx.step - ctx.computed_steps[0]) % self.interval == 0


def one_in(interval: int, built: Built) -> FeatureStrategy:
    """A strategy for the stack, or for the deep feature of a UNet."""
    strategy = cachedit.DeepCache if "unet" in built.denoisers else Every  # type: ignore[attr-defined]
    return strategy(interval=interval)


def expected(record: cachedit.Run) -> list[bool]:
    """Every other step from the first on is computed, and a branch that was not there before."""
    begin, known = record.steps[0].index, set()
    computed = []
    for step in record.steps:
        computed.append((step.index - begin) % 2 == 0 or step.branch not in known)
        known.add(step.branch)
    return computed


@contextmanager
def counted(built: Built) -> Iterator[list[int]]:
    """How often the first block of each denoiser ran, or the middle block of a UNet."""
    count = [0]

    def note(*_: Any) -> None:
        count[0] += 1

    handles = [deep(getattr(built.pipe, name)).register_forward_hook(note) for name in built.denoisers]
    try:
        yield count
    finally:
        for handle in handles:
            handle.remove()


def deep(denoiser: Any) -> nn.Module:
    """A block that runs once in every computed call and in no reused one."""
    if hasattr(denoiser, "mid_block"):
        return denoiser.mid_block.resnets[0]
    return next(getattr(denoiser, name)[0] for name in LISTS if hasattr(denoiser, name))


@pytest.mark.parametrize("name", FURTHER)
@pytest.mark.filterwarnings("ignore:.*reused no step")
def test_a_pipeline_of_diffusers(name: str) -> None:
    built = FURTHER[name]()
    assert type(built.pipe).__name__ == name.partition(",")[0]
    with counted(built) as ran:
        baseline = run(built)
    assert ran == [built.calls]
    inside = dissect(built.pipe)

    cachedit.wrap(built.pipe, one_in(1, built))
    assert torch.equal(run(built), baseline), "a strategy that never reuses changes the result"

    cachedit.wrap(built.pipe, one_in(2, built))
    with counted(built) as ran:
        first = run(built)
    record = record_of(built.pipe)
    assert (record.status, len(record.steps)) == ("finished", built.calls // built.windows)
    assert [step.computed for step in record.steps] == expected(record)
    assert ran == [sum(step.computed for step in record.steps) * built.windows]
    assert torch.isfinite(first).all()
    assert not torch.equal(first, baseline), "nothing was reused"
    assert torch.equal(run(built), first), "the second run differs from the first"

    cachedit.unwrap(built.pipe)
    assert dissect(built.pipe) == inside
    assert torch.equal(run(built), baseline)


def test_forty_classes_run_from_end_to_end() -> None:
    """Here and, the first of them, with every strategy in test_families.py and test_unet.py."""
    recipes = [*PIPELINES.values(), *UNET_PIPELINES.values(), *FURTHER.values()]
    assert len({type(build().pipe) for build in recipes}) >= 60
