"""Sentences 5 to 8 of the design: exactness, types, non-finite features, training."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from conftest import SIGMAS, STEPS, Line, Scripted, attach, drive, equal_steps, record_of
from torch import nn

import cachedit
from cachedit import Profile, ProfileError, UnsupportedModelError
from cachedit.strategy import Output, Site
from zoo.draw import settle
from zoo.models import CASES, Case, count_blocks
from zoo.plain import PlainDenoiser, Stage

PLAIN = CASES["plain"]
# WanVACE cannot be called without its control input.
CONTROLLED = {name: case for name, case in CASES.items() if case.control and name != "wan_vace"}

# -- 5: exactness and control inputs ------------------------------------------------------------------------------


def frozen(model: nn.Module, case: Case, extras: Sequence[dict[str, Any]]) -> list[torch.Tensor]:
    """A run in which nothing changes beside ``extras``. Time creeps on, because calls of one step are branches."""
    return [case.call(model, 0.5 - 1e-7 * i, **extra) for i, extra in enumerate(extras)]


@pytest.mark.parametrize("case", CONTROLLED.values(), ids=CONTROLLED)
def test_rule_05_a_control_input_that_comes_or_goes_forces_a_computed_step(case: Case) -> None:
    assert case.control is not None
    model = case.build()
    given = [case.control(7, 1) if 3 <= i < 7 else {} for i in range(STEPS)]
    plain = [case.call(model, sigma, **extra) for sigma, extra in zip(SIGMAS, given, strict=True)]
    attach(model, case, Scripted(compute=(0,)))
    outputs = [case.call(model, sigma, **extra) for sigma, extra in zip(SIGMAS, given, strict=True)]
    assert record_of(model).computed_steps == [0, 3, 7]
    assert equal_steps(outputs, plain) == [0, 3, 7]
    reason = {step.index: step.reason for step in record_of(model).steps}[3]
    assert reason.startswith("input changed: ")
    assert all(name in reason for name in case.control(7, 1))


def test_rule_05_a_control_input_inside_a_list_or_a_dict_counts_too() -> None:
    class Nested(PlainDenoiser):
        def forward(self, x: torch.Tensor, t: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x, t, extra.get("control"))

    assert PLAIN.control is not None
    hints = PLAIN.control(7, 1)["control"]
    given = [[None] * 4, [None] * 4, hints, hints, [*hints[:3], None], [*hints[:3], None]]
    in_list = attach(PLAIN.build(), PLAIN, Scripted(compute=(0,)))
    for sigma, control in zip(SIGMAS, given, strict=False):
        PLAIN.call(in_list, sigma, control=control)
    assert record_of(in_list).computed_steps == [0, 2, 4]
    in_dict = attach(settle(Nested()), PLAIN, Scripted(compute=(0,)))
    for i, sigma in enumerate(SIGMAS):
        PLAIN.call(in_dict, sigma, extra={"control": hints} if 3 <= i < 6 else {})
    assert record_of(in_dict).computed_steps == [0, 3, 6]


def test_rule_05_a_control_input_that_only_changes_its_value_is_taken_fresh_on_a_reused_step() -> None:
    """Reused output = head(norm(embed(x) + what the stages added at step 0 + the new hints))."""
    assert PLAIN.control is not None
    model, hints = PLAIN.build(), [PLAIN.control(seed, 1) for seed in (7, 8)]
    added = []
    handles = [
        stage.register_forward_hook(lambda _, args, out: added.append(out - args[0])) for stage in PLAIN.blocks(model)
    ]
    PLAIN.call(model, 0.5, **hints[0])
    for handle in handles:
        handle.remove()
    with torch.no_grad():
        x = model.embed(PLAIN.inputs(0, 1)["x"]) + sum(added) + sum(hints[1]["control"])
        expected = model.head(model.norm(x))
    attach(model, PLAIN, Scripted(compute=(0,)))
    computed, reused = frozen(model, PLAIN, hints)
    assert record_of(model).strip() == "■□"
    torch.testing.assert_close(reused, expected, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(reused, computed, atol=0.1)


class InPlaceHints(PlainDenoiser):
    """Adds its hints into the tensor that the stage returned, as Chroma does."""

    def forward(self, x: torch.Tensor, t: torch.Tensor, control: Any = None) -> torch.Tensor:
        temb = self.time(torch.stack([torch.sin(3 * t), torch.cos(3 * t)], dim=-1))
        x = self.embed(x)
        for index, stage in enumerate(self.stages):
            x = stage(x, temb, bias_index=index)
            if control is not None:
                x += control[index]
        return self.head(self.norm(x))


class InPlaceStage(Stage):
    """Adds its result into the tensor that it was given."""

    def forward(self, x: torch.Tensor, temb: torch.Tensor, *, bias_index: int) -> torch.Tensor:
        modulated = self.norm(x + x.mean(1, keepdim=True)) * (1 + self.scale(temb)[:, None])
        x += self.mlp(modulated)
        return x


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_rule_05_hints_that_are_added_in_place_are_fresh_too(mode: type[AbstractContextManager[None]]) -> None:
    assert PLAIN.control is not None
    hints = [PLAIN.control(seed, 1) for seed in (7, 7, 8, 8)]
    results = []
    for cls in (PlainDenoiser, InPlaceHints):
        model = attach(settle(cls()), PLAIN, Scripted(compute=(0, 1)))
        with mode():
            results.append(
                [model(PLAIN.inputs(0, 1)["x"], torch.full((1,), s), **h) for s, h in zip(SIGMAS, hints, strict=False)]
            )
        assert record_of(model).strip() == "■■□□"
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_rule_05_blocks_that_write_into_their_input_are_exact_or_refused(
    mode: type[AbstractContextManager[None]],
) -> None:
    model = PLAIN.build()
    for index, stage in enumerate(model.stages):
        model.stages[index].__class__ = InPlaceStage
        assert isinstance(stage, InPlaceStage)
    call = {"x": PLAIN.inputs(0, 1)["x"]}
    with torch.no_grad():
        expected = model(**call, t=torch.full((1,), 0.5))
    attach(model, PLAIN, Scripted(compute=(0, 1)))
    try:
        with mode():
            outputs = [model(**call, t=torch.full((1,), 0.5 - 1e-7 * i)) for i in range(4)]
    except UnsupportedModelError:
        return
    assert record_of(model).strip() == "■■□□"
    for output in outputs:
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strategy", [Scripted(compute=(0, 1, 2)), Line(compute=(0, 1, 2))], ids=["plain", "line"])
def test_rule_05_a_forecast_after_a_changed_input_draws_on_what_came_after_it(strategy: Scripted) -> None:
    """At step 5 the history is emptied and holds one residual, whatever was computed before."""
    assert PLAIN.control is not None
    model = PLAIN.build()
    attach(model, PLAIN, strategy)
    control = PLAIN.control(7, 1)
    outputs = frozen(model, PLAIN, [control if i >= 5 else {} for i in range(STEPS)])
    assert record_of(model).computed_steps == [0, 1, 2, 5]
    for reused in outputs[6:]:
        torch.testing.assert_close(reused, outputs[5], rtol=1e-5, atol=1e-5)


# -- 6: shape, dtype, type ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OfOutput(Scripted, abstract=True):
    """Scripted, of the output."""

    site: ClassVar[Site] = Output()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("option", [{}, {"cache_dtype": torch.float32}, {"cache_dtype": torch.bfloat16}], ids=str)
@pytest.mark.parametrize("precision", ["fp32", "autocast", "bf16"])
@pytest.mark.parametrize("strategy", [Scripted(compute=(0, 5)), OfOutput(compute=(0, 5))], ids=["stack", "output"])
def test_rule_06_precision_modes_do_not_change_the_type_of_a_reused_output(
    mode: type[AbstractContextManager[None]], option: dict[str, Any], precision: str, strategy: Scripted
) -> None:
    case = CASES["flux"]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = case.build().to(dtype)
    inputs = {k: x.to(dtype) if x.is_floating_point() else x for k, x in case.inputs(0, 2).items()}
    calls = [{**case.time(sigma, 2), "return_dict": sigma > 0.5} for sigma in SIGMAS]

    def told(output: Any) -> tuple[Any, ...]:
        (x,) = output if isinstance(output, tuple) else (output.sample,)
        return type(output), x.shape, x.dtype, x.device

    with mode(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        plain = [told(model(**inputs, **call)) for call in calls]
        attach(model, case, strategy, **option)
        outputs = [told(model(**inputs, **call)) for call in calls]
    assert record_of(model).computed_steps == [0, 5]
    assert outputs == plain


def test_rule_06_a_cache_in_half_the_bytes_holds_half_the_bytes() -> None:
    peaks = []
    for option in ({}, {"cache_dtype": torch.bfloat16}):
        model = attach(PLAIN.build(), PLAIN, Scripted(), **option)
        drive(model, PLAIN)
        peaks.append(record_of(model).cache_bytes_peak)
    assert peaks == [12 * 24 * 4, 12 * 24 * 2]  # 12 tokens, 24 channels


# -- 7: non-finite features ---------------------------------------------------------------------------------------


def poisoned(case: Case, value: float) -> dict[str, Any]:
    inputs = copy.deepcopy(case.inputs(0, 1))
    name = "hidden_states" if "hidden_states" in inputs else "x"
    inputs[name].view(-1)[3] = value
    return {name: inputs[name]}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("at", [0, 1, 4, 5])
@pytest.mark.parametrize("strategy", [Scripted(compute=(0, 1, 4)), Line(compute=(0, 1, 4))], ids=["plain", "line"])
def test_rule_07_after_a_non_finite_step_everything_is_finite_again(strategy: Scripted, at: int, value: float) -> None:
    """Steps 0, 1 and 4 are computed, 5 is reused: a bad input there stores nothing."""
    model = attach(PLAIN.build(), PLAIN, strategy)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outputs = [
            PLAIN.call(model, sigma, **(poisoned(PLAIN, value) if i == at else {})) for i, sigma in enumerate(SIGMAS)
        ]
    assert not torch.isfinite(outputs[at]).all()
    assert all(torch.isfinite(output).all() for i, output in enumerate(outputs) if i != at)
    expected = [0, 1, 4] if at in (0, 5) else [0, 1, 2, 4] if at == 1 else [0, 1, 4, 5]
    assert record_of(model).computed_steps == expected
    assert [str(w.message) for w in caught if "finite" in str(w.message)] == (
        [] if at == 5 else ["cachedit: a residual was not finite; it is dropped, and the next step is computed."]
    )


def test_rule_07_one_non_finite_branch_makes_the_next_step_computed_for_all() -> None:
    case = CASES["wan"]
    model = attach(case.build(), case, Scripted(compute=(0, 4)))

    def drive_guided() -> list[tuple[int, str]]:
        """Calls whose output is not finite."""
        bad = []
        for i, sigma in enumerate(SIGMAS):
            for name in ("cond", "uncond"):
                extra = poisoned(case, float("nan")) if (i, name) == (4, "uncond") else {}
                with model.cache_context(name):  # type: ignore[operator]
                    if not torch.isfinite(case.call(model, sigma, **extra)).all():
                        bad.append((i, name))
        return bad

    with pytest.warns(UserWarning, match="not finite"):
        assert drive_guided() == [(4, "uncond")]
    computed = [(step.index, step.branch) for step in record_of(model).steps if step.computed]
    assert computed == [(i, name) for i in (0, 4, 5) for name in ("cond", "uncond")]


@pytest.mark.parametrize("ratio", [0.0, -1.0, float("nan"), float("inf")])
def test_rule_07_a_table_with_a_ratio_that_is_no_ratio_is_refused(ratio: float) -> None:
    with pytest.raises(ProfileError, match=r"arrays\.magnitude_ratio\.cond"):
        Profile.from_ratios([1.0, ratio, 1.0])


# -- 8: training --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["grad", "train"])
def test_rule_08_training_bypasses_the_cache(how: str) -> None:
    model, twin = PLAIN.build(), PLAIN.build()
    attach(model, PLAIN, Scripted(compute=(0,)))
    x, times = PLAIN.inputs(0, 1)["x"], [torch.full((1,), sigma) for sigma in SIGMAS]
    model.train(how == "train")
    with count_blocks(model, PLAIN) as count, torch.set_grad_enabled(how == "grad"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outputs = [model(x, t) for t in times]
        expected = [twin(x, t) for t in times]
    assert set(count.per_block) == {STEPS}
    assert equal_steps(outputs, expected) == [*range(STEPS)]
    assert cachedit.last_run(model) is None
    if how == "grad":
        sum(output.square().sum() for output in outputs).backward()
        sum(output.square().sum() for output in expected).backward()
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


def test_rule_08_a_gradient_step_between_two_runs_does_not_disturb_them() -> None:
    expected = drive(attach(PLAIN.build(), PLAIN, Scripted()), PLAIN)
    model = attach(PLAIN.build(), PLAIN, Scripted())
    outputs = drive(model, PLAIN, SIGMAS[:5])
    with pytest.warns(UserWarning, match=r"grad is enabled.*no_grad"):
        assert model(PLAIN.inputs(1, 1)["x"], torch.ones(1)).requires_grad
    assert equal_steps(outputs + drive(model, PLAIN, SIGMAS[5:]), expected) == [*range(STEPS)]
    assert record_of(model).strip() == "■" + "□" * 9
