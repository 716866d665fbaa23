"""TeaCache, FirstBlockCache, DBCache, DiCache and EasyCache: their rules by hand, and in models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from conftest import FLAT, STEPS, attach, dissect, drive, equal_steps, record_of
from diffusers import FirstBlockCacheConfig
from test_mag_cache import listed
from torch import nn

import cachedit
from cachedit import Context, FeatureStrategy, Profile, Schedule, Strategy
from cachedit.strategies.dbcache import DBCache
from cachedit.strategies.di_cache import DiCache
from cachedit.strategies.easy_cache import EasyCache
from cachedit.strategies.first_block_cache import FirstBlockCache
from cachedit.strategies.tea_cache import PUBLISHED, TeaCache
from cachedit.strategy import Stack
from zoo.models import CASES, Case, count_blocks

INF = math.inf


def computed_steps(strategy: FeatureStrategy, signals: Sequence[float], **position: Any) -> list[int]:
    """Steps that are computed in a run in which ``signals[i]`` is heard at step i; the first always is."""
    strategy, computed = strategy.configured(None), [0]
    for step in range(1, len(signals)):
        heard = tuple(signals[computed[-1] + 1 : step + 1])
        context = Context(
            step=step, schedule=Schedule(len(signals)), computed_steps=computed, signals=heard, **position
        )
        if strategy.should_compute(context):
            computed.append(step)
    return computed


# -- TeaCache -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("threshold", "wanted"),
    [
        # At 0.1 the FLUX polynomial is 0.0499 - 0.2838 + 0.5586 - 0.3820 + 0.2642 = 0.2068.
        (None, "0 2 4 6 8 10 12 14 16 18 20 22 24 26 27"),  # the slowest published threshold, 0.25
        (0.4, "0 2 4 6 8 10 12 14 16 18 20 22 24 26 27"),
        (0.6, "0 3 6 9 12 15 18 21 24 27"),
        (0.8, "0 4 8 12 16 20 24 27"),
        (0.2, "0-27"),
    ],
)
def test_teacache_sums_the_published_polynomial_of_flux(threshold: float | None, wanted: str) -> None:
    assert computed_steps(TeaCache("flux", threshold), [0.1] * 28) == listed(wanted)


def test_teacache_without_a_polynomial_sums_the_change_itself() -> None:
    signals = [0.0, 0.03, 0.03, 0.05, 0.09, 0.02, 0.2, 0.0, 0.0, 0.0]  # 0.11 at step 3, 0.11 at step 5
    assert computed_steps(TeaCache(), signals) == [0, 3, 5, 6, 9]


def test_teacache_computes_when_the_sum_equals_the_threshold() -> None:
    assert computed_steps(TeaCache(threshold=0.5), [0.25] * 8) == [0, 2, 4, 6, 7]  # exact in binary


@pytest.mark.parametrize(("clamp", "wanted"), [(True, [0, 2, 4, 5]), (False, [0, 4, 5])])
def test_teacache_counts_a_negative_value_as_nothing_unless_told_otherwise(clamp: bool, wanted: list[int]) -> None:
    # x - 0.5 at 0.25, 1.0, 0.25, 1.0: -0.25, 0.5, -0.25, 0.5
    strategy = TeaCache((0.0, 0.0, 0.0, 1.0, -0.5), threshold=0.5, clamp=clamp)
    assert computed_steps(strategy, [0.0, 0.25, 1.0, 0.25, 1.0, 0.0]) == wanted


def test_teacache_forces_its_first_steps_the_last_one_and_the_cap() -> None:
    strategy = TeaCache(threshold=INF, warmup=3, max_skip_steps=4)
    assert computed_steps(strategy, [0.0] * 12) == [0, 1, 2, 7, 11]
    later = Context(step=7, schedule=Schedule(12), computed_steps=[6], expert_start=6)
    assert [TeaCache(threshold=INF, warmup=n).should_compute(later) for n in (1, 2)] == [False, "warm-up"]


def fitted(coefficients: Sequence[float], **defaults: Any) -> Profile:
    """What a calibration makes."""
    rows = {"indicator_polynomial": {"all": list(coefficients)}}
    return Profile(rows, axes={"indicator_polynomial": ["power"]}, defaults=defaults)


def test_teacache_takes_its_polynomial_and_threshold_from_where_they_were_given() -> None:
    five = (1.0, 2.0, 3.0, 4.0, 5.0)
    profile = fitted(five, threshold=0.3)
    cases: list[tuple[TeaCache, Profile | None, Any]] = [
        (TeaCache(), None, ((0.0, 0.0, 0.0, 1.0, 0.0), 0.1)),
        (TeaCache(threshold=0.7), None, ((0.0, 0.0, 0.0, 1.0, 0.0), 0.7)),
        (TeaCache(), profile, (five, 0.3)),
        (TeaCache(threshold=0.7), profile, (five, 0.7)),
        (TeaCache("Hunyuan-Video"), profile, PUBLISHED["hunyuanvideo"]),
        (TeaCache("ltx_video", 0.05), None, (PUBLISHED["ltxvideo"][0], 0.05)),
        (TeaCache(five), None, (five, 0.1)),
    ]
    for strategy, given, wanted in cases:
        configured = strategy.configured(given)
        assert (configured.coefficients, configured.threshold) == wanted
    assert TeaCache(five).rescaled(2.0) == 16 + 16 + 12 + 8 + 5


def test_teacache_runs_with_a_profile_and_without_one() -> None:
    case = CASES["flux"]
    for options, wanted in (({}, (0.0, 0.0, 0.0, 1.0, 0.0)), ({"profile": fitted((0, 0, 0, 9, 0))}, (0, 0, 0, 9, 0))):
        model = attach(case.build(), case, TeaCache(), **options)
        drive(model, case)
        assert f"coefficients={wanted}, threshold=0.1" in record_of(model).strategy
    with pytest.raises(cachedit.ProfileError, match="lacks indicator_polynomial"):
        attach(case.build(), case, TeaCache(), profile=FLAT)


# -- FirstBlockCache and DBCache ----------------------------------------------------------------------------------


def test_firstblockcache_looks_at_the_newest_change_alone() -> None:
    signals = [0.0, 0.07, 0.07, 0.09, 0.08, 0.01, 0.0, 0.0, 0.0]
    assert computed_steps(FirstBlockCache(), signals) == [0, 3, 7]  # above 0.08 at step 3; the cap at step 7
    assert computed_steps(FirstBlockCache(max_skip_steps=99), signals) == [0, 3]
    assert computed_steps(FirstBlockCache(max_skip_steps=0), signals) == [*range(9)]


def test_dbcache_warms_up_and_looks_at_the_newest_change_alone() -> None:
    signals = [0.0] * 8 + [0.07, 0.07, 0.08, 0.07, 0.09, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert computed_steps(DBCache(), signals) == listed("0-7 10 12 17")  # 0.08 is the threshold; the cap at step 17
    assert computed_steps(DBCache(warmup=0, threshold=INF, max_skip_steps=1), signals[:7]) == [0, 2, 4, 6]


def test_dbcache_stops_after_so_many_reused_steps_in_all() -> None:
    strategy = DBCache(warmup=2, threshold=INF, max_skip_steps=2, max_cached_steps=5)
    assert computed_steps(strategy, [0.0] * 12) == [0, 1, 4, 7, 9, 10, 11]  # reused: 2 3 5 6 8


def test_dbcache_lies_between_its_front_and_its_back_and_may_forecast() -> None:
    strategy = DBCache(front=3, back=2, order=1)
    assert strategy.sites == (Stack(3, -2),)
    assert strategy.depth == 2
    assert strategy.weights(Context(step=12, computed_steps=[8, 10])) == pytest.approx([-1.0, 2.0])
    assert strategy.weights(Context(step=12, computed_steps=[8])) == [1.0]
    plain = DBCache()
    assert plain.sites == (Stack(0.14, None),)
    assert (plain.depth, plain.weights(Context(computed_steps=[8]))) == (1, None)


# -- DiCache and EasyCache ----------------------------------------------------------------------------------------


def test_dicache_sums_the_gap_after_its_warmup() -> None:
    signals = [0.04] * 12
    assert computed_steps(DiCache(max_skip_steps=9), signals) == [0, 1, 2, 4, 6, 8, 10, 11]  # int(12 * 0.2) is 2
    assert computed_steps(DiCache(retention_ratio=0.0, max_skip_steps=9), signals) == [0, 2, 4, 6, 8, 10, 11]
    assert computed_steps(DiCache(retention_ratio=0.0, threshold=INF), signals) == [0, 4, 8, 11]


def test_dicache_goes_along_the_line_as_far_as_the_probe_has_gone() -> None:
    def weights(trend: float, *computed: int) -> Any:
        return DiCache().weights(Context(step=9, computed_steps=[*computed], trend=trend))

    assert weights(1.25, 4, 6) == (-0.25, 1.25)
    assert weights(0.5, 4, 6) == (0.0, 1.0)
    assert weights(7.0, 4, 6) == (-0.5, 1.5)
    assert weights(1.25, 6) is None


def test_easycache_sums_the_foretold_change_after_its_warmup() -> None:
    signals = [0.0] + [0.02] * 19
    assert computed_steps(EasyCache(), signals) == [0, 1, 2, 3, 6, 9, 12, 15, 18, 19]  # a fifth of 20 steps are 4
    assert computed_steps(EasyCache(threshold=INF, retention_ratio=0.0), signals) == [0, 6, 12, 18, 19]


@pytest.mark.parametrize("cls", [DiCache, EasyCache])
def test_a_later_expert_warms_up_at_its_own_first_step(cls: Any) -> None:
    contexts = [
        Context(step=step, schedule=Schedule(20), computed_steps=[10], signals=(0.0,), expert_start=10, expert_steps=10)
        for step in (11, 13)
    ]
    assert [bool(cls().should_compute(context)) for context in contexts] == [True, False]


# -- options ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("TeaCache", TeaCache),
        ("first-block-cache", FirstBlockCache),
        ("DBCache", DBCache),
        ("dicache", DiCache),
        ("easy_cache", EasyCache),
    ],
)
def test_names(name: str, cls: type[Strategy]) -> None:
    assert type(Strategy.find(name, {})) is cls


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (TeaCache, {"threshold": -0.1}, r"TeaCache threshold=-0\.1; allowed: a number, 0 or more"),
        (TeaCache, {"threshold": math.nan}, "threshold=nan"),
        (TeaCache, {"coefficients": "wan"}, r"coefficients='wan'; allowed: five numbers.*flux, hunyuanvideo"),
        (TeaCache, {"coefficients": (1.0, 2.0)}, r"coefficients=\(1\.0, 2\.0\); allowed: five numbers"),
        (TeaCache, {"coefficients": (1.0, 2.0, 3.0, 4.0, math.nan)}, "allowed: five numbers"),
        (TeaCache, {"coefficients": [1.0, 2.0, 3.0, 4.0, 5.0]}, "allowed: five numbers in a tuple"),
        (TeaCache, {"warmup": 0}, "warmup=0; allowed: an integer, 1 or more"),
        (TeaCache, {"clamp": 1}, "clamp=1; allowed: True or False"),
        (FirstBlockCache, {"threshold": True}, "threshold=True"),
        (FirstBlockCache, {"max_skip_steps": -1}, "max_skip_steps=-1; allowed: an integer, 0 or more"),
        (FirstBlockCache, {"max_skip_steps": 2.0}, r"max_skip_steps=2\.0"),
        (DBCache, {"front": 0}, "DBCache front=0; allowed: an integer, 1 or more"),
        (DBCache, {"front": 1.5}, r"DBCache front=1\.5; allowed: an integer, 1 or more"),
        (DBCache, {"back": 1.0}, r"DBCache back=1\.0; allowed: an integer, 0 or more"),
        (DBCache, {"back": -1}, "back=-1"),
        (DBCache, {"warmup": None}, "warmup=None"),
        (DBCache, {"max_cached_steps": -1}, "max_cached_steps=-1"),
        (DBCache, {"order": 0.5}, r"order=0\.5"),
        (DiCache, {"retention_ratio": 1.5}, r"DiCache retention_ratio=1\.5; allowed: a share from 0 to 1"),
        (DiCache, {"probe": 0}, "probe=0; allowed: an integer, 1 or more"),
        (EasyCache, {"retention_ratio": -0.1}, r"EasyCache retention_ratio=-0\.1"),
        (EasyCache, {"threshold": "low"}, "threshold='low'"),
    ],
)
def test_impossible_options_are_refused(cls: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cls(**options)


@pytest.mark.parametrize(("front", "back", "ran"), [(0.14, 0, 1), (0.5, 0, 2), (1, 0.25, 2), (2, 1, 3)])
def test_dbcache_takes_numbers_of_blocks_or_shares(front: float, back: float, ran: int) -> None:
    case = CASES["plain"]  # of 4 blocks
    model = attach(case.build(), case, DBCache(front=front, back=back, warmup=1, threshold=INF))
    with count_blocks(model, case) as count:
        drive(model, case, [1.0, 0.9])
    assert count.total == 4 + ran


def test_a_front_and_back_that_leave_no_block_are_refused_before_anything_is_touched() -> None:
    model = CASES["plain"].build()
    inside = dissect(model)
    with pytest.raises(cachedit.UnsupportedModelError, match="the stack has 4 blocks.*choose a smaller number"):
        attach(model, CASES["plain"], DBCache(front=3, back=1))
    assert dissect(model) == inside


# -- in models ----------------------------------------------------------------------------------------------------

PATIENT: dict[str, FeatureStrategy] = {  # these reuse whenever they may
    "tea": TeaCache(threshold=INF),
    "first": FirstBlockCache(threshold=INF),
    "db": DBCache(front=1, back=1, warmup=2, threshold=INF, order=1),
    "di": DiCache(threshold=INF, retention_ratio=0.0),
    "easy": EasyCache(threshold=INF),
}
STRIPS = {  # within 10 steps
    "tea": "■□□□□■□□□■",
    "first": "■□□□■□□□■□",
    "db": "■■□□□□■□□□",
    "di": "■□□□■□□□■■",
    "easy": "■■□□□□□■□■",
}
FAMILIES = ["flux", "latte", "wan", "z_image", "hunyuanvideo", "lumina2"]
LATENTS = {"z_image": "x"}


def moved(case: Case, model: nn.Module, speed: float = 0.1, steps: int = STEPS, batch: int = 1, seed: int = 0) -> Any:
    """Outputs of a run whose latents shrink a little at every step, as EasyCache must see them do."""
    name = LATENTS.get(case.name, "x" if case.name == "plain" else "hidden_states")
    latents, outputs = case.inputs(seed, batch)[name], []
    for i in range(steps):
        scale = 1 - speed * i
        now = [x * scale for x in latents] if isinstance(latents, list) else latents * scale
        outputs.append(case.call(model, 1 - i / steps, seed, batch, **{name: now}))
    return outputs


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kind", PATIENT)
def test_a_family_under_every_strategy(kind: str, name: str) -> None:
    case = CASES[name]
    model = case.build()
    inside, plain = dissect(model), moved(case, model)
    attach(model, case, PATIENT[kind])
    first = moved(case, model)
    record = record_of(model)
    assert record.strip() == STRIPS[kind]
    assert set(record.computed_steps) <= set(equal_steps(first, plain))
    assert not set(record.reused_steps) & set(equal_steps(first, plain))
    assert equal_steps(moved(case, model), first) == [*range(STEPS)]
    together = moved(case, model, batch=2)
    assert record_of(model).strip() == STRIPS[kind]
    alone = zip(first, moved(case, model, seed=1), strict=True)
    for rows, batch in zip(alone, together, strict=True):
        torch.testing.assert_close(torch.cat(rows), batch, rtol=1e-4, atol=1e-5)
    cachedit.unwrap(model)
    assert dissect(model) == inside
    assert equal_steps(moved(case, model), plain) == [*range(STEPS)]


@pytest.mark.parametrize(
    ("strategy", "steps"),
    [(TeaCache(), 20), (FirstBlockCache(), 20), (DBCache(), 20), (DiCache(), 20), (EasyCache(), 50)],
    ids=lambda value: str(value).partition("(")[0],
)
def test_default_settings_fire_on_a_sampled_trajectory(strategy: FeatureStrategy, steps: int) -> None:
    """Weights are drawn, so a step changes more than in a trained model; EasyCache's threshold is for 50 steps."""
    case = CASES["sd3"]
    model, x = attach(case.build(), case, strategy, num_inference_steps=steps), case.inputs(0, 1)["hidden_states"]
    for i in range(steps):
        x = x - case.call(model, 1 - i / steps, hidden_states=x) / steps
    assert len(record_of(model).reused_steps) >= 3


# -- the published rules on what a run has seen -------------------------------------------------------------------


def rel(now: torch.Tensor, before: torch.Tensor) -> float:
    return float((now - before).abs().mean() / before.abs().mean())


def test_teacache_decides_by_what_entered_the_first_attention() -> None:
    case = CASES["flux"]
    model, seen = case.build(), []
    attention = model.transformer_blocks[0].attn
    attention.register_forward_pre_hook(lambda m, a, k: seen.append(k["hidden_states"]), with_kwargs=True)
    attach(model, case, TeaCache(threshold=0.25, max_skip_steps=99), num_inference_steps=20)
    moved(case, model, speed=0.02, steps=20)
    computed, total = [0], 0.0
    for step in range(1, 20):
        total += rel(seen[step], seen[step - 1])
        if total >= 0.25 or step == 19:
            computed, total = [*computed, step], 0.0
    assert record_of(model).computed_steps == computed
    assert 4 < len(computed) < 15


def test_dicache_decides_and_forecasts_by_what_its_probe_has_seen() -> None:
    case = CASES["flux"]
    model, probe, rest = case.build(), [], []
    model.transformer_blocks[0].register_forward_hook(
        lambda m, a, k, out: probe.append((k["hidden_states"], out[1])), with_kwargs=True
    )
    model.norm_out.register_forward_pre_hook(lambda m, a: rest.append(a[0]))
    attach(model, case, DiCache(threshold=0.1, retention_ratio=0.0, max_skip_steps=99), num_inference_steps=20)
    moved(case, model, speed=0.02, steps=20)
    computed, total, stretched = [0], 0.0, 0
    for step in range(1, 20):
        (x, y), (x_before, y_before) = probe[step], probe[step - 1]
        total += abs(rel(y, y_before) - rel(x, x_before))
        if total >= 0.1 or step == 19:
            computed, total = [*computed, step], 0.0
            continue
        residual = rest[computed[-1]] - probe[computed[-1]][1]
        if len(computed) > 1:
            older, newest = (rest[a] - probe[a][1] for a in computed[-2:])
            p_older, p_newest, p = (probe[a][1] - probe[a][0] for a in (*computed[-2:], step))
            way = float((p - p_older).abs().mean() / (p_newest - p_older).abs().mean())
            residual = older + min(max(way, 1.0), 1.5) * (newest - older)
            stretched += way > 1.01
        torch.testing.assert_close(rest[step], y + residual, rtol=1e-4, atol=1e-4)
    assert record_of(model).computed_steps == computed
    assert 4 < len(computed) < 15
    assert stretched > 2


def test_easycache_is_the_published_loop() -> None:
    case, steps, threshold = CASES["plain"], 25, 0.2
    plain, sigmas = case.build(), [1 - i / 25 for i in range(25)]
    x, computed, total, rate = case.inputs(0, 1)["x"], [], 0.0, None
    wanted, last, before = [], None, None
    for step, sigma in enumerate(sigmas):
        compute = step < 5 or step == steps - 1 or rate is None
        if not compute:
            total += rate * float((x - before).abs().mean()) / float(last[1].abs().mean())
            compute = total >= threshold
        if compute:
            v, total = case.call(plain, sigma, x=x), 0.0
            if last is not None:
                rate = float((v - last[1]).abs().mean()) / float((x - last[0]).abs().mean())
            last, computed = (x, v), [*computed, step]
        else:
            v = x + (last[1] - last[0])
        wanted.append(v)
        before, x = x, x - v / steps
    model = attach(case.build(), case, EasyCache(threshold=threshold, max_skip_steps=99), num_inference_steps=steps)
    x = case.inputs(0, 1)["x"]
    for sigma, other in zip(sigmas, wanted, strict=True):
        v = case.call(model, sigma, x=x)
        torch.testing.assert_close(v, other, rtol=1e-4, atol=1e-5)
        x = x - v / steps
    assert record_of(model).computed_steps == computed
    assert 7 < len(computed) < 20


@pytest.mark.parametrize("threshold", [0.1, 0.2, 0.3])
def test_firstblockcache_is_the_one_of_diffusers(threshold: float) -> None:
    """At batch 1 and in a first run, after which diffusers keeps the first block's residual of the last one."""
    case = CASES["flux"]
    theirs, ours = case.build(), case.build()
    theirs.enable_cache(FirstBlockCacheConfig(threshold=threshold))
    with count_blocks(theirs, case) as count, theirs.cache_context("cond"):
        expected, executed = [], []
        for i in range(20):
            count.clear()
            expected += drive(theirs, case, [1 - i / 20])
            executed.append(count.per_block[0])
    attach(ours, case, FirstBlockCache(threshold=threshold, max_skip_steps=99), num_inference_steps=20)
    outputs = drive(ours, case, [1 - i / 20 for i in range(20)])
    for a, b in zip(outputs, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert 0 < len(record_of(ours).reused_steps) < 19
