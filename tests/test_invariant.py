"""Modules that see neither latents nor time run once in a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from cachedit.conditions import step_invariant
from zoo.unet_pipelines import sd15_controlnet


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


class Doubling(nn.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        self.calls += 1
        return scale * x


class Flowing(nn.Module):
    """A denoiser with a branch that sees the flow alone, as FloED's."""

    def __init__(self) -> None:
        super().__init__()
        self.flow, self.body = Doubling(), Doubling()

    def forward(self, x: torch.Tensor, t: float, flow: torch.Tensor) -> torch.Tensor:
        return self.body(x) * t + self.flow(flow)


def test_a_branch_without_time_and_latents_runs_once() -> None:
    model, flow = Flowing(), torch.ones(4)
    with step_invariant(model, "flow") as kept:
        found = [model(torch.full((4,), float(step)), 0.5, flow) for step in range(5)]
        assert kept.nbytes == 4 * 4
    assert [float(x[0]) for x in found] == [2.0, 3.0, 4.0, 5.0, 6.0]
    assert (model.flow.calls, model.body.calls) == (1, 5)
    assert (kept.computed, kept.reused, kept.nbytes) == (1, 4, 0)
    assert type(model.flow) is Doubling
    model(torch.ones(4), 0.5, flow)
    assert model.flow.calls == 2


def test_branches_of_guidance_are_kept_apart() -> None:
    model = nn.ModuleList([Doubling()])
    one, two = torch.ones(2), torch.full((2,), 3.0)
    with step_invariant(model, "0") as kept:
        assert [float(model[0](x)[0]) for x in (one, two, one, two)] == [2.0, 6.0, 2.0, 6.0]
        assert float(model[0](one, scale=5.0)[0]) == 5.0
        assert [float(model[0](torch.full((2,), float(n)))[0]) for n in range(9)] == [2.0 * n for n in range(9)]
        assert kept.nbytes == 8 * 2 * 4  # the last eight calls
    assert (kept.computed, kept.reused) == (3 + 9, 2)


def test_what_was_changed_in_place_is_computed_anew() -> None:
    model, x = nn.ModuleList([Doubling()]), torch.ones(2)
    with step_invariant(model, "*") as kept:
        first = model[0](x)
        first.add_(1)  # a caller that works on the output
        assert model[0](x).tolist() == [2.0, 2.0]
        x.mul_(10)
        assert model[0](x).tolist() == [20.0, 20.0]
        assert model[0](x).tolist() == [20.0, 20.0]
    assert (kept.computed, kept.reused) == (3, 1)


def test_with_gradients_and_in_inference_mode_every_call_runs() -> None:
    model = nn.ModuleList([Doubling()])
    with step_invariant(model, "0") as kept:
        with torch.enable_grad():
            x = torch.ones(2, requires_grad=True)
            assert model[0](x).requires_grad
        with torch.inference_mode():
            model[0](torch.ones(2))
    assert model[0].calls == 2
    assert (kept.computed, kept.reused) == (0, 0)


def test_what_is_not_there_or_there_already_is_refused() -> None:
    model = Flowing()
    with pytest.raises(ValueError, match="Flowing has no module 'optical'; allowed: names of model.named_modules"):
        step_invariant(model, "optical").__enter__()
    with step_invariant(model, "flow"):
        with pytest.raises(ValueError, match="'flow' is step-invariant already"):
            step_invariant(model, "body", "flow").__enter__()
        assert type(model.body) is Doubling
    assert type(model.flow) is Doubling


def test_a_controlnet_embeds_its_picture_once_and_the_text_is_projected_once() -> None:
    built: Any = sd15_controlnet()
    built.pipe.set_progress_bar_config(disable=True)

    def made() -> torch.Tensor:
        arguments = {**built.kwargs, "num_inference_steps": 4, "generator": torch.Generator().manual_seed(0)}
        return torch.as_tensor(built.pipe(**arguments)[0])

    stock = made()
    with (
        step_invariant(built.pipe.controlnet, "controlnet_cond_embedding", "*.attn2.to_[kv]") as ours,
        step_invariant(built.pipe.unet, "*.attn2.to_[kv]") as theirs,
    ):
        assert torch.equal(made(), stock)
    layers = [
        sum(name.endswith("attn2.to_k") for name, _ in m.named_modules())
        for m in (built.pipe.controlnet, built.pipe.unet)
    ]
    assert (ours.computed, ours.reused) == (1 + 2 * layers[0], 3 * (1 + 2 * layers[0]))
    assert (theirs.computed, theirs.reused) == (2 * layers[1], 3 * 2 * layers[1])
    assert torch.equal(made(), stock)
