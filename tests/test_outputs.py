"""Sites at the end of the denoiser: the output, and what the branches of a step differ by."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import SIGMAS as ALL_SIGMAS
from conftest import Scripted, attach, dissect, drive, equal_steps, record_of, tensors_of_shape
from torch import nn

import cachedit
from cachedit.feature.outputs import second_half
from cachedit.strategy import Context, Guidance, Module, Output, Site, Stack
from zoo.built import Built, run
from zoo.models import CASES, Case
from zoo.pipelines import PIPELINES
from zoo.unet_models import UNETS
from zoo.unet_pipelines import UNET_PIPELINES

ALL = {**CASES, **UNETS}
PLAIN = CASES["plain"]
STEPS = 6
SIGMAS = ALL_SIGMAS[:STEPS]  # the beginning of a run of ten steps
COMPUTE = (0, 1, 4)
LAST = [max(computed for computed in COMPUTE if computed <= i) for i in range(STEPS)]


@dataclass(frozen=True)
class Somewhere(Scripted, abstract=True):
    """As Scripted, at a site of one's choice."""

    where: Site = Output()

    @property
    def sites(self) -> tuple[Site, ...]:
        return (self.where,)


def at(where: Site, compute: tuple[int, ...] = COMPUTE) -> Somewhere:
    return Somewhere(compute, where)


@dataclass(frozen=True)
class Turns(Scripted, abstract=True):
    """Reuses one site at each step that it does not compute: ``turns`` in this order, the outer site first."""

    turns: tuple[Site, ...] = ()

    @property
    def sites(self) -> tuple[Site, ...]:
        return tuple(sorted(set(self.turns), key=lambda site: isinstance(site, Module)))

    def reuses(self, ctx: Context, site: Site) -> bool:
        return site == self.turns[ctx.step - len(self.compute)]


every_case = pytest.mark.parametrize("case", ALL.values(), ids=ALL)


# -- the model output ---------------------------------------------------------------------------------------------


@every_case
def test_a_reused_output_is_the_last_computed_one_and_runs_no_block(case: Case) -> None:
    model = case.build()
    plain = drive(model, case, SIGMAS)
    attach(model, case, at(Output()))
    with batch_sizes(model, case) as seen:
        outputs = drive(model, case, SIGMAS)
    assert [len(sizes) for sizes in seen.per_step(record_of(model))] == [i in COMPUTE for i in range(STEPS)]
    assert equal_steps(outputs, [plain[last] for last in LAST]) == [*range(STEPS)]
    assert equal_steps(outputs, plain) == [*COMPUTE]


SAME_SHAPE = [name for name in CASES if name not in ("dit", "pixart", "hunyuandit", "qwenimage")]


@pytest.mark.parametrize("name", SAME_SHAPE)
def test_of_a_residual_the_latent_is_fresh(name: str) -> None:
    case = CASES[name]
    inputs = [case.inputs(seed, 1) for seed in range(3)]
    main = next(iter(inputs[0]))
    latents = [torch.stack(given[main]) if isinstance(given[main], list) else given[main] for given in inputs]
    model = case.build()
    calls = [{**inputs[0], main: given[main]} for given in inputs]
    plain = [case.call(model, sigma, **call) for sigma, call in zip(SIGMAS, calls, strict=False)]
    attach(model, case, at(Output(residual=True), (0, 1)))
    outputs = [case.call(model, sigma, **call) for sigma, call in zip(SIGMAS, calls, strict=False)]
    assert equal_steps(outputs, plain) == [0, 1]
    torch.testing.assert_close(outputs[2], plain[1] - latents[1] + latents[2], rtol=1e-5, atol=1e-5)


def test_of_an_output_of_another_shape_than_the_latent_the_value_is_kept() -> None:
    case = CASES["dit"]  # gives a variance beside the noise
    model = case.build()
    plain = drive(model, case, SIGMAS)
    attach(model, case, at(Output(residual=True)))
    assert equal_steps(drive(model, case, SIGMAS), [plain[last] for last in LAST]) == [*range(STEPS)]


def test_what_is_kept_stands_still_when_the_caller_writes_into_what_it_got() -> None:
    model = PLAIN.build()
    plain = drive(model, PLAIN, SIGMAS)
    attach(model, PLAIN, at(Output()))
    for i, sigma in enumerate(SIGMAS):
        output = PLAIN.call(model, sigma)
        assert torch.equal(output, plain[LAST[i]])
        output.zero_()


def test_a_control_input_is_not_fresh_in_a_reused_output() -> None:
    """It is part of what is cached; a strategy that caches the stack takes it fresh."""
    assert PLAIN.control is not None
    model = attach(PLAIN.build(), PLAIN, at(Output(), (0,)))
    first, second = (PLAIN.call(model, 1 - 1e-3 * i, **PLAIN.control(7 + i, 1)) for i in range(2))
    assert torch.equal(first, second)


# -- guidance in two calls ----------------------------------------------------------------------------------------


def branches(case: Case, count: int = 2) -> list[dict[str, Any]]:
    """Inputs of as many branches of a step: the same latents, another condition each."""
    first = case.inputs(0, 1)
    main = next(iter(first))
    given = [{**case.inputs(seed, 1), main: first[main]} for seed in range(count)]
    if case is PLAIN:  # it has no condition, so a control input stands for one
        assert case.control is not None
        given = [{**one, **case.control(seed, 1)} for seed, one in enumerate(given)]
    return given


def guided(model: nn.Module, case: Case, given: list[dict[str, Any]]) -> list[list[torch.Tensor]]:
    """Outputs of every branch, step by step."""
    return [[case.call(model, sigma, **one) for one in given] for sigma in SIGMAS]


GUIDED = {name: case for name, case in ALL.items() if name != "unet-svd"}  # whose latents differ between branches


@pytest.mark.parametrize("case", GUIDED.values(), ids=GUIDED)
def test_the_second_call_is_what_the_first_gave_plus_the_last_computed_difference(case: Case) -> None:
    model, given = case.build(), branches(case)
    plain = guided(model, case, given)
    attach(model, case, at(Guidance()))
    with batch_sizes(model, case) as seen:
        outputs = guided(model, case, given)
    calls = [len(sizes) for sizes in seen.per_call(record_of(model))]
    assert calls == [called for i in range(STEPS) for called in (1, i in COMPUTE)]
    for i, (first, second) in enumerate(outputs):
        cond, uncond = plain[LAST[i]]
        assert torch.equal(first, plain[i][0])
        torch.testing.assert_close(second, plain[i][0] + (uncond - cond), rtol=1e-5, atol=1e-5)
        assert torch.equal(second, plain[i][1]) == (i in COMPUTE)


def test_every_further_branch_has_a_difference_of_its_own() -> None:
    case = CASES["sd3"]
    model, given = case.build(), branches(case, 3)
    plain = guided(model, case, given)
    attach(model, case, at(Guidance()))
    for i, outputs in enumerate(guided(model, case, given)):
        for branch in range(3):
            expected = plain[i][0] + (plain[LAST[i]][branch] - plain[LAST[i]][0])
            torch.testing.assert_close(outputs[branch], expected, rtol=1e-5, atol=1e-5)


def test_a_branch_that_joins_late_is_computed_until_its_difference_is_known() -> None:
    case = CASES["sd3"]
    model, given = case.build(), branches(case)
    plain = guided(model, case, given)
    attach(model, case, at(Guidance(), (0,)))
    for i, sigma in enumerate(SIGMAS):
        first, *rest = [case.call(model, sigma, **one) for one in given[: 1 + (i >= 2)]]
        assert torch.equal(first, plain[i][0])
        for second in rest:
            # at step 2 nobody had expected it, at step 3 it is computed beside the first
            expected = plain[i][1] if i in (2, 3) else plain[i][0] + (plain[3][1] - plain[3][0])
            torch.testing.assert_close(second, expected, rtol=1e-5, atol=1e-5)


def test_in_another_order_of_the_branches_the_first_is_computed() -> None:
    case = CASES["wan"]
    model, given = case.build(), dict(zip(("cond", "uncond"), branches(case), strict=True))
    plain = [{name: case.call(model, sigma, **one) for name, one in given.items()} for sigma in SIGMAS]
    attach(model, case, at(Guidance(), (0, 1)))
    for i, sigma in enumerate(SIGMAS):
        order = ("uncond", "cond") if i == 3 else ("cond", "uncond")
        for place, name in enumerate(order):
            with model.cache_context(name):  # type: ignore[operator]
                output = case.call(model, sigma, **given[name])
            if place == 0:
                assert torch.equal(output, plain[i][name])
            elif name == "uncond":
                last = min(i, 1)
                expected = plain[i]["cond"] + (plain[last]["uncond"] - plain[last]["cond"])
                torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def test_a_second_call_that_failed_may_be_made_again() -> None:
    case = CASES["sd3"]
    model, given = case.build(), branches(case)
    plain = guided(model, case, given)
    attach(model, case, at(Guidance(), (0, 1)))
    for i, sigma in enumerate(SIGMAS):
        first = case.call(model, sigma, **given[0])
        if i in (1, 3):
            broken = {**given[1], "pooled_projections": torch.zeros(1, 3)}
            with pytest.raises(RuntimeError):
                case.call(model, sigma, **broken)
        second = case.call(model, sigma, **given[1])
        assert torch.equal(first, plain[i][0])
        if i <= 1 or i == 3:  # a call with another form of input drops what its branch had
            assert torch.equal(second, plain[i][1])


def test_the_first_branch_is_fresh_in_the_others() -> None:
    """A control input of a reused call is not: it comes with the difference."""
    assert PLAIN.control is not None
    model = PLAIN.build()
    hints = [PLAIN.control(seed, 1) for seed in range(4)]
    plain = [PLAIN.call(model, 0.5 - 1e-3 * (i // 2), **hint) for i, hint in enumerate(hints)]
    attach(model, PLAIN, at(Guidance(), (0,)))
    outputs = [PLAIN.call(model, 0.5 - 1e-3 * (i // 2), **hint) for i, hint in enumerate(hints)]
    assert equal_steps(outputs, plain) == [0, 1, 2]
    torch.testing.assert_close(outputs[3], plain[2] + (plain[1] - plain[0]), rtol=1e-5, atol=1e-5)


# -- guidance in one batch ----------------------------------------------------------------------------------------


def joined(values: list[Any]) -> Any:
    """The inputs of two branches in one batch."""
    first, second = values
    if isinstance(first, torch.Tensor) and first.ndim:
        return torch.cat(values)
    if isinstance(first, dict):
        return {key: joined([first[key], second[key]]) for key in first}
    if isinstance(first, list) and (not isinstance(first[0], torch.Tensor) or first[0].shape[0] != 1):
        return first + second  # one entry per sample
    return [joined(list(pair)) for pair in zip(first, second, strict=True)] if isinstance(first, list) else first


def batched(case: Case) -> dict[str, Any]:
    """Both branches of a step in one batch; what has no batch axis is there once."""
    given = branches(case)
    shared = {key for key, value in case.inputs(0, 2).items() if same_size(value, given[0][key])}
    return {key: given[0][key] if key in shared else joined([given[0][key], given[1][key]]) for key in given[0]}


def same_size(two: Any, one: Any) -> bool:
    """True for an input that does not grow with the batch."""
    return isinstance(two, torch.Tensor) and two.shape == one.shape


@pytest.mark.parametrize("case", GUIDED.values(), ids=GUIDED)
def test_of_a_batch_of_two_branches_the_second_is_run_and_the_first_is_forecast(case: Case) -> None:
    model, both = case.build(), batched(case)
    plain = [case.call(model, sigma, batch=2, **both) for sigma in SIGMAS]
    with batch_sizes(model, case) as whole:
        case.call(model, batch=2, **both)
    attach(model, case, at(Guidance()))
    with batch_sizes(model, case) as seen:
        outputs = [case.call(model, sigma, batch=2, **both) for sigma in SIGMAS]
    full = whole.sizes[0]
    assert seen.sizes == [full if i in COMPUTE else full // 2 for i in range(STEPS)]
    assert equal_steps(outputs, plain) == [*COMPUTE]
    for i, output in enumerate(outputs):
        (first, second), now = plain[LAST[i]].chunk(2), plain[i].chunk(2)[1]
        torch.testing.assert_close(output, torch.cat([now + (first - second), now]), rtol=1e-5, atol=1e-5)


def test_two_samples_that_start_from_the_same_noise_are_not_two_branches() -> None:
    case = CASES["sd3"]
    model, both = case.build(), batched(case)
    runs = []
    for wrapped in (False, True):
        if wrapped:
            attach(model, case, at(Guidance(), (0,)))
        latents, outputs = both["hidden_states"], []
        for sigma in SIGMAS:
            outputs.append(case.call(model, sigma, batch=2, **{**both, "hidden_states": latents}))
            latents = latents - 0.1 * outputs[-1]
        runs.append(outputs)
    assert equal_steps(*runs) == [*range(STEPS)]


def test_the_second_half_of_the_arguments() -> None:
    latents, text, ids = torch.zeros(4, 3, 8), torch.arange(4.0), torch.zeros(8, 3)
    sizes, hints = [[(1, 2)], [(1, 3)], [(1, 4)], [(1, 5)]], [torch.ones(4, 1), None]
    call = {"text": text, "ids": ids, "sizes": sizes, "more": {"hints": hints, "scale": 2.0, "layers": [0, 1, 2, 3]}}
    half = second_half(call, latents)
    assert torch.equal(half["text"], torch.tensor([2.0, 3.0]))
    assert half["ids"] is ids
    assert half["sizes"] == [[(1, 4)], [(1, 5)]]
    assert half["more"]["hints"][0].shape == (2, 1)
    assert (half["more"]["hints"][1], half["more"]["scale"], half["more"]["layers"]) == (None, 2.0, [0, 1, 2, 3])
    assert second_half((latents, text), latents)[0].shape == (2, 3, 8)


def test_the_second_half_where_samples_are_listed_and_where_frames_are_in_the_batch() -> None:
    samples = [torch.full((2, 2), float(k)) for k in range(2)]
    half = second_half({"x": samples, "t": torch.zeros(2)}, samples)
    assert (len(half["x"]), half["x"][0] is samples[1], half["t"].shape) == (1, True, (1,))
    video = torch.zeros(2, 4, 3, 8, 8)
    assert second_half(torch.zeros(6, 5), video).shape == (3, 5)


# -- beside other sites -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [Output(), Guidance()], ids=str)
def test_what_a_step_gave_that_reused_a_module_is_not_kept(where: Site) -> None:
    """Steps 0 to 2 are computed, step 3 reuses attention: step 4 draws on step 2."""
    case = CASES["sd3"]
    model, both = case.build(), batched(case)
    plain = [case.call(model, sigma, batch=2, **both) for sigma in SIGMAS]
    attach(model, case, Turns((0, 1, 2), (Module("attn"), where, where)))
    outputs = [case.call(model, sigma, batch=2, **both) for sigma in SIGMAS]
    assert equal_steps(outputs, plain) == [0, 1, 2]
    (first, second), now = plain[2].chunk(2), plain[4].chunk(2)[1]
    expected = plain[2] if where == Output() else torch.cat([now + (first - second), now])
    torch.testing.assert_close(outputs[4], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("together", [False, True], ids=["two calls", "one batch"])
def test_the_branches_keep_stack_residuals_of_one_step(together: bool) -> None:
    """Step 3 runs one branch only. Step 4 reuses the stack: of step 2 for both, or guidance would magnify the gap."""
    case = CASES["sd3"]
    runs = []
    for strategy in (Turns((0, 1, 2), (Guidance(), Stack(), Guidance())), Scripted((0, 1, 2))):
        model = attach(case.build(), case, strategy)
        if together:
            runs.append([case.call(model, sigma, batch=2, **batched(case)) for sigma in SIGMAS])
        else:
            runs.append([torch.cat(outputs) for outputs in guided(model, case, branches(case))])
    mixed, stack = runs
    assert equal_steps(mixed, stack) == [0, 1, 2, 4]


# -- types --------------------------------------------------------------------------------------------------------


@every_case
def test_outputs_keep_their_type_and_dtype(case: Case) -> None:
    model = case.build().to(torch.bfloat16)
    given = batched(case) if case.name in GUIDED else case.inputs(0, 2)
    inputs = {key: to_bfloat16(value) for key, value in given.items()}
    takes = "return_dict" in inspect.signature(model.forward).parameters
    forms: list[dict[str, Any]] = [{"return_dict": False}, {"return_dict": True}] if takes else [{}]

    def outputs() -> list[Any]:
        times = [to_bfloat16(case.time(sigma, 2)) for sigma in SIGMAS[:4]]
        with torch.no_grad():
            return [model(**inputs, **time, **forms[i % len(forms)]) for i, time in enumerate(times)]

    plain = outputs()
    for site in (Output(), Output(residual=True), Guidance()):
        attach(model, case, at(site))
        ours = outputs()
        assert bool(record_of(model).reused_steps) == (site != Guidance() or case.name in GUIDED)
        for before, now in zip(plain, ours, strict=True):
            assert type(now) is type(before)
            assert described(now) == described(before)


def to_bfloat16(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(torch.bfloat16) if value.is_floating_point() else value
    if isinstance(value, (list, tuple)):
        return type(value)(to_bfloat16(item) for item in value)
    return {key: to_bfloat16(item) for key, item in value.items()} if isinstance(value, dict) else value


def described(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output.shape, output.dtype, output.device
    return [described(item) for item in output.values()] if isinstance(output, dict) else [*map(described, output)]


def test_every_output_of_a_model_with_several_is_given() -> None:
    case = CASES["ltx2"]  # gives a picture and a sound
    model, both = case.build(), batched(case)

    def outputs() -> list[tuple[torch.Tensor, ...]]:
        with torch.no_grad():
            return [model(**both, **case.time(sigma, 2), return_dict=False) for sigma in SIGMAS]

    plain = outputs()
    for site in (Output(), Guidance()):
        attach(model, case, at(site))
        for i, ours in enumerate(outputs()):
            for k, (now, last) in enumerate(zip(plain[i], plain[LAST[i]], strict=True)):
                first, second = last.chunk(2)
                half = now.chunk(2)[1]
                expected = last if site == Output() else torch.cat([half + (first - second), half])
                torch.testing.assert_close(ours[k], expected, rtol=1e-5, atol=1e-5)


# -- what is held -------------------------------------------------------------------------------------------------


def test_after_a_run_nothing_is_held_of_either_branch() -> None:
    case = CASES["wan"]
    model, given = case.build(), branches(case)
    attach(model, case, at(Guidance()))
    shape = given[0]["hidden_states"].shape
    before = len(tensors_of_shape(*shape))
    for sigma in ALL_SIGMAS:
        for one in given:
            case.call(model, sigma, **one)
    assert len(tensors_of_shape(*shape)) == before
    case.call(model, 1.0, **given[0])  # the first call of a run that is broken off
    assert len(tensors_of_shape(*shape)) == before + 1
    cachedit.unwrap(model)
    assert len(tensors_of_shape(*shape)) == before


# -- pipelines ----------------------------------------------------------------------------------------------------

IN_TWO_CALLS = ["flux_true_cfg", "qwenimage", "cogview4", "lumina2", "wan", "wan22", "wan_heun", "wan_v2v"]
IN_ONE_BATCH = [
    *("dit", "pixart", "sana", "sd3", "z_image", "ltx", "cogvideox", "mochi"),
    *("sd15_img2img", "sd15_adapter", "sdxl", "animatediff"),
]
PIPES: dict[str, Callable[[], Built]] = {**PIPELINES, **UNET_PIPELINES}
COMPUTED = (0, 1, 2, 4)


def rounds(name: str, where: Site) -> tuple[cachedit.Run, float]:
    """Two equal runs of six steps and a clean end; returns the record, and how far the output is from the plain one."""
    built = PIPES[name]()
    baseline = run(built, steps=6)
    inside = dissect(built.pipe)
    cachedit.wrap(built.pipe, at(where, COMPUTED))
    first = run(built, steps=6)
    record = record_of(built.pipe)
    assert record.status == "finished"
    assert torch.equal(run(built, steps=6), first)
    cachedit.unwrap(built.pipe)
    assert dissect(built.pipe) == inside
    return record, float((first - baseline).norm() / baseline.norm())


def skipped(record: cachedit.Run, known: int) -> list[int]:
    """Steps that the script lets be reused, once as many steps of the run have been computed."""
    first = min(step.index for step in record.steps)
    return [i for i in (3, 5) if i >= first + known]


@pytest.mark.parametrize("name", [*IN_ONE_BATCH[:8], "flux_img2img", "flux_controlnet", "cogview4", "wan_v2v", "svd"])
def test_a_pipeline_reuses_its_output(name: str) -> None:
    record, distance = rounds(name, Output())
    assert record.reused_steps == skipped(record, 1)
    assert 0 < distance < 1


@pytest.mark.parametrize("name", IN_TWO_CALLS)
def test_a_pipeline_that_guides_in_two_calls_runs_one_of_them(name: str) -> None:
    record, distance = rounds(name, Guidance())
    by_step: dict[int, list[bool]] = {}
    for step in record.steps:
        by_step.setdefault(step.index, []).append(step.computed)
    assert [True, False] in by_step.values()
    assert all(computed in ([True, True], [True, False]) for computed in by_step.values())
    assert 0 < distance < 1


@pytest.mark.parametrize("name", IN_ONE_BATCH)
def test_a_pipeline_that_guides_in_one_batch_runs_half_of_it(name: str) -> None:
    record, distance = rounds(name, Guidance())
    assert record.reused_steps == skipped(record, 2)
    assert 0 < distance < 1


@pytest.mark.parametrize("name", ["flux", "svd"])
def test_without_a_second_branch_nothing_is_reused_and_nothing_changes(name: str) -> None:
    """Stable Video Diffusion shows the picture to one branch only: their latents differ."""
    with pytest.warns(UserWarning, match="reused no step"):
        record, distance = rounds(name, Guidance())
    assert (record.reused_steps, distance) == ([], 0)


# -- which passes ran a block, and on how many rows ---------------------------------------------------------------


class BatchSizes:
    """Rows of the batch in every execution of the first block, and at which call each happened."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.at: list[int] = []
        self.calls = 0

    def per_call(self, record: cachedit.Run) -> list[list[int]]:
        assert self.calls == len(record.steps)
        return [[s for s, at in zip(self.sizes, self.at, strict=True) if at == call] for call in range(self.calls)]

    per_step = per_call


@contextmanager
def batch_sizes(model: nn.Module, case: Case) -> Iterator[BatchSizes]:
    seen = BatchSizes()
    first = case.blocks(model)[0] if case.stack else model.down_blocks[0].resnets[0]  # type: ignore[union-attr, index]

    def entered(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        seen.sizes.append(len(tensors[0]))
        seen.at.append(seen.calls)

    def called(*_: Any) -> None:
        seen.calls += 1

    handles = [
        first.register_forward_pre_hook(entered, with_kwargs=True),
        model.register_forward_hook(called),
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
