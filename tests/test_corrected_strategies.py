"""ERTACache and CacheQuant: their lists by hand, what the calibrated rows are, where they apply, and that they help."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from conftest import STEPS, attach, drive, equal_steps, record_of

import cachedit
from cachedit import Context, Profile, ProfileError, Schedule, UnsupportedModelError
from cachedit.calibration import calibrate
from cachedit.calibration.measures.correction import Correction, line, moments
from cachedit.calibration.measures.step_scale import StepScale
from cachedit.evaluate.loading import load_pipeline
from cachedit.run import Step
from cachedit.samples import prompts, sample_path
from cachedit.strategies.cache_quant import CacheQuant
from cachedit.strategies.corrected import Corrected
from cachedit.strategies.ertacache import ERTACache
from cachedit.strategy import Output, Skip, Stack
from zoo.models import CASES

Table = list[list[float]]
AXES = {"output_error": ["step", "gap"], "residual_error": ["step", "gap"]} | {
    name: ["step", "channel"] for name in ("correction_scale", "correction_shift")
}


def ramp(steps: int, slope: float, gaps: int = 3) -> Table:
    """Errors that grow by ``slope`` with every step of distance."""
    return [[slope * gap for gap in range(gaps + 1)] for _ in range(steps)]


def profile_of(
    tables: dict[str, Table],
    computed: Sequence[int] = (),
    rows: dict[str, tuple[Any, Any]] | None = None,
    scales: dict[str, list[float]] | None = None,
    **fields: Any,
) -> Profile:
    """A profile with the tables of both strategies, and rows that change nothing unless they are given."""
    steps = len(next(iter(tables.values())))
    rows = rows or {branch: ([[1.0]] * steps, [[0.0]] * steps) for branch in tables}
    arrays = {
        "output_error": tables,
        "residual_error": tables,
        "correction_mask": {branch: [int(step in computed) for step in range(steps)] for branch in rows},
        "correction_scale": {branch: scale for branch, (scale, _) in rows.items()},
        "correction_shift": {branch: shift for branch, (_, shift) in rows.items()},
        "step_scale": scales or {branch: [1.0] * steps for branch in tables},
    }
    return Profile(arrays, axes=AXES, **fields)


def schedule_of(steps: int) -> Schedule:
    return Schedule(steps, sigmas=tuple(1 - i / steps for i in range(steps)))


def computed_steps(strategy: Corrected, profile: Profile, steps: int) -> tuple[int, ...]:
    return strategy.configured(profile).computed(schedule_of(steps), profile)  # type: ignore[attr-defined]


# -- ERTACache's list ---------------------------------------------------------------------------------------------


def test_ertacache_computes_once_the_error_has_reached_the_threshold() -> None:
    # Distances 1, 2, 3 have errors 0.125, 0.25, 0.375.
    assert computed_steps(ERTACache(threshold=0.25), profile_of({"cond": ramp(7, 0.125)}), 7) == (0, 2, 4, 6)
    assert computed_steps(ERTACache(threshold=0.26), profile_of({"cond": ramp(7, 0.125)}), 7) == (0, 3, 6)


def test_ertacache_goes_by_the_worse_branch() -> None:
    later = [*ramp(3, 0.125), *ramp(4, 0.3)]
    assert computed_steps(ERTACache(threshold=0.26), profile_of({"a": ramp(7, 0.125), "b": later}), 7) == (
        0,
        3,
        4,
        5,
        6,
    )


def test_ertacache_reuses_no_further_than_was_measured() -> None:
    assert computed_steps(ERTACache(threshold=0.1), profile_of({"cond": ramp(10, 0.0)}), 10) == (0, 4, 8)


def test_ertacache_equals_the_paper_s_scan_of_a_series() -> None:
    """Algorithm: q~ = q_0; for each step, reuse if mean|q~ - q_i| / mean|q_i| is below the threshold, else q~ = q_i."""
    for seed in range(50):
        torch.manual_seed(seed)
        series = torch.randn(20, 8).cumsum(0) + 5
        threshold = random.Random(seed).choice([0.2, 0.4, 0.8])
        wanted, kept = [0], series[0]
        for i in range(1, 20):
            if (kept - series[i]).abs().mean() / series[i].abs().mean() >= threshold:
                wanted.append(i)
                kept = series[i]
        errors = [
            [float((y - z).abs().mean() / z.abs().mean()) for z in series[i:]] + [9.0] * i for i, y in enumerate(series)
        ]
        assert list(computed_steps(ERTACache(threshold=threshold), profile_of({"cond": errors}), 20)) == wanted


def test_ertacache_makes_its_list_for_other_numbers_of_steps() -> None:
    # Twice as many steps lie half as far apart, so twice as many have errors below the threshold.
    profile = profile_of({"cond": ramp(10, 0.1, gaps=9)}, sigmas=[1 - i / 10 for i in range(10)])
    assert computed_steps(ERTACache(threshold=0.29), profile, 10) == (0, 3, 6, 9)
    assert computed_steps(ERTACache(threshold=0.29), profile, 20)[:4] == (0, 6, 12, 18)


# -- CacheQuant's list --------------------------------------------------------------------------------------------


def test_cache_quant_s_groups_by_hand() -> None:
    # Interval 2: three groups of 1 to 4 steps. A first group of more than one step costs 9; then the second group may
    # have 1 to 4 steps: 0 + (1 + 2 + 3), 1 + (1 + 1), (1 + 2) + 1, (1 + 2 + 9) + 0.
    errors = [
        [0, 9, 9, 9],
        [0, 1, 2, 9],
        [0, 1, 2, 3],
        [0, 1, 1, 1],
        [0, 1, 1, 1],
        [0, 0, 0, 0],
    ]
    assert computed_steps(CacheQuant(interval=2), profile_of({"cond": errors}), 6) == (0, 1, 3)


@pytest.mark.parametrize("interval", [2, 3, 4, 5])
def test_cache_quant_s_groups_are_the_cheapest_of_all(interval: int) -> None:
    draw = random.Random(interval)
    for steps in (9, 12):
        errors = [[0.0, *(draw.random() for _ in range(9))] for _ in range(steps)]
        shortest, longest, budget = math.ceil(interval / 2), 2 * interval, math.ceil(steps / interval)

        def cost(starts: Sequence[int], errors: Table = errors, steps: int = steps) -> float:
            ends = [*starts[1:], steps]
            return sum(errors[a][q] for a, b in zip(starts, ends, strict=True) for q in range(1, b - a))

        allowed = [
            (0, *rest)
            for rest in itertools.combinations(range(1, steps), budget - 1)
            if all(shortest <= b - a <= longest for a, b in itertools.pairwise((0, *rest, steps)))
        ]
        found = computed_steps(CacheQuant(interval=interval), profile_of({"cond": errors}), steps)
        assert found in allowed
        assert cost(found) == pytest.approx(min(map(cost, allowed)))


def test_cache_quant_s_groups_end_at_the_widest_gap_of_the_table() -> None:
    # Reuse at 3 steps in a row was measured, so groups have at most 4 steps, and 12 steps need three.
    assert computed_steps(CacheQuant(interval=10), profile_of({"cond": ramp(12, 0.1)}), 12) == (0, 4, 8)


def test_cache_quant_with_interval_1_computes_everything() -> None:
    assert computed_steps(CacheQuant(interval=1), profile_of({"cond": ramp(6, 0.1)}), 6) == tuple(range(6))


@pytest.mark.parametrize("interval", [1, 2, 3, 5, 8, 50])
def test_every_number_of_steps_has_groups(interval: int) -> None:
    profile = profile_of({"cond": ramp(20, 0.1, gaps=10)}, sigmas=[1 - i / 20 for i in range(20)])
    for steps in range(1, 61):
        found = computed_steps(CacheQuant(interval=interval), profile, steps)
        assert found[0] == 0
        assert found[-1] < steps
        assert len(found) >= math.ceil(steps / interval)


def test_open_options_come_from_the_profile() -> None:
    recommends = profile_of({"cond": ramp(6, 0.1)}, defaults={"interval": 5, "threshold": 0.7})
    assert CacheQuant().configured(recommends).interval == 5
    assert CacheQuant(interval=4).configured(recommends).interval == 4
    assert ERTACache().configured(recommends).threshold == 0.7
    plain = profile_of({"cond": ramp(6, 0.1)})
    assert [CacheQuant(scope=scope).configured(plain).interval for scope in ("stack", "skip")] == [2, 3]  # type: ignore[arg-type]
    assert ERTACache().configured(plain).threshold == 0.1


def test_where_they_reuse() -> None:
    assert ERTACache().sites == (Output(residual=True),)
    assert CacheQuant().sites == (Stack(),)
    assert CacheQuant(scope="skip").sites == (Skip(),)


@pytest.mark.parametrize(
    ("cls", "options", "allowed"),
    [
        (ERTACache, {"threshold": -0.1}, "a number, 0 or more"),
        (ERTACache, {"threshold": float("nan")}, "a number, 0 or more"),
        (ERTACache, {"threshold": True}, "a number, 0 or more"),
        (ERTACache, {"adjust_timesteps": 1}, "True, False"),
        (ERTACache, {"correction": None}, "True, False"),
        (CacheQuant, {"interval": 0}, "an integer, 1 or more"),
        (CacheQuant, {"interval": 2.0}, "an integer, 1 or more"),
        (CacheQuant, {"scope": "modules"}, "'stack', 'skip'"),
        (CacheQuant, {"correction": 1}, "True, False"),
    ],
)
def test_impossible_options_are_refused(cls: Any, options: dict[str, Any], allowed: str) -> None:
    (name, value), *_ = options.items()
    with pytest.raises(ValueError, match=f"{cls.__name__} {name}={value!r}; allowed: {allowed}"):
        cls(**options)


# -- where the rows apply -----------------------------------------------------------------------------------------

LINES = {
    "cond": ([[1.0, 1.0], [2.0, 3.0], [4.0, 5.0], [1.0, 1.0], [6.0, 7.0], [8.0, 9.0]], [[0.0, 0.5]] * 6),
    "uncond": ([[1.5, 1.5]] * 6, [[0.0, 0.0]] * 6),
}
TABLES = {"cond": ramp(6, 0.1), "uncond": ramp(6, 0.1)}
FITTED = profile_of(TABLES, (0, 3), LINES, {"cond": [1, 0.9, 0.8, 1, 0.7, 0.6], "uncond": [1, 0.5, 1, 1, 1, 0]})
ERTA = ERTACache(threshold=0.3)


def at(step: int, computed: list[int], branch: str = "cond", profile: Profile = FITTED, start: int = 0) -> Context:
    return Context(
        step=step,
        schedule=schedule_of(6),
        computed_steps=computed,
        profile=profile,
        branch=branch,
        expert_start=start,
    )


def test_a_reused_step_gets_its_own_row() -> None:
    assert ERTA.correct(at(2, [0])) == ([4.0, 5.0], [0.0, 0.5])
    assert ERTA.correct(at(4, [3])) == ([6.0, 7.0], [0.0, 0.5])
    assert ERTA.correct(at(2, [0], "uncond")) == ([1.5, 1.5], [0.0, 0.0])


def test_a_row_is_not_applied_to_what_it_was_not_fitted_for() -> None:
    assert ERTA.correct(at(5, [3])) is not None
    assert ERTA.correct(at(5, [4])) is None  # a step outside the list was computed, after a lost residual for instance
    assert ERTA.correct(at(5, [4], start=4)) == ([8.0, 9.0], [0.0, 0.5])  # unless it is the first of an expert
    assert ERTA.correct(at(5, [3], "negative")) is None
    assert dataclasses.replace(ERTA, correction=False).correct(at(5, [3])) is None
    assert ERTA.correct(at(5, [3], profile=profile_of(TABLES, (0, 3)))) is None  # all scales 1 and shifts 0


def test_rows_fitted_on_other_steps_are_refused_before_the_run() -> None:
    ERTA.check_run(schedule_of(6), FITTED)
    with pytest.raises(
        ProfileError, match="ERTACache can only run on the steps .* has 6 steps .* With correction=False "
    ):
        ERTA.check_run(schedule_of(8), FITTED)
    dataclasses.replace(ERTA, correction=False).check_run(schedule_of(8), FITTED)
    ERTA.check_run(schedule_of(8), profile_of(TABLES, (0, 3)))  # there is nothing to apply


def test_rows_fitted_for_another_list_are_refused_before_the_run() -> None:
    with pytest.raises(ProfileError, match=r"ERTACache computes steps 0 2 4 .* fitted while 0 3 .* correction=False"):
        ERTACache(threshold=0.2).check_run(schedule_of(6), FITTED)
    with pytest.raises(ProfileError, match="CacheQuant computes steps 0 1 2 3 4 5 "):
        CacheQuant(interval=1).check_run(schedule_of(6), FITTED)
    ERTACache(threshold=0.2, correction=False).check_run(schedule_of(6), FITTED)


def test_step_scales_are_the_smaller_ones_of_all_branches() -> None:
    assert ERTA.step_scales(schedule_of(6), FITTED) is None
    assert not ERTA.adjusts_sampler
    adjusts = dataclasses.replace(ERTA, adjust_timesteps=True)
    assert adjusts.adjusts_sampler
    assert adjusts.step_scales(schedule_of(6), FITTED) == [1, 0.5, 0.8, 1, 0.7, 0]


@pytest.mark.parametrize("steps", [6, 8])
def test_step_scales_of_other_steps_or_another_list_are_refused(steps: int) -> None:
    adjusts = ERTACache(threshold=0.2 if steps == 6 else 0.3, adjust_timesteps=True, correction=False)
    for ask in (adjusts.step_scales, adjusts.check_run):
        with pytest.raises(
            ProfileError, match="can only run on the steps|fitted while 0 3 were .*adjust_timesteps=False"
        ):
            ask(schedule_of(steps), FITTED)


# -- in a denoiser ------------------------------------------------------------------------------------------------

SD3 = CASES["sd3"]  # latents of 4 channels, width 32


COMPUTED = {"ertacache": (0, 4, 8), "cache_quant": (0, 3, 6)}


def ten_steps(strategy: str, rows: tuple[Any, Any] | None = None) -> Profile:
    """A profile of ten steps by which the strategy computes three."""
    return profile_of(
        {"0": ramp(STEPS, 0.1)},
        COMPUTED[strategy],
        {"0": rows} if rows is not None else None,
        sigmas=[1 - i / STEPS for i in range(STEPS)],
        defaults={"threshold": 1.0, "interval": 4},
    )


@pytest.mark.parametrize("strategy", COMPUTED)
def test_rows_of_ones_reuse_exactly(strategy: str) -> None:
    model = SD3.build()
    plain = drive(model, SD3)
    outputs = drive(attach(model, SD3, strategy, profile=ten_steps(strategy), timesteps=sigmas()), SD3)
    assert tuple(record_of(model).computed_steps) == COMPUTED[strategy]
    assert tuple(equal_steps(outputs, plain)) == COMPUTED[strategy]
    almost = [[1.0]] * STEPS, [[0.0]] * 9 + [[1e-30]]  # something is applied, and changes nothing
    applied = drive(attach(model, SD3, strategy, profile=ten_steps(strategy, almost), timesteps=sigmas()), SD3)
    assert equal_steps(applied, outputs)[:9] == list(range(9))


def sigmas() -> list[float]:
    return [1000 * (1 - i / STEPS) for i in range(STEPS)]


def test_ertacache_corrects_what_the_output_adds_to_the_latent() -> None:
    scale, shift = torch.tensor([2.0, 0.5, -1.0, 1.0]), torch.tensor([0.0, 0.25, 1.0, 0.0])
    model, latent = SD3.build(), SD3.inputs(0, 1)["hidden_states"]
    profile = ten_steps("ertacache", ([scale.tolist()] * STEPS, [shift.tolist()] * STEPS))
    outputs = drive(attach(model, SD3, "ertacache", profile=profile, timesteps=sigmas()), SD3)
    column = (1, 4, 1, 1)
    for step, output in enumerate(outputs):
        base = outputs[step // 4 * 4]
        wanted = latent + scale.view(column) * (base - latent) + shift.view(column)
        torch.testing.assert_close(output, base if step % 4 == 0 else wanted)


def test_cache_quant_corrects_the_residual_of_the_blocks() -> None:
    # Each channel is scaled by zero, so a reused step is the model without its blocks, whatever was computed before.
    model = SD3.build()
    profile = ten_steps("cache_quant", ([[0.0] * 32] * STEPS, [[0.0] * 32] * STEPS))
    outputs = drive(attach(model, SD3, "cache_quant", profile=profile, timesteps=sigmas()), SD3)
    cachedit.unwrap(model)
    model.transformer_blocks = torch.nn.ModuleList()
    bare = drive(model, SD3)
    for step in (1, 2, 4, 5, 9):
        torch.testing.assert_close(outputs[step], bare[step])


# -- what is measured ---------------------------------------------------------------------------------------------


def test_a_line_is_found_exactly() -> None:
    f = torch.tensor([[[1.0, -2.0], [3.0, 5.0], [4.0, 0.0]]])  # [1, 3, 2]
    y = f * torch.tensor([2.0, -0.5]) + torch.tensor([3.0, 1.0])
    assert line(moments((f,), (y,))) == ([2.0, -0.5], [3.0, 1.0])


def test_least_squares_by_hand() -> None:
    # f = 0 1 2, y = 1 1 4: cov = 1, var = 2/3, means 1 and 2.
    f, y = torch.tensor([0.0, 1.0, 2.0]).view(1, 3, 1), torch.tensor([1.0, 1.0, 4.0]).view(1, 3, 1)
    assert line(moments((f,), (y,))) == ([1.5], [0.5])


def test_what_does_not_vary_is_left_alone() -> None:
    f = torch.tensor([[[1000.0, 0.0, 1.0], [1000.0001, 0.0, 2.0]]])
    scale, shift = line(moments((f,), (2 * f,)))
    assert (scale, shift) == ([1.0, 1.0, 2.0], [0.0, 0.0, 0.0])


@pytest.mark.parametrize("shape", [(2, 5, 3), (2, 3, 4, 5), (2, 3, 2, 4, 5)])
def test_channels_lie_where_the_forecast_has_them(shape: tuple[int, ...]) -> None:
    axis = 1 if len(shape) > 3 else -1
    f = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    factor = torch.tensor([1.0, 2.0, -3.0])
    y = f * (factor.view(-1, *[1] * (len(shape) - 2)) if axis == 1 else factor)
    scale, shift = line(moments((f,), (y,)))
    assert scale == pytest.approx(factor.tolist(), rel=1e-5)
    assert shift == pytest.approx([0.0] * 3, abs=1e-5)


def test_tensors_of_a_site_are_pooled_and_must_be_alike() -> None:
    f = torch.tensor([[[0.0], [1.0]]]), torch.tensor([[[2.0]]])
    y = torch.tensor([[[1.0], [1.0]]]), torch.tensor([[[4.0]]])
    assert line(moments(f, y)) == ([1.5], [0.5])
    with pytest.raises(UnsupportedModelError, match="tensors of 1 and 3 channels; allowed: one number"):
        moments((f[0], torch.zeros(1, 2, 3)), (y[0], torch.zeros(1, 2, 3)))


@dataclasses.dataclass(frozen=True)
class Listed(Corrected, abstract=True):
    """Computes the steps that it is told to."""

    steps: tuple[int, ...] = (0, 3)

    site = Output(residual=True)

    def computed(self, schedule: Schedule, profile: Profile) -> tuple[int, ...]:
        return self.steps


class Runs:
    """Stands for the trial: latents that lie as far from the truth as it is told, without and with the rows."""

    def __init__(self, prompts: int, steps: int, without: Sequence[float], corrected: Sequence[float]) -> None:
        self.prompts, self.num_inference_steps = ["?"] * prompts, steps
        self.errors = {False: without, True: corrected}
        self.rows: list[Any] = []

    def map(self, name: str, keys: Sequence[Any], work: Any) -> list[Any]:
        return [work(key) for key in keys]

    def latents(self, k: int, strategy: Any = None, profile: Profile | None = None) -> torch.Tensor:
        if strategy is None:
            return torch.ones(4)
        assert profile is not None
        if strategy.correction:
            self.rows.append((k, profile.arrays["correction_scale"]))
        return torch.ones(4) * (1 + self.errors[strategy.correction][k])


def measured(measure: Any, runs: Runs, series: Sequence[Any], experts: Sequence[str] = ("transformer",) * 6) -> Any:
    """Arrays after one run per series, each giving [1, 2, 1] per step; the latent is zero, so v is the residual."""
    measure.trial = runs
    measure.begin(profile_of({"cond": ramp(runs.num_inference_steps, 0.1)}))
    parts = []
    for k, values in enumerate(series):
        measure.start(k)
        for i, (value, expert) in enumerate(zip(values, experts, strict=False)):
            tensor = torch.tensor(value, dtype=torch.float32).view(1, -1, 1)
            step = Step(i, None, None, "cond", expert, True)
            measure.watch(step, {Output(residual=True): (tensor,), Output(): (tensor,)})
        parts.append(measure.stop())
    return measure.arrays(parts)


SERIES = [[0.0, 1.0], [2.0, 3.0], [4.0, 9.0], [1.0, 3.0], [0.0, 4.0]]  # reuse step 0 at 1, 2 and step 3 at 4


def test_each_step_is_fitted_against_what_it_would_reuse() -> None:
    arrays = measured(Correction(Listed()), Runs(1, 5, [0.5], [0.2]), [SERIES])
    assert arrays["correction_mask"] == {"cond": [1, 0, 0, 1, 0]}
    # 0 1 -> 2 3; 0 1 -> 4 9; and from step 3, not from the forecast of anything, 1 3 -> 0 4.
    assert arrays["correction_scale"] == {"cond": [[1.0], [1.0], [5.0], [1.0], [2.0]]}
    assert arrays["correction_shift"] == {"cond": [[0.0], [2.0], [4.0], [0.0], [-2.0]]}


def test_an_expert_begins_with_a_computed_step() -> None:
    experts = ["first", "first", "second", "second", "second"]
    arrays = measured(Correction(Listed()), Runs(1, 5, [0.5], [0.2]), [SERIES], experts)
    assert arrays["correction_scale"]["cond"][2] == [1.0]  # its first step has nothing to reuse
    assert arrays["correction_mask"] == {"cond": [1, 0, 0, 1, 0]}


def test_rows_are_kept_if_they_help_prompts_that_they_were_not_fitted_on() -> None:
    series = [[[k * x for x in values] for values in SERIES] for k in (1.0, 2.0, 3.0, 4.0)]
    series[0][1] = [0.0, 0.0]
    # The worse prompt 1 is outweighed; prompt 0 is never left out, as only three are.
    runs = Runs(4, 5, [0.0, 0.1, 0.5, 0.5], [9.0, 0.2, 0.1, 0.1])
    measure = Correction(Listed())
    arrays = measured(measure, runs, series)
    assert [k for k, _ in runs.rows] == [1, 2, 3]
    for k, rows in runs.rows:
        others = [s for other, s in enumerate(series) if other != k]
        alone = measured(Correction(Listed()), Runs(3, 5, [1.0] * 3, [0.0] * 3), others)
        assert rows == alone["correction_scale"]
    everyone = measured(Correction(Listed()), Runs(4, 5, [1.0] * 4, [0.0] * 4), series)
    assert arrays == everyone  # what is stored is fitted on all
    assert measure.notes["correction"] == {
        "kept": True,
        "checked_on": "3 left out",
        "error_with": pytest.approx(0.4 / 3, abs=1e-6),
        "error_without": pytest.approx(1.1 / 3, abs=1e-6),
    }


def test_rows_that_do_not_help_are_not_stored() -> None:
    measure = Correction(Listed())
    arrays = measured(measure, Runs(2, 5, [0.1, 0.1], [0.1, 0.2]), [SERIES, SERIES])
    assert arrays["correction_scale"] == {"cond": [[1.0]] * 5}
    assert arrays["correction_shift"] == {"cond": [[0.0]] * 5}
    assert arrays["correction_mask"] == {"cond": [1, 0, 0, 1, 0]}
    assert measure.notes["correction"]["kept"] is False


def test_one_prompt_is_checked_on_itself() -> None:
    measure = Correction(Listed())
    measured(measure, Runs(1, 5, [0.5], [0.2]), [SERIES])
    assert measure.notes["correction"]["checked_on"] == "the prompt it was fitted on"


def test_a_strategy_that_reuses_nothing_is_not_tried() -> None:
    runs, measure = Runs(1, 5, [0.5], [0.2]), Correction(Listed(steps=tuple(range(5))))
    arrays = measured(measure, runs, [SERIES])
    assert arrays["correction_scale"] == {"cond": [[1.0]] * 5}
    assert (runs.rows, measure.notes) == ([], {})


def test_step_scales_by_hand() -> None:
    # Of |v| = 5 the forecast 0 1 of 2 3 misses 4; of 13, 12; of 4 the forecast 1 3 of 0 4 misses 2.
    arrays = measured(StepScale(Listed()), Runs(1, 5, [], []), [SERIES])
    assert arrays["step_scale"]["cond"] == pytest.approx([1.0, 1 - 4 / 5, 1 - 12 / 13, 1.0, 0.5], abs=1e-6)


def test_step_scales_are_never_negative_and_averaged_over_prompts() -> None:
    away = [[5.0, 5.0], [1.0, 0.0], [5.0, 5.0], [0.0, 0.0], [0.0, 0.0]]  # misses 9 of 1; 0 of 10; 0 of 0
    arrays = measured(StepScale(Listed()), Runs(2, 5, [], []), [away, SERIES])
    assert arrays["step_scale"]["cond"] == pytest.approx([1.0, 0.1, (1 + 1 / 13) / 2, 1.0, 0.75], abs=1e-6)


def test_a_strategy_without_a_list_is_refused() -> None:
    with pytest.raises(TypeError, match="MagCache does not say which steps it computes; allowed: .*Corrected"):
        Correction(cachedit.MagCache())


# -- the sample model ---------------------------------------------------------------------------------------------

COUNT = 12


@pytest.fixture(scope="module")
def pipe() -> Any:
    torch.set_num_threads(1)
    return load_pipeline(str(sample_path("image")))


@pytest.fixture(scope="module", params=[ERTACache(threshold=0.1), CacheQuant()], ids=lambda strategy: strategy.name)
def calibrated(pipe: Any, request: Any) -> tuple[Any, Profile]:
    profile = calibrate(pipe, request.param, prompts=prompts("image")[:2], num_inference_steps=COUNT)
    return type(request.param), Profile.from_json(profile.to_json())


def draw(pipe: Any, steps: int = COUNT) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        return pipe(prompts("image")[7], num_inference_steps=steps, generator=generator, output_type="latent").images


def test_on_the_sample_model(pipe: Any, calibrated: tuple[Any, Profile]) -> None:
    cls, profile = calibrated
    note = profile.provenance["correction"]
    # ERTACache's four lines per step carry over to new prompts, CacheQuant's 160 are fitted to two prompts alone.
    assert note["kept"] is (cls is ERTACache)
    plain = draw(pipe)
    cachedit.wrap(pipe, cls(), profile=profile)  # options as the profile recommends them
    try:
        drawn, record = draw(pipe), record_of(pipe)
        assert torch.equal(draw(pipe), drawn)
        mask = next(iter(profile.arrays["correction_mask"].values()))
        assert record.computed_steps == [i for i, computed in enumerate(mask) if computed]
        assert record.nfe < COUNT
        cachedit.wrap(pipe, cls(correction=False), profile=profile)
        without = draw(pipe)
    finally:
        cachedit.unwrap(pipe)
    assert torch.equal(draw(pipe), plain)
    error, error_without = (float((x - plain).norm() / plain.norm()) for x in (drawn, without))
    assert error < 0.1
    assert error == error_without if not note["kept"] else error < 0.8 * error_without


def test_other_numbers_of_steps(pipe: Any, calibrated: tuple[Any, Profile]) -> None:
    cls, profile = calibrated
    try:
        if profile.provenance["correction"]["kept"]:
            cachedit.wrap(pipe, cls(), profile=profile)
            with pytest.raises(ProfileError, match=f"the profile has {COUNT} steps"):
                draw(pipe, 14)
        cachedit.wrap(pipe, cls(correction=False), profile=profile)
        draw(pipe, 14)
        assert record_of(pipe).reused_steps
    finally:
        cachedit.unwrap(pipe)
