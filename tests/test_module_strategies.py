"""FORA, PAB, FasterCache, DeepCache and MixCache: what they compute, against lists that can be checked by hand."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from conftest import SIGMAS, STEPS, attach, dissect, drive, equal_steps, record_of
from diffusers import PyramidAttentionBroadcastConfig
from diffusers.hooks import apply_pyramid_attention_broadcast
from torch import nn

import cachedit
from cachedit import Context, FeatureStrategy, Schedule, Strategy, UnsupportedModelError
from cachedit.kernels import low_pass
from cachedit.strategies.clocks import training_time
from cachedit.strategies.deep_cache import DeepCache
from cachedit.strategies.faster_cache import FasterCache
from cachedit.strategies.fora import FORA
from cachedit.strategies.mix_cache import MixCache
from cachedit.strategies.pab import PAB
from cachedit.strategy import Guidance, Module, Skip, Stack
from zoo.models import CASES, Case
from zoo.pipelines import PIPELINES, run
from zoo.unet_models import UNETS
from zoo.unet_pipelines import UNET_PIPELINES

DISCRETE = [round(999 * sigma) for sigma in SIGMAS]  # 999 899 799 699 599 500 400 300 200 100
KINDS = {
    "attn": r"^(transformer_)?blocks\.\d+\.attn1$",
    "temporal": r"^temporal_transformer_blocks\.\d+\.attn1$",
    "cross": r"\.attn2$",
    "mlp": r"\.(ff|ffn)$",
}


@contextmanager
def rows_by_kind(model: nn.Module) -> Iterator[dict[str, list[int]]]:
    """For every call of the model the rows of the batch in the first module of each kind; 0 where none ran."""
    seen: dict[str, list[int]] = {kind: [] for kind in KINDS}

    def called(*_: Any) -> None:
        for rows in seen.values():
            rows.append(0)

    handles = [model.register_forward_pre_hook(called)]
    for kind, pattern in KINDS.items():
        first = next((module for name, module in model.named_modules() if re.search(pattern, name)), None)

        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], kind: str = kind) -> None:
            seen[kind][-1] = len(next(x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)))

        if first is not None:
            handles.append(first.register_forward_pre_hook(note, with_kwargs=True))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def steps(rows: Sequence[int]) -> list[int]:
    """Steps at which something ran."""
    return [i for i, count in enumerate(rows) if count]


def driven(case: Case, strategy: FeatureStrategy, **options: Any) -> tuple[dict[str, list[int]], Any]:
    """What ran in a run of ten steps, kind by kind, and its outputs."""
    model = case.build()
    attach(model, case, strategy, **options)
    with rows_by_kind(model) as seen:
        outputs = drive(model, case)
    return seen, outputs


# -- FORA ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pixart", "latte", "wan"])
def test_fora_runs_its_modules_at_every_third_step(name: str) -> None:
    case = CASES[name]
    seen, outputs = driven(case, FORA())
    assert {kind: steps(rows) for kind, rows in seen.items() if steps(rows)} == {
        kind: [0, 3, 6, 9] for kind in KINDS if kind != "temporal" or name == "latte"
    }
    assert equal_steps(outputs, drive(case.build(), case)) == [0, 3, 6, 9]


def test_fora_leaves_gates_and_norms_fresh() -> None:
    """The modules' outputs are those of step 0, what modulates them is not."""
    case = CASES["dit"]
    _, outputs = driven(case, FORA(interval=10))
    assert equal_steps(outputs, outputs[:1] * STEPS) == [0]


@pytest.mark.parametrize(("interval", "total", "wanted"), [(1, 4, [0, 1, 2, 3]), (7, 20, [0, 7, 14])])
def test_fora_counts_from_the_first_step_of_the_run(interval: int, total: int, wanted: list[int]) -> None:
    for first in (0, 5):  # image to image begins in the middle of a schedule
        computed = [first]
        for step in range(first + 1, first + total):
            if FORA(interval).should_compute(Context(step=step, computed_steps=computed)):
                computed.append(step)
        assert [step - first for step in computed] == wanted


# -- PAB ----------------------------------------------------------------------------------------------------------


def test_pab_runs_every_kind_of_attention_at_its_own_pace() -> None:
    """In the range are steps 2 (timestep 799) to 8 (200); step 1 is the last one that computes everything."""
    case = CASES["latte"]
    seen, _ = driven(case, PAB(), timesteps=DISCRETE)
    assert {kind: steps(rows) for kind, rows in seen.items()} == {
        "attn": [0, 1, 3, 5, 7, 9],
        "temporal": [0, 1, 5, 9],
        "cross": [0, 1, 7, 9],
        "mlp": [*range(10)],
    }


def test_pab_computes_a_step_at_which_all_kinds_are_due() -> None:
    case = CASES["latte"]
    model = attach(case.build(), case, PAB(spatial=2, temporal=2, cross=4, timesteps=(-1, 1001)), timesteps=DISCRETE)
    with rows_by_kind(model) as seen:
        outputs = drive(model, case)
    assert record_of(model).computed_steps == [0, 4, 8]
    assert (steps(seen["attn"]), steps(seen["cross"])) == ([0, 2, 4, 6, 8], [0, 4, 8])
    assert equal_steps(outputs, drive(case.build(), case)) == [0, 4, 8]


def test_pab_keeps_no_kind_that_it_always_computes() -> None:
    assert PAB(temporal=1).sites == (Module("attn"), Module("cross"))
    case = CASES["latte"]
    seen, _ = driven(case, PAB(spatial=1, temporal=1, cross=2, timesteps=(-1, 1001)), timesteps=DISCRETE)
    assert (steps(seen["attn"]), steps(seen["temporal"])) == ([*range(10)], [*range(10)])
    assert steps(seen["cross"]) == [0, 2, 4, 6, 8]


@pytest.mark.parametrize(
    ("name", "ours", "theirs"),
    [
        # Over the whole run, or from a step on that follows a multiple of the interval, age and call count agree.
        # The hook takes attention along time in Latte for spatial.
        (
            "latte",
            PAB(spatial=2, temporal=2, cross=3, timesteps=(-1, 1001)),
            {
                f"{kind}_attention_{setting}": value
                for kind, interval in (("spatial", 2), ("cross", 3))
                for setting, value in (("block_skip_range", interval), ("timestep_skip_range", (-1, 1001)))
            },
        ),
        (
            "cogvideox",
            PAB(timesteps=(100, 750)),
            {"spatial_attention_block_skip_range": 2, "spatial_attention_timestep_skip_range": (100, 750)},
        ),
    ],
)
def test_pab_gives_what_the_hook_of_diffusers_gives(name: str, ours: PAB, theirs: dict[str, Any]) -> None:
    case, now = CASES[name], [0]
    seen, outputs = driven(case, ours, timesteps=DISCRETE)
    model = case.build()
    config = PyramidAttentionBroadcastConfig(**theirs, current_timestep_callback=lambda: now[0])
    apply_pyramid_attention_broadcast(model, config)
    expected = []
    for sigma, now[0] in zip(SIGMAS, DISCRETE, strict=True):
        expected += drive(model, case, [sigma])
    assert equal_steps(expected, drive(case.build(), case)) != [*range(STEPS)]
    for ours_at, theirs_at in zip(outputs, expected, strict=True):
        torch.testing.assert_close(ours_at, theirs_at, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [
        (Schedule(3, (981.0, 500.0, 20.0), (1.0, 0.9, 0.1)), [981, 500, 20]),
        (Schedule(3, (1.0, 0.5, 0.1), (1.0, 0.5, 0.1)), [1000, 500, 100]),
        (Schedule(3, (0.0, 500.0, 900.0), (1.0, 0.5, 0.1)), [1000, 500, 100]),  # upwards
        (Schedule(3, (1.64, 0.0, -1.55), (1.0, 0.7, 0.002)), [1000, 700, 2]),  # a logarithm
        (Schedule(3), [1000, 500, 0]),
    ],
    ids=["training", "unit", "upwards", "logarithm", "unknown"],
)
def test_timesteps_of_every_kind_of_schedule_on_the_scale_of_training(schedule: Schedule, wanted: list[float]) -> None:
    assert [training_time(schedule, step) for step in range(3)] == pytest.approx(wanted)


# -- FasterCache --------------------------------------------------------------------------------------------------


def test_faster_cache_without_a_second_branch_reuses_attention_at_every_other_step() -> None:
    """Timestep 599 of step 4 is the first below 681; steps 3 and 8 compute everything."""
    case = CASES["latte"]
    seen, outputs = driven(case, FasterCache(), timesteps=DISCRETE)
    assert steps(seen["attn"]) == steps(seen["temporal"]) == [0, 1, 2, 3, 5, 7, 8]
    assert steps(seen["cross"]) == steps(seen["mlp"]) == [*range(10)]
    assert equal_steps(outputs, drive(case.build(), case)) == [0, 1, 2, 3, 5, 7, 8]


def two_branches(case: Case) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Inputs of both branches of a step, and those of their batch."""
    first, second = case.inputs(0, 1), case.inputs(1, 1)
    second["hidden_states"] = first["hidden_states"]
    return first, second, {key: torch.cat([first[key], second[key]]) for key in first}


def test_faster_cache_on_a_batch_of_two_branches() -> None:
    case = CASES["cogvideox"]
    model, both = case.build(), two_branches(case)[2]
    attach(model, case, FasterCache(), timesteps=DISCRETE)
    with rows_by_kind(model) as seen:
        for sigma in SIGMAS:
            case.call(model, sigma, batch=2, **both)
    assert seen["attn"] == [2, 2, 2, 2, 0, 1, 0, 1, 2, 0]
    assert seen["mlp"] == [2, 2, 2, 2, 1, 1, 1, 1, 2, 1]


def test_faster_cache_on_two_calls() -> None:
    case = CASES["cogvideox"]
    model, (first, second, _) = case.build(), two_branches(case)
    attach(model, case, FasterCache(), timesteps=DISCRETE)
    with rows_by_kind(model) as seen:
        for sigma in SIGMAS:
            case.call(model, sigma, **first)
            case.call(model, sigma, **second)
    assert (steps(seen["attn"][::2]), steps(seen["attn"][1::2])) == ([0, 1, 2, 3, 5, 7, 8], [0, 1, 2, 3, 8])
    assert (steps(seen["mlp"][::2]), steps(seen["mlp"][1::2])) == ([*range(10)], [0, 1, 2, 3, 8])


def test_faster_cache_scales_the_bands_of_the_difference() -> None:
    case = CASES["cogvideox"]
    model, both = case.build(), two_branches(case)[2]
    plain = [case.call(model, sigma, batch=2, **both) for sigma in SIGMAS]
    attach(model, case, FasterCache(attention=(-2, -1), low_gain=1.5, high_gain=0.5), timesteps=DISCRETE)
    for i, sigma in enumerate(SIGMAS):
        first, second = case.call(model, sigma, batch=2, **both).chunk(2)
        fresh = plain[i].chunk(2)[1]
        torch.testing.assert_close(second, fresh, rtol=1e-5, atol=1e-5)
        if i < 4 or i == 8:
            assert torch.equal(first, plain[i].chunk(2)[0])
            continue
        uncond, cond = plain[8 if i > 8 else 3].chunk(2)
        low = low_pass(uncond - cond, 0.4)
        high = uncond - cond - low
        assert float(low.norm()) > 0.1 < float(high.norm())
        expected = fresh + 1.5 * low + (0.5 if DISCRETE[i] < 301 else 1.0) * high
        torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("weight", "step", "wanted"), [(0.5, 8, [-0.5, 1.5]), (0.0, 8, [0.0, 1.0]), (None, 8, [-0.8, 1.8])]
)
def test_faster_cache_weighs_the_two_newest_attention_outputs(
    weight: float | None, step: int, wanted: list[float]
) -> None:
    context = Context(step=step, schedule=Schedule(11), computed_steps=[5, 7], site=Module("attn"))
    assert FasterCache(weight).weights(context) == pytest.approx(wanted)


def test_faster_cache_leaves_the_difference_as_it_is_by_default() -> None:
    context = Context(step=8, schedule=Schedule(11), computed_steps=[5, 7], site=Guidance())
    assert FasterCache().weights(context) is None
    assert FasterCache(high_gain=1.1).weights(context) == ([0.0, 1.0], [0.0, 1.1])


# -- DeepCache ----------------------------------------------------------------------------------------------------


def test_deep_cache_runs_one_layer_on_the_way_up_at_a_reused_step() -> None:
    case = UNETS["unet-sd"]
    model = case.build()
    plain = drive(model, case)
    ran: list[str] = []
    for name, module in model.named_modules():
        if re.fullmatch(r".*resnets\.\d+", name):
            module.register_forward_pre_hook(lambda *_, name=name: ran.append(name))
    attach(model, case, DeepCache())
    outputs, counts = [], []
    for sigma in SIGMAS:
        ran.clear()
        outputs += drive(model, case, [sigma])
        counts.append(len(ran))
    # 6 down, 2 in the middle, 9 up; the outermost layer up and none down
    assert counts == [17 if i % 3 == 0 else 1 for i in range(STEPS)]
    assert equal_steps(outputs, plain) == [0, 3, 6, 9]


def test_deep_cache_goes_deeper_by_level_and_layer() -> None:
    assert DeepCache(level=1, layer=2).sites == (Skip(1, 2),)
    case = UNETS["unet-sd"]
    plain = drive(case.build(), case)
    errors = []
    for level, layer in ((0, 0), (1, 0), (2, 2)):
        outputs = drive(attach(case.build(), case, DeepCache(level=level, layer=layer)), case)
        errors.append(float((outputs[2] - plain[2]).norm()))
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize(
    ("strategy", "total", "wanted"),
    [
        (DeepCache(interval=5), 12, [0, 5, 10]),
        (DeepCache(interval=5, center=0.3), 50, [0, 5, 9, 13, 17, 21, 26, 31, 37, 43]),  # published: center 15
    ],
)
def test_deep_cache_computes_even_steps_or_those_around_a_center(
    strategy: DeepCache, total: int, wanted: list[int]
) -> None:
    computed = [0]
    for step in range(1, total):
        if strategy.should_compute(Context(step=step, schedule=Schedule(total), computed_steps=computed)):
            computed.append(step)
    assert computed == wanted


def test_deep_cache_refuses_an_uneven_schedule_of_unknown_length_before_the_first_step() -> None:
    case = UNETS["unet-sd"]
    model = case.build()
    cachedit.wrap(model, DeepCache(center=0.3))
    with pytest.raises(ValueError, match=r"center=0\.3 must know the number of steps.*num_inference_steps"):
        case.call(model, 1.0)
    cachedit.wrap(model, DeepCache())
    case.call(model, 1.0)


def test_deep_cache_of_a_transformer_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"FluxTransformer2DModel has no way up.*UNets"):
        attach(CASES["flux"].build(), CASES["flux"], DeepCache())


# -- MixCache -----------------------------------------------------------------------------------------------------

RANGE = Stack(0.25, 0.75)


@pytest.mark.parametrize(
    ("changes", "reused", "impact", "wanted"),
    [
        ((0.1, 0.06, 0.06), (), (1, 1, 1), Stack()),  # 0.1 / 1, 0.06 / 0.5, 0.06 / 0.5
        ((0.1, 0.04, 0.06), (), (1, 1, 1), Guidance()),
        ((0.1, 0.06, 0.04), (), (1, 1, 1), RANGE),
        ((0.1, 0.04, 0.06), (Guidance(),), (1, 1, 1), Stack()),  # 0.04 / 0.5 * 5
        ((0.1, 0.04, 0.06), (), (1, 3, 1), Stack()),
        ((0.1, None, 0.04), (RANGE,), (1, 1, 1), Stack()),  # one call per step
        ((0.1, None, 0.04), (Stack(),), (1, 1, 1), RANGE),
    ],
)
def test_mix_cache_reuses_what_costs_least(
    changes: tuple[float | None, ...], reused: tuple[Any, ...], impact: tuple[float, float, float], wanted: Any
) -> None:
    strategy = MixCache(impact=impact)
    measured = {site: change for site, change in zip(strategy.sites, changes, strict=True) if change is not None}
    context = Context(step=9, computed_steps=[8], changes=measured, reused=reused)
    assert [site for site in strategy.sites if strategy.reuses(context, site)] == [wanted]


def test_mix_cache_computes_the_warmup_and_then_one_step_in_an_interval() -> None:
    strategy, computed = MixCache(warmup=0.15, interval=3), [0]
    for step in range(1, 12):
        context = Context(step=step, schedule=Schedule(12), computed_steps=computed, changes={Stack(): 0.1})
        if strategy.should_compute(context):
            computed.append(step)
    assert computed == [0, 1, 4, 7, 10]  # 12 * 0.15 is 1.8
    unknown = Context(step=6, schedule=Schedule(12), computed_steps=[4])
    assert strategy.should_compute(unknown) == "no two computed steps yet"


def mixed(case: Case, calls: Sequence[dict[str, Any]], batch: int) -> tuple[cachedit.Run, dict[str, list[int]]]:
    model = case.build()
    attach(model, case, MixCache(warmup=0.2, interval=3), timesteps=DISCRETE)
    with rows_by_kind(model) as seen:
        for sigma in SIGMAS:
            for inputs in calls:
                case.call(model, sigma, batch=batch, **inputs)
    return record_of(model), seen


def test_mix_cache_on_a_batch_of_two_branches_reuses_one_site_at_a_time() -> None:
    case = CASES["cogvideox"]
    record, seen = mixed(case, [two_branches(case)[2]], 2)
    sites = [step.sites for step in record.steps]
    assert [bool(site) for site in sites] == [i in (2, 3, 5, 6, 8, 9) for i in range(STEPS)]
    allowed = {str(Stack()): 0, str(Guidance()): 1, str(RANGE): 2}  # rows of the first block
    assert seen["mlp"] == [allowed[site] if site else 2 for site in sites]
    reused = [site for site in sites if site]
    assert len(set(reused)) > 1
    assert all(before != after for before, after in zip(reused, reused[1:], strict=False))


def test_mix_cache_on_two_calls_and_on_one() -> None:
    case = CASES["cogvideox"]
    first, second, _ = two_branches(case)
    record, _ = mixed(case, [first, second], 1)
    chosen = {step.index: step.sites for step in record.steps if step.branch == "1"}
    leads = {step.index: step.sites for step in record.steps if step.branch == "0"}
    assert str(Guidance()) in chosen.values()
    assert leads == {i: "" if site == str(Guidance()) else site for i, site in chosen.items()}
    alone, _ = mixed(case, [first], 1)
    assert {step.sites for step in alone.steps} == {"", str(Stack()), str(RANGE)}


# -- all ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "option", "value", "allowed"),
    [
        (FORA, "interval", 0, "1"),
        (PAB, "spatial", 0, "an integer, 1 or more"),
        (PAB, "temporal", 2.5, "an integer, 1 or more"),
        (PAB, "cross", True, "an integer, 1 or more"),
        (PAB, "timesteps", (800, 100), "two rising numbers"),
        (PAB, "timesteps", 100, "two rising numbers"),
        (PAB, "timesteps", (100, float("nan")), "two rising numbers"),
        (FasterCache, "weight", 1.5, "from 0 to 1"),
        (FasterCache, "attention", (1, 2, 3), "two rising numbers"),
        (FasterCache, "guidance", ("0", "1"), "two rising numbers"),
        (FasterCache, "guidance_interval", 0, "an integer, 1 or more"),
        (FasterCache, "low_gain", -1.0, "from 0 to 2"),
        (FasterCache, "high_gain", float("nan"), "from 0 to 2"),
        (DeepCache, "interval", 0, "1"),
        (DeepCache, "level", -1, "an integer, 0 or more"),
        (DeepCache, "layer", 0.5, "an integer, 0 or more"),
        (DeepCache, "center", 1.0, "between 0 and 1"),
        (DeepCache, "power", 1.0, "above 1"),
        (MixCache, "warmup", 1.5, "from 0 to 1"),
        (MixCache, "interval", 0, "an integer, 1 or more"),
        (MixCache, "span", (0.5, 0.5), "two rising shares"),
        (MixCache, "span", (0, 1), "two rising shares"),
        (MixCache, "impact", (1, 0, 1), "three positive numbers"),
        (MixCache, "impact", 1.0, "three positive numbers"),
    ],
)
def test_an_impossible_option_is_refused_with_what_is_allowed(
    cls: type[Strategy], option: str, value: Any, allowed: str
) -> None:
    with pytest.raises(ValueError, match=f"(?s){option}.*{re.escape(str(value))}.*allowed.*{allowed}"):
        cls(**{option: value})


def test_a_pab_that_would_reuse_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="allowed: at least one above 1"):
        PAB(1, 1, 1)


@pytest.mark.parametrize(
    ("spelling", "strategy"),
    [
        ("Fora", FORA()),
        ("pab", PAB()),
        ("faster-cache", FasterCache()),
        ("deepcache", DeepCache()),
        ("MIXCACHE", MixCache()),
    ],
)
def test_any_spelling_finds_them(spelling: str, strategy: Strategy) -> None:
    assert Strategy.find(spelling, {}) == strategy


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        *((name, strategy) for name in ("wan", "ltx", "animatediff") for strategy in ("fora", "pab", "faster_cache")),
        ("sd15", "deep_cache"),
        ("sdxl", "deep_cache"),
        ("wan", "mix_cache"),
        ("ltx", "mix_cache"),
    ],
)
def test_a_pipeline_runs_repeats_itself_and_comes_back(name: str, strategy: str) -> None:
    built = {**PIPELINES, **UNET_PIPELINES}[name]()
    baseline = run(built)
    inside = dissect(built.pipe)
    cachedit.wrap(built.pipe, strategy)
    first = run(built)
    assert record_of(built.pipe).reused_steps
    assert torch.equal(run(built), first)
    assert 0 < float((first - baseline).norm()) < float(baseline.norm())
    cachedit.unwrap(built.pipe)
    assert dissect(built.pipe) == inside
