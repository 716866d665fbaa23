"""HarmoniCa: which modules a router's table runs, and the training that makes the table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import attach, dissect, drive, equal_steps, record_of
from diffusers import DiffusionPipeline

import cachedit
from cachedit import Profile, ProfileError
from cachedit.calibration import calibrate
from cachedit.calibration.measures import router
from cachedit.calibration.trial import Trial
from cachedit.feature.modules import ModulePlace
from cachedit.samples import prompts, sample_path
from cachedit.strategies.harmoni_ca import HarmoniCa
from cachedit.strategy import Module
from zoo.models import CASES

CASE = CASES["wan"]
KINDS = ("attn", "cross", "mlp")
STEPS = 4


@pytest.fixture(scope="module")
def pipe() -> Any:
    pipe = DiffusionPipeline.from_pretrained(sample_path("image"))
    pipe.set_progress_bar_config(disable=True)
    pipe(prompts("image")[0], num_inference_steps=1, output_type="latent")  # it creates attributes at its first call
    return pipe


def table(*rows: dict[str, list[float]]) -> Profile:
    """A router with one row per step; kinds that a row does not name are computed."""
    count = len(CASE.blocks(CASE.build()))
    arrays = {kind: [row.get(kind, [1.0] * count) for row in rows] for kind in KINDS}
    return Profile(arrays={"router": arrays}, axes={"router": ["step", "module"]})


def executed(profile: Profile, steps: int) -> Iterator[set[str]]:
    """Which modules run at each step, as kind and place."""
    model = CASE.build()
    blocks = CASE.blocks(model)
    found = {kind: ModulePlace(Module(kind), model, blocks).modules for kind in KINDS}
    attach(model, CASE, "harmonica", profile=profile, few_step_guard=False, num_inference_steps=steps)
    ran: set[str] = set()
    for kind, modules in found.items():
        for k, module in enumerate(modules):
            module.register_forward_hook(lambda *_, name=f"{kind} {k}": ran.add(name))
    for i in range(steps):
        ran.clear()
        drive(model, CASE, [1 - i / steps])
        yield set(ran)


def test_the_table_says_what_runs() -> None:
    count = len(CASE.blocks(CASE.build()))
    everything = {f"{kind} {k}" for kind in KINDS for k in range(count)}
    first_off = [0.1, *[0.11] * (count - 1)]  # at the threshold is left out, above it is not
    rows = [{}, {"attn": first_off}, {}, {"mlp": [0.0] * count, "cross": first_off}]
    assert [*executed(table(*rows), 4)] == [
        everything,
        everything - {"attn 0"},
        everything,
        everything - {f"mlp {k}" for k in range(count)} - {"cross 0"},
    ]


def test_a_step_without_gaps_is_computed_and_equal() -> None:
    count = len(CASE.blocks(CASE.build()))
    model = CASE.build()
    plain = drive(model, CASE, [1, 0.75, 0.5, 0.25])
    off = {"attn": [0.0] * count}
    attach(model, CASE, "harmonica", profile=table({}, off, {}, off), few_step_guard=False, num_inference_steps=4)
    assert equal_steps(drive(model, CASE, [1, 0.75, 0.5, 0.25]), plain) == [0, 2]
    assert record_of(model).computed_steps == [0, 2]
    assert record_of(model).steps[1].sites == "Module(kind='attn')"


def test_other_steps_than_those_it_was_trained_on_are_refused_before_the_first() -> None:
    model = CASE.build()
    attach(model, CASE, "harmonica", profile=table({}, {}, {}, {}), num_inference_steps=5)
    with pytest.raises(ProfileError, match="has 4 steps.*this run has 5"):
        drive(model, CASE, [1])


@pytest.mark.parametrize(
    "options", [{"threshold": 0.0}, {"threshold": 1.0}, {"beta": -1.0}, {"learning_rate": 0.0}, {"iterations": 0}]
)
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))}.*allowed"):
        HarmoniCa(**options)


# -- training -----------------------------------------------------------------------------------------------------


def train(pipe: Any, **options: Any) -> Profile:
    made = {"checkpoint": options.pop("checkpoint", None), "resume": options.pop("resume", False)}
    strategy = HarmoniCa(**{"iterations": 12, "learning_rate": 0.5, **options})
    return calibrate(pipe, strategy, prompts=prompts("image")[:1], num_inference_steps=STEPS, **made)


def gates(profile: Profile) -> torch.Tensor:
    return torch.cat([torch.tensor(rows) for rows in profile.arrays["router"].values()], dim=1)


def test_training_leaves_the_pipeline_as_it_was_and_the_first_step_computed(pipe: Any) -> None:
    inside = dissect(pipe)
    trained = [p.requires_grad for p in pipe.transformer.parameters()]
    profile = train(pipe)
    assert dissect(pipe) == inside
    assert [p.requires_grad for p in pipe.transformer.parameters()] == trained
    table = gates(profile)
    assert table.shape[0] == STEPS
    assert torch.allclose(table[0], torch.tensor(5.0).sigmoid(), atol=1e-4)
    assert bool(((table > 0) & (table < 1)).all())
    assert profile.provenance["router_updates"] >= 12


def test_the_price_of_a_module_closes_gates_and_no_price_opens_them(pipe: Any) -> None:
    costly, free = gates(train(pipe, beta=10.0)), gates(train(pipe, beta=0.0))
    assert bool((costly[1:] < 0.1).all())
    assert float(free[1:].mean()) > 0.5


def test_an_interrupted_training_goes_on(pipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "SAVE_EVERY", 1)
    path, runs, run = tmp_path / "training", [], Trial.fresh_run

    def interrupted(self: Any, count: int) -> torch.Tensor:
        runs.append(count)
        if len(runs) == 2:
            raise KeyboardInterrupt
        return run(self, count)

    monkeypatch.setattr(Trial, "fresh_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(pipe, checkpoint=path)
    assert path.exists()
    resumed = train(pipe, checkpoint=path, resume=True)
    assert runs == [0, 1, 1]  # the first run was not made again
    assert not path.exists()
    monkeypatch.setattr(Trial, "fresh_run", run)
    assert torch.equal(gates(resumed), gates(train(pipe)))


def test_the_trained_router_runs(pipe: Any) -> None:
    profile = train(pipe, beta=10.0)
    cachedit.wrap(pipe, "harmonica", profile=profile, few_step_guard=False)
    pipe(prompts("image")[0], num_inference_steps=STEPS, output_type="latent")
    record = record_of(pipe)
    cachedit.unwrap(pipe)
    assert record.computed_steps == [0]
    assert record.reused_steps == [1, 2, 3]
