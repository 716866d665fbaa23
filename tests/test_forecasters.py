"""The forecasters: published lists of computed steps, forecasts that can be checked by hand, and diffusers' own."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import attach, drive, record_of
from diffusers.hooks.taylorseer_cache import TaylorSeerCacheConfig, TaylorSeerState
from torch import nn

import cachedit
from cachedit import Context, FeatureStrategy, Schedule
from cachedit.strategies.abcache import ABCache
from cachedit.strategies.delta_cache import DeltaCache
from cachedit.strategies.fo_ca import FoCa
from cachedit.strategies.freq_ca import FreqCa
from cachedit.strategies.hi_cache import HiCache
from cachedit.strategies.mean_cache import MeanCache
from cachedit.strategies.newton import Newton
from cachedit.strategies.spectrum import Spectrum
from cachedit.strategies.taylor_seer import TaylorSeer
from cachedit.strategy import Module, Output, Site, Stack
from zoo.models import CASES, count_blocks

HE = math.sqrt(0.5)


def listed(text: str) -> list[int]:
    """ "0-2 5" -> [0, 1, 2, 5]."""
    bounds = [[int(bound) for bound in part.split("-")] for part in text.split()]
    return [step for part in bounds for step in range(part[0], part[-1] + 1)]


# -- when ---------------------------------------------------------------------------------------------------------


def computed_steps(strategy: FeatureStrategy, steps: int, first: int = 0) -> list[int]:
    """Steps that are computed from ``first`` on, which has nothing to reuse."""
    computed = [first]
    for step in range(first + 1, steps):
        if strategy.should_compute(Context(step=step, schedule=Schedule(steps), computed_steps=list(computed))):
            computed.append(step)
    return computed


@pytest.mark.parametrize(
    ("strategy", "wanted"),
    [
        (TaylorSeer(interval=6), "0-2 8 14 20 26 32 38 44"),
        (TaylorSeer(interval=4, warmup=2), "0-1 5 9 13 17 21 25 29 33 37 41 45 49"),
        (TaylorSeer(interval=1), "0-49"),
        (HiCache(interval=6), "0-2 8 14 20 26 32 38 44"),
        (Newton(interval=6, warmup=3), "0-2 8 14 20 26 32 38 44"),
        (FoCa(interval=8, warmup=3), "0-2 10 18 26 34 42"),
        (FreqCa(interval=9, warmup=3), "0-2 11 20 29 38 47"),
        (Spectrum(), "0-4 6 8 11 15 20 25 31 38 46"),
        (Spectrum(growth=3), "0-4 6 11 19 30 44"),
        (MeanCache(budget=25), "0-16 24 32 40 43 45 47-49"),
        (MeanCache(budget=17), "0-8 10 17 24 31 38 45 48 49"),
        (MeanCache(budget=10), "0-1 3 7 14 21 28 35 42 49"),
        (MeanCache(compute=(0, 7, 49)), "0 7 49"),
        (ABCache(interval=6), "0-4 6 12 18 24 30 36 42 48"),
        (DeltaCache(interval=3), "0 3 6 9 12 15 18 21 24 27 30 33 36 39 42 45 48"),
    ],
    ids=str,
)
def test_published_lists_of_50_steps(strategy: FeatureStrategy, wanted: str) -> None:
    assert computed_steps(strategy, 50) == listed(wanted)


@pytest.mark.parametrize(
    ("strategy", "wanted"),
    [
        (TaylorSeer(), "0-2 6 10 14 18"),
        (HiCache(), "0-2 6 10 14 18"),
        (Newton(), "0-3 6 9 12 15 18"),
        (FoCa(), "0-3 7 11 15 19"),
        (FreqCa(), "0-3 7 11 15 19"),
        (Spectrum(), "0-4 6 8 11 15"),
        (MeanCache(), "0-4 7 9 12 15 17 19"),  # places 0-8 10 17 24 31 38 45 48 49 of 49, times 19 / 49
        (ABCache(), "0-4 6 9 12 15 18"),
        (DeltaCache(), "0 2 4 6 8 10 12 14 16 18"),
    ],
    ids=str,
)
def test_defaults_in_20_steps_through_the_core(strategy: FeatureStrategy, wanted: str) -> None:
    assert computed_steps(strategy, 20) == listed(wanted)
    model = CASES["plain"].build()
    attach(model, CASES["plain"], strategy, num_inference_steps=20)
    drive(model, CASES["plain"], [1 - i / 20 for i in range(20)])
    assert record_of(model).computed_steps == listed(wanted)


@pytest.mark.parametrize(
    "strategy", [TaylorSeer(), Newton(), HiCache(), FoCa(), FreqCa(), Spectrum(), ABCache(), DeltaCache()], ids=str
)
def test_a_later_expert_and_a_run_that_starts_late_warm_up_at_their_own_first_step(strategy: FeatureStrategy) -> None:
    assert computed_steps(strategy, 50, first=21) == [21 + step for step in computed_steps(strategy, 29)]


def test_mean_cache_keeps_its_places_in_the_schedule_when_a_run_starts_late() -> None:
    assert computed_steps(MeanCache(), 50, first=20) == listed("20 24 31 38 45 48 49")


def test_the_warm_up_is_told_as_the_reason() -> None:
    for strategy in (TaylorSeer(), FoCa(), FreqCa(), Spectrum(), ABCache()):
        assert strategy.should_compute(Context(step=2, schedule=Schedule(50), computed_steps=[0, 1])) == "warm-up"


# -- what is forecast ---------------------------------------------------------------------------------------------


def forecast(strategy: FeatureStrategy, values: Sequence[float], times: Sequence[int], step: int, **run: Any) -> float:
    """The forecast at ``step`` of a series whose ``values`` were computed at ``times``."""
    kept = list(times)[-strategy.depth :]
    weights = strategy.weights(Context(step=step, computed_steps=kept, schedule=Schedule(**run)))
    assert weights is not None
    assert len(weights) == len(kept)
    return sum(weight * value for weight, value in zip(weights, list(values)[-strategy.depth :], strict=True))


SQUARES = (0, 1, 9), (0, 1, 3)


@pytest.mark.parametrize(
    ("strategy", "wanted"),
    [
        (TaylorSeer(order=0), 9.0),
        (TaylorSeer(order=1), 9 + 2 * 4),
        (TaylorSeer(order=2), 9 + 2 * 4 + 2 * 1.5),  # D_1 = 4, before that 1, D_2 = (4 - 1) / 2
        (Newton(order=1), 9 + 2 * 4),
        (Newton(), 25.0),
        (HiCache(order=1), 9 + 4),  # half the slope
        (HiCache(), 9 + 4 + 1.5 * 0.25),  # s^2 (4 s^2 u^2 - 2) / 2 = 0.25
        (HiCache(order=1, scale=HE), 9 + 2 * 4),
        (HiCache(scale=HE), 9 + 2 * 4 + 1.5 * 1.5),  # (u^2 - 1) / 2 = 1.5
        (FoCa(), 9 + 4 + 16 / 3),  # slopes 4 and 6, the forecast's (4 + 2 * 6) / 3
        (MeanCache(span=1), 9.0),
        (MeanCache(span=2), 9 + (5 - 1) / 4 * 2),  # mean velocity (1 * 2 + 9 * 2) / 4 = 5
        (MeanCache(span=3), 9 + (4 - 0) / 5 * 2),
        (ABCache(order=1), 9.0),
        (ABCache(), 9 + 2 * 4),
        (ABCache(order=3), 25.0),
        (Spectrum(mix=0), 9 + 2 * 4),
        (Spectrum(degree=2, ridge=0, mix=1), 25.0),
    ],
    ids=str,
)
def test_squares_at_0_1_3_forecast_to_5(strategy: FeatureStrategy, wanted: float) -> None:
    assert forecast(strategy, *SQUARES, 5, num_steps=50) == pytest.approx(wanted)


ALL = [TaylorSeer(), Newton(), HiCache(), FoCa(), Spectrum(), MeanCache(span=4), ABCache(order=3)]


@pytest.mark.parametrize("strategy", ALL, ids=str)
@pytest.mark.parametrize("length", [1, 2, 3, 6])
def test_a_constant_stays_as_it_is_from_the_first_computed_step_on(strategy: FeatureStrategy, length: int) -> None:
    times = (0, 1, 4, 6, 11, 13)[:length]
    assert forecast(strategy, [7.0] * length, times, times[-1] + 3, num_steps=50) == pytest.approx(7.0)


@pytest.mark.parametrize("strategy", [s for s in ALL if not isinstance(s, (HiCache, Spectrum, MeanCache))], ids=str)
def test_a_line_is_continued(strategy: FeatureStrategy) -> None:
    times = (0, 1, 4, 6, 11, 13)
    assert forecast(strategy, [3 - 2 * t for t in times], times, 17, num_steps=50) == pytest.approx(3 - 2 * 17)


@pytest.mark.parametrize(
    ("strategy", "depth"),
    [
        (TaylorSeer(order=3), 4),
        (Newton(order=2), 3),
        (HiCache(order=1), 2),
        (FoCa(), 3),
        (FreqCa(), 3),
        (Spectrum(snapshots=9), 9),
        (MeanCache(span=5), 5),
        (ABCache(order=3), 3),
        (DeltaCache(), 1),
    ],
    ids=str,
)
def test_no_more_is_kept_than_is_read(strategy: FeatureStrategy, depth: int) -> None:
    assert strategy.depth == depth


def test_ab_cache_on_an_even_grid_has_the_papers_binomials() -> None:
    for order, binomials in ((2, [-1, 2]), (3, [1, -3, 3]), (5, [1, -5, 10, -10, 5])):
        context = Context(step=order, computed_steps=list(range(order)))
        assert list(ABCache(order=order).weights(context)) == pytest.approx(binomials)


def test_freq_ca_reuses_the_low_band_and_forecasts_the_high_one() -> None:
    context = Context(step=5, computed_steps=[0, 1, 3])
    low, high = FreqCa().weights(context)
    assert list(low) == [0, 0, 1]
    assert sum(w * v for w, v in zip(high, (0, 1, 9), strict=True)) == pytest.approx(9 + 2 * 4 + 1.5 * 1.5)
    assert FreqCa(cut=0.25).partition.cut == 0.25


def test_spectrum_takes_the_run_as_the_domain_of_its_polynomials() -> None:
    # 4 steps: tau = -1, 0 and 1 at now; T_0 and T_1 with a ridge of 1 shrink the line's (-1, 2) to (-0.2, 1.2).
    strategy = Spectrum(degree=1, ridge=1.0, mix=1.0)
    for start, schedule, steps in ((0, Schedule(4), None), (20, Schedule(50), 4)):  # the second: an expert of 4 steps
        context = Context(
            step=start + 4,
            computed_steps=[start, start + 2],
            schedule=schedule,
            expert_start=start,
            expert_steps=steps,
        )
        assert list(strategy.weights(context)) == pytest.approx([-0.2, 1.2])


# -- the clock ----------------------------------------------------------------------------------------------------

LEVELS = (1.0, 0.9, 0.7, 0.6, 0.3, 0.1)


@pytest.mark.parametrize("strategy", [Newton(clock="sigma"), ABCache(order=3, clock="sigma")], ids=str)
def test_squares_of_the_noise_level_are_forecast_exactly(strategy: FeatureStrategy) -> None:
    values = [LEVELS[step] ** 2 for step in (0, 1, 3)]
    assert forecast(strategy, values, (0, 1, 3), 4, num_steps=6, sigmas=LEVELS) == pytest.approx(0.09)
    by_step: Any = {"step": 4, "computed_steps": [0, 1, 3], "schedule": Schedule(6, sigmas=LEVELS)}
    other = type(strategy)(order=strategy.order)  # type: ignore[attr-defined,call-arg]
    assert list(other.weights(Context(**by_step))) != pytest.approx(list(strategy.weights(Context(**by_step))))  # type: ignore[arg-type]


@pytest.mark.parametrize("sigmas", [None, (1.0, 0.9, 0.7, 0.9, 0.3, 0.1)], ids=["unknown", "one level twice"])
def test_without_noise_levels_that_tell_the_steps_apart_the_step_is_the_clock(sigmas: Any) -> None:
    strategy = Newton(clock="sigma")
    assert forecast(strategy, *SQUARES, 5, num_steps=6, sigmas=sigmas) == pytest.approx(25)


def test_mean_cache_moves_the_velocity_by_the_papers_rule_over_noise_levels() -> None:
    # Velocities 2 at level 1 and 3 at 0.9 are held until 0.7: the mean is (2 * 0.1 + 3 * 0.2) / 0.3 = 8 / 3, the change
    # per level (2 - 8 / 3) / -0.3, and the step has gone 0.2 on from the last velocity.
    wanted = 3 - (2 - 8 / 3) / -0.3 * -0.2
    assert forecast(MeanCache(), (2, 3), (0, 1), 2, num_steps=6, sigmas=LEVELS) == pytest.approx(wanted)


# -- through the core ---------------------------------------------------------------------------------------------


class Curve(nn.Module):
    """Tokens through two blocks that add ``f(step) * pattern``, whatever the tokens are."""

    def __init__(self, power: int, pattern: torch.Tensor) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Added(power, pattern), Added(power, pattern)])

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, t)
        return x


class Added(nn.Module):
    def __init__(self, power: int, pattern: torch.Tensor) -> None:
        super().__init__()
        self.power, self.pattern = power, pattern / 2

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return x + (10 * (1 - t)) ** self.power * self.pattern


TOKENS = torch.tensor([[3.0], [1.0], [-2.0], [0.0]])[None]  # [1, 4, 1]
ONES = torch.ones(1, 4, 1)
WIGGLE = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])[None]


@torch.no_grad()
def run_curve(strategy: FeatureStrategy, power: int, pattern: torch.Tensor = ONES, steps: int = 12) -> torch.Tensor:
    """What is added to the tokens at every step (blocks see the timestep 1 - step / 10)."""
    model = Curve(power, pattern).eval()
    cachedit.wrap(model, strategy, blocks=["blocks"], num_inference_steps=steps)
    return torch.stack([model(TOKENS, torch.tensor([1 - i / 10])) - TOKENS for i in range(steps)])


@pytest.mark.parametrize(
    ("strategy", "missing"),
    [
        # computed 0 1 2 5 8 11: what a square forecast u steps after gap g lacks
        (TaylorSeer(interval=3), lambda u, g: u * u + u * g),
        (TaylorSeer(interval=3, order=0), None),
        (Newton(warmup=3), lambda u, g: 0),
        (Spectrum(mix=0, window=3, growth=0, warmup=3), lambda u, g: u * u + u * g),
    ],
    ids=["line", "plain", "square", "ridge"],
)
def test_a_residual_that_grows_with_the_square_of_the_step(strategy: FeatureStrategy, missing: Any) -> None:
    added = run_curve(strategy, 2)[:, 0, 0, 0]
    for step, last, gap in ((3, 2, 1), (4, 2, 1), (6, 5, 3), (7, 5, 3), (9, 8, 3), (10, 8, 3)):
        wanted = last**2 if missing is None else step**2 - missing(step - last, gap)
        assert float(added[step]) == pytest.approx(wanted, abs=1e-3)
    for step in (0, 1, 2, 5, 8, 11):
        assert float(added[step]) == pytest.approx(step**2, abs=1e-4)


def test_an_output_that_grows_with_the_square_of_the_step() -> None:
    added = run_curve(ABCache(order=3), 2)[:, 0, 0, 0]  # computed 0-4 6 9
    assert added.tolist() == pytest.approx([step**2 for step in range(12)], abs=1e-2)
    added = run_curve(ABCache(order=1), 2)[:, 0, 0, 0]
    assert added.tolist() == pytest.approx([0, 1, 4, 9, 16, 16, 36, 36, 36, 81, 81, 81], abs=1e-3)


def test_freq_ca_through_the_core() -> None:
    strategy = FreqCa(interval=5, warmup=2, order=1)  # computed 0 1 6 11
    fast = run_curve(strategy, 1, WIGGLE)
    for step in range(12):
        assert torch.allclose(fast[step], step * WIGGLE, atol=1e-4)
    slow = run_curve(strategy, 1, ONES)
    for step, last in ((3, 1), (5, 1), (8, 6), (10, 6)):
        assert torch.allclose(slow[step], last * ONES, atol=1e-4)


@torch.no_grad()
def test_delta_cache_reuses_the_rear_and_then_the_front() -> None:
    case = CASES["plain"]
    model: Any = case.build()
    states: list[list[torch.Tensor]] = []  # of each step: what entered block 0, 1, 2, 3, and what left it

    def note(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor) -> None:
        states[-1].extend((args[0], out))

    handles = [block.register_forward_hook(note, with_kwargs=True) for block in model.stages]
    for step in range(10):
        states.append([])
        drive(model, case, [1 - step / 10])
    for handle in handles:
        handle.remove()
    last: list[torch.Tensor] = []
    model.norm.register_forward_pre_hook(lambda module, args: last.append(args[0]))
    attach(model, case, DeltaCache())
    executed = []
    with count_blocks(model, case) as count:
        for step in range(10):
            count.clear()
            drive(model, case, [1 - step / 10])
            executed.append(list(count.per_block))
    early, late, full = [1, 0, 0, 0], [0, 0, 0, 1], [1, 1, 1, 1]
    assert executed == [full, early, full, early, full, late, full, late, full, late]
    # early: block 0 anew, then what blocks 1 to 3 added a step before
    fresh, before = states[3][1], states[2][7] - states[2][1]
    assert torch.allclose(last[3], fresh + before, atol=1e-5)
    # late: what blocks 0 to 2 added a step before, then block 3 anew
    entered = states[7][0] + states[6][5] - states[6][0]
    temb = model.time(torch.stack([torch.sin(torch.tensor([0.9])), torch.cos(torch.tensor([0.9]))], dim=-1))
    assert torch.allclose(last[7], model.stages[3](entered, temb, bias_index=3), atol=1e-5)
    assert [step.sites for step in record_of(model).steps if not step.computed] == [
        str(DeltaCache().rear) if step < 5 else str(DeltaCache().front) for step in (1, 3, 5, 7, 9)
    ]


@pytest.mark.parametrize(("switch", "executed"), [(0.0, [0, 0, 0, 1]), (1.0, [1, 0, 0, 0])])
def test_delta_cache_without_a_switch(switch: float, executed: list[int]) -> None:
    case = CASES["plain"]
    model = case.build()
    attach(model, case, DeltaCache(switch=switch))
    with count_blocks(model, case) as count:
        for step in range(10):
            count.clear()
            drive(model, case, [1 - step / 10])
            assert count.per_block == ([1, 1, 1, 1] if step % 2 == 0 else executed)


def test_delta_cache_over_the_single_blocks_of_flux() -> None:
    case = CASES["flux"]
    model = case.build()
    attach(model, case, DeltaCache(share=1.0, interval=3), blocks=["single_transformer_blocks"])
    double, single = (len(getattr(model, name)) for name in case.stack)
    with count_blocks(model, case) as count:
        for step in range(6):
            count.clear()
            drive(model, case, [1 - step / 10])
            assert count.per_block == [1] * double + [int(step % 3 == 0)] * single


def test_where_they_cache() -> None:
    modules = (Module("attn"), Module("temporal"), Module("cross"), Module("mlp"))
    for strategy in (TaylorSeer, Newton, HiCache):
        assert strategy().sites == (Stack(),)
        assert strategy(scope="modules").sites == modules
    assert FoCa().sites == FreqCa().sites == Spectrum().sites == (Stack(),)
    assert MeanCache().sites == ABCache().sites == (Output(),)


# -- diffusers ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AsDiffusers(FeatureStrategy, abstract=True):
    """TaylorSeer at the steps that diffusers' hook computes."""

    order: int = 1
    interval: int = 5
    history = 4

    @property
    def sites(self) -> tuple[Site, ...]:
        return Module("attn"), Module("cross"), Module("mlp")

    def should_compute(self, ctx: Context) -> bool:
        return ctx.step < 3 or (ctx.step - 4) % self.interval == 0

    def weights(self, ctx: Context) -> Sequence[float]:
        weights: Sequence[float] = TaylorSeer(order=self.order).weights(ctx)
        return weights


MODULES = {
    "flux": [r"transformer_blocks\.\d+\.(attn|ff|ff_context)", r"single_transformer_blocks\.\d+\.(attn|proj_mlp)"],
    "wan": [r"blocks\.\d+\.(attn1|attn2|ffn)"],
}


@pytest.mark.parametrize(
    "strategy",
    [
        TaylorSeer(interval=2, scope="modules"),  # at this interval both compute the same steps
        TaylorSeer(interval=2, order=2, scope="modules"),
        AsDiffusers(interval=3),
        AsDiffusers(interval=4, order=3),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", MODULES)
def test_modules_as_diffusers_forecasts_them(family: str, strategy: Any) -> None:
    case, levels = CASES[family], [1 - i / 12 for i in range(12)]
    theirs: Any = case.build()
    theirs.enable_cache(
        TaylorSeerCacheConfig(
            cache_interval=strategy.interval,
            disable_cache_before_step=3,
            max_order=strategy.order,
            taylor_factors_dtype=torch.float32,
            cache_identifiers=MODULES[family],
        )
    )
    with theirs.cache_context("cond"):
        wanted = drive(theirs, case, levels)
    ours = case.build()
    plain = drive(ours, case, levels)
    attach(ours, case, strategy, num_inference_steps=12)
    got = drive(ours, case, levels)
    computed = record_of(ours).computed_steps
    assert computed == [i for i in range(12) if torch.equal(wanted[i], plain[i])]
    assert len(computed) < 10
    scale = max(float(x.abs().max()) for x in wanted)
    for a, b in zip(got, wanted, strict=True):
        assert float((a - b).abs().max()) < 1e-5 * scale


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_weights_are_those_of_diffusers_state(order: int) -> None:
    state = TaylorSeerState(torch.float64, max_order=order)
    values = [0.5, -1.25, 3.0, 2.0, 7.5]
    computed: list[int] = []
    for step, value in zip((0, 1, 2, 7, 10), values, strict=True):
        state.current_step = step
        state.update((torch.tensor([value], dtype=torch.float64),))
        computed.append(step)
        state.current_step = step + 2
        (wanted,) = state.predict()
        got = forecast(TaylorSeer(order=order), values[: len(computed)], computed, step + 2)
        assert got == pytest.approx(float(wanted))


# -- options ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "option", "value", "allowed"),
    [
        *((s, "interval", 0, "1 or more") for s in (TaylorSeer, Newton, HiCache, FoCa, FreqCa, ABCache, DeltaCache)),
        *((s, "warmup", 0, "1 or more") for s in (TaylorSeer, Newton, HiCache, FoCa, FreqCa, ABCache, Spectrum)),
        *((s, "order", -1, "0 or more") for s in (TaylorSeer, Newton, HiCache, FreqCa)),
        *((s, "scope", "blocks", "'stack', 'modules'") for s in (TaylorSeer, Newton, HiCache)),
        *((s, "clock", "wall", "'step', 'sigma'") for s in (Newton, ABCache)),
        *((s, "scale", 0, "above 0") for s in (HiCache, FreqCa)),
        (HiCache, "scale", math.inf, "above 0"),
        (TaylorSeer, "interval", 2.0, "an integer"),
        (TaylorSeer, "order", True, "an integer"),
        (FreqCa, "cut", 1.0, "between 0 and 1"),
        (FreqCa, "cut", 0, "between 0 and 1"),
        (ABCache, "order", 0, "1 or more"),
        (Spectrum, "window", 0.5, "1 or more"),
        (Spectrum, "growth", -1, "0 or more"),
        (Spectrum, "degree", -1, "0 or more"),
        (Spectrum, "snapshots", 0, "1 or more"),
        (Spectrum, "ridge", math.nan, "0 or more"),
        (Spectrum, "ridge", math.inf, "0 or more"),
        (Spectrum, "mix", 1.5, "from 0 to 1"),
        (MeanCache, "budget", 12, "25, 17, 10"),
        (MeanCache, "budget", [17], "25, 17, 10"),
        (MeanCache, "compute", (), "rising step indices"),
        (MeanCache, "compute", (0, 5, 5), "rising step indices"),
        (MeanCache, "compute", [0, 5], "rising step indices"),
        (MeanCache, "compute", (-1, 5), "rising step indices"),
        (MeanCache, "span", 0, "1 or more"),
        (DeltaCache, "share", 0, "above 0 and up to 1"),
        (DeltaCache, "share", 1.5, "above 0 and up to 1"),
        (DeltaCache, "switch", -0.1, "from 0 to 1"),
        (DeltaCache, "switch", math.nan, "from 0 to 1"),
    ],
)
def test_an_impossible_option_is_refused_with_what_is_allowed(
    strategy: type[FeatureStrategy], option: str, value: Any, allowed: str
) -> None:
    with pytest.raises(ValueError, match=f"{re.escape(f'{option}={value!r}')}.*{re.escape(allowed)}"):
        strategy(**{option: value})


@pytest.mark.parametrize(
    ("spelling", "wanted"),
    [
        ("taylorseer", TaylorSeer),
        ("newton", Newton),
        ("HiCache", HiCache),
        ("foca", FoCa),
        ("FreqCa", FreqCa),
        ("spectrum", Spectrum),
        ("mean-cache", MeanCache),
        ("AB-Cache", ABCache),
        ("ab_cache", ABCache),
        ("delta-cache", DeltaCache),
    ],
)
def test_they_are_found_by_name(spelling: str, wanted: type[FeatureStrategy]) -> None:
    assert type(cachedit.Strategy.find(spelling, {})) is wanted
