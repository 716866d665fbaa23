"""HyCa, ProfilingDiT and the fit behind TeaCache: what they measure, and what they make of it."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from conftest import blocks_option, drive, record_of
from torch import nn

import cachedit
from cachedit import Context, FeatureStrategy, Profile, ProfileError, Schedule, UnsupportedModelError
from cachedit.calibration import calibrate
from cachedit.calibration.measure import Measure
from cachedit.calibration.measures.block_drift import BlockDrift
from cachedit.calibration.measures.channels import CLUSTERS, ChannelClusters, descriptors, k_means, some_tokens
from cachedit.calibration.measures.indicator import IndicatorPolynomial, rising_fit
from cachedit.evaluate.loading import load_pipeline
from cachedit.run import Step
from cachedit.samples import prompts, sample_path
from cachedit.strategies.hy_ca import SOLVERS, HyCa
from cachedit.strategies.profiling_di_t import ProfilingDiT
from cachedit.strategies.taylor_seer import TaylorSeer
from cachedit.strategy import Axes, Output, Site, Stack, Strategy
from zoo.models import CASES, count_blocks

PLACE = {name: k for k, name in enumerate(SOLVERS)}


@dataclass(frozen=True)
class Listening(FeatureStrategy, abstract=True):
    """Reads the polynomial, whatever it does with it. Abstract keeps it out of the registry."""

    profile_arrays: ClassVar[Axes] = {"indicator_polynomial": ("power",)}


def clustered(clusters: Sequence[Any], solvers: Sequence[Any], **fields: Any) -> Profile:
    """A profile of HyCa."""
    arrays = {"channel_cluster": {"all": list(clusters)}, "cluster_solver": {"all": list(solvers)}}
    return Profile(arrays=arrays, axes={"channel_cluster": ["channel"], "cluster_solver": ["cluster"]}, **fields)


def drifting(*rows: Sequence[float], **fields: Any) -> Profile:
    """A profile of ProfilingDiT with one row per branch."""
    arrays = {"block_drift": {str(k): list(row) for k, row in enumerate(rows)}}
    return Profile(arrays=arrays, axes={"block_drift": ["block"]}, **fields)


def computed_steps(strategy: Any, steps: int) -> list[int]:
    """Steps of a run that are computed: the first, which has nothing to reuse, and as the rule says."""
    computed = [0]
    for step in range(1, steps):
        if strategy.should_compute(Context(step=step, schedule=Schedule(steps), computed_steps=computed)):
            computed.append(step)
    return computed


def trial(**attributes: int) -> Any:
    """What a measure asks of the trial that it belongs to."""
    return SimpleNamespace(**attributes)


def show(
    measure: Measure,
    values: Sequence[Mapping[Any, torch.Tensor]],
    prompt: int = 0,
    branches: Sequence[str] = ("cond",),
    signals: Sequence[float | None] | None = None,
) -> Any:
    """The part of a prompt in whose run, at step i, every branch gives what ``values[i]`` says."""
    measure.start(prompt)
    for i, sites in enumerate(values):
        for branch in branches:
            signal = signals[i] if signals is not None and branch == branches[0] else None
            step = Step(i, None, None, branch, "transformer", True, signal=signal)
            measure.watch(step, {site: (x,) for site, x in sites.items()})
    return measure.stop()


def stack(*channels: Sequence[float]) -> list[dict[Site, torch.Tensor]]:
    """What a stack gives at each step, [1, 2 tokens, C]; the second token is the double of the first."""
    rows = torch.tensor(channels).T  # [T, C]
    return [{Stack(): torch.stack([row, 2 * row])[None]} for row in rows]


# -- HyCa ---------------------------------------------------------------------------------------------------------


def test_names() -> None:
    assert type(Strategy.find("hyca", {})) is type(Strategy.find("HyCa", {})) is HyCa
    assert type(Strategy.find("profiling-dit", {})) is type(Strategy.find("ProfilingDiT", {})) is ProfilingDiT


def test_solvers_on_an_even_grid_are_the_weights_of_the_specification() -> None:
    th = 0.75  # three steps into a gap of four
    wanted = {
        "plain": (0, 0, 1),
        "line": (0, -th, 1 + th),
        "taylor 2": (th**2 / 2, -th - th**2, 1 + th + th**2 / 2),
        "newton 2": (0.5 * th + 0.5 * th**2, -2 * th - th**2, 1 + 1.5 * th + 0.5 * th**2),
        "bdf 2": (0.5 * th, -2 * th, 1 + 1.5 * th),
    }
    for name, weights in wanted.items():
        assert SOLVERS[name]([2, 6, 10], 13) == pytest.approx(weights), name
    # (u^2 - 1) / 2 = 4 in the place of u^2 / 2, over differences of 1/4 and 1/16
    assert SOLVERS["hermite 2"]([2, 6, 10], 13) == pytest.approx((4 / 16, -th - 8 / 16, 1 + th + 4 / 16))
    assert list(SOLVERS) == ["plain", "line", "taylor 2", "newton 2", "bdf 2", "hermite 2"]  # profiles count on it


def test_hyca_computes_the_warmup_and_one_step_in_an_interval() -> None:
    assert computed_steps(HyCa().configured(None), 20) == [0, 1, 2, 6, 10, 14, 18]
    assert computed_steps(HyCa(interval=5, warmup=1).configured(None), 20) == [0, 5, 10, 15]
    later = Context(step=31, schedule=Schedule(40), computed_steps=[30])
    assert HyCa().configured(None).should_compute(later) == "warm-up"  # an expert that begins at step 30


def test_hyca_takes_open_options_from_the_profile() -> None:
    profile = clustered([0], [0], defaults={"interval": 6, "warmup": 2})
    assert HyCa().configured(profile) == HyCa(interval=6, warmup=2)
    assert HyCa(interval=3).configured(profile) == HyCa(interval=3, warmup=2)
    assert HyCa().configured(clustered([0], [0])) == HyCa(interval=4, warmup=3)


class Powers(nn.Module):
    """One block that adds step, step^2 and step^3 to its three channels; ten steps, timestep 1000 to 100."""

    class Block(nn.Module):
        def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
            step = ((1000 - timestep) / 100).round()
            return hidden_states + torch.stack([step, step**2, step**3], -1)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Block()])

    def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden_states = block(hidden_states, timestep)
        return hidden_states


def test_every_channel_is_forecast_by_the_solver_of_its_cluster() -> None:
    model = Powers().eval()
    profile = clustered([1, 0, 2], [PLACE["line"], PLACE["plain"], PLACE["newton 2"]])
    cachedit.wrap(model, "hyca", interval=3, profile=profile, num_inference_steps=10)
    with torch.no_grad():
        outputs = [model(torch.zeros(1, 1, 3), torch.tensor([1000.0 - 100 * i]))[0, 0].tolist() for i in range(10)]
    assert record_of(model).computed_steps == [0, 1, 2, 5, 8]
    # step 4 from 0 1 2: newest, line 1 -> 4, quadratic 0 1 8; step 7 from 1 2 5: line 4 -> 25, quadratic 1 8 125
    assert outputs[4] == pytest.approx([2, 4 + 2 * 3, 8 + 7 * 2 + 3 * 2 * 3])
    assert outputs[7] == pytest.approx([5, 25 + 2 * 7, 125 + 39 * 2 + 8 * 2 * 5])


def test_one_solver_for_all_clusters_is_that_solver() -> None:
    case = CASES["flux"]
    hyca = clustered([k % 2 for k in range(32)], [PLACE["line"]] * 2)
    ours = drive(cachedit.wrap(case.build(), "hyca", profile=hyca, num_inference_steps=10), case)
    line = drive(cachedit.wrap(case.build(), TaylorSeer(order=1), num_inference_steps=10), case)
    torch.testing.assert_close(ours, line)


@pytest.mark.parametrize(
    ("clusters", "solvers", "message"),
    [
        ([0, 1, 2], [0, 0], r"channel_cluster' holds 2; allowed: integers from 0 to 1"),
        ([0, -1], [0, 0], r"channel_cluster' holds -1"),
        ([0, 0.5], [0, 0], r"channel_cluster' holds 0.5"),
        ([0, 1], [0, 6], r"cluster_solver' holds 6; allowed: integers from 0 to 5"),
    ],
)
def test_a_damaged_profile_is_refused_before_the_run(clusters: list[Any], solvers: list[Any], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        cachedit.wrap(Powers().eval(), "hyca", profile=clustered(clusters, solvers), num_inference_steps=10)


@pytest.mark.parametrize("options", [{"interval": 0}, {"interval": 2.0}, {"warmup": 0}, {"warmup": True}])
def test_hyca_refuses_impossible_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"HyCa {next(iter(options))}=.*allowed: an integer, 1 or more"):
        HyCa(**options)


# -- clusters and their solvers -----------------------------------------------------------------------------------

CONSTANT = [[float(1 + k)] * 16 for k in range(6)]
LINES = [[float((k + 2) * i + 3) for i in range(16)] for k in range(6)]
PARABOLAS = [[float((k + 1) * i * i - i) for i in range(16)] for k in range(6)]


def solver_of_channels(measure: ChannelClusters, *parts: Any) -> list[str]:
    """Name of the solver of every channel."""
    arrays = measure.arrays([*parts])
    solvers = arrays["cluster_solver"]["all"]
    return [list(SOLVERS)[solvers[cluster]] for cluster in arrays["channel_cluster"]["all"]]


def test_each_kind_of_channel_gets_the_simplest_solver_that_is_exact() -> None:
    measure = ChannelClusters(HyCa())
    part = show(measure, stack(*CONSTANT, *LINES, *PARABOLAS), branches=("cond", "uncond"))
    assert solver_of_channels(measure, part) == ["plain"] * 6 + ["line"] * 6 + ["newton 2"] * 6
    assert measure.defaults == {"interval": 4, "warmup": 3}
    noted = measure.notes["forecast_error"]
    assert noted["plain"] == 1.0
    assert noted["by channel"] <= noted["by cluster"] < 1e-9 < min(noted["line"], noted["bdf 2"])


def test_clusters_are_of_the_first_prompt_and_solvers_of_the_others() -> None:
    measure = ChannelClusters(HyCa())
    first = show(measure, stack(*LINES, *PARABOLAS), prompt=0)
    second = show(measure, stack(*PARABOLAS, *LINES), prompt=1)
    assert solver_of_channels(measure, first, second) == ["newton 2"] * 6 + ["line"] * 6


def test_a_run_that_skips_nothing_is_refused() -> None:
    measure = ChannelClusters(HyCa(interval=1))
    measure.trial = trial(num_inference_steps=16)
    part = show(measure, stack(*LINES))
    with pytest.raises(ProfileError, match="in 16 steps HyCa.*skips nothing.*at a larger interval"):
        measure.arrays([part])


def test_non_finite_features_are_refused() -> None:
    measure = ChannelClusters(HyCa())
    part = show(measure, stack(*LINES, [math.nan] * 16))
    with pytest.raises(ProfileError, match="squared error of the forecasts has nan among"):
        measure.arrays([part])


def test_streams_of_two_widths_are_refused() -> None:
    measure = ChannelClusters(HyCa())
    measure.start(0)
    step = Step(0, None, None, "cond", "transformer", True)
    with pytest.raises(UnsupportedModelError, match="streams of 16 and 32 channels"):
        measure.watch(step, {Stack(): (torch.zeros(1, 3, 32), torch.zeros(1, 2, 16))})


def test_a_sample_of_tokens_is_spread_over_all_of_them() -> None:
    tokens = torch.arange(4096.0).reshape(1, 4096, 1).half()
    (some,) = some_tokens((tokens,))
    assert (some.dtype, tuple(some.shape), float(some[0]), float(some[-1])) == (torch.float32, (256, 1), 0.0, 4096.0)
    assert 14 <= float(some.diff(dim=0).min()) <= float(some.diff(dim=0).max()) <= 18
    assert torch.equal(some_tokens((torch.ones(2, 3, 5),))[0], torch.ones(6, 5))


def test_descriptors_tell_how_a_channel_moves() -> None:
    steps = torch.arange(12.0)
    series = torch.stack([torch.ones(12), steps, steps**2, (-1) ** steps], -1)[:, None]  # [12, 1, 4]
    found = descriptors(series)
    assert tuple(found.shape) == (4, 6)
    torch.testing.assert_close(found.mean(0), torch.zeros(6, dtype=found.dtype), rtol=0, atol=1e-12)
    torch.testing.assert_close(found.std(0, correction=0), torch.ones(6, dtype=found.dtype))
    _, line, parabola, swing = found.T[3]  # third against first difference: 0, 0 and 4
    assert max(line, parabola) < swing - 1
    _, line, parabola, swing = found.T[4]  # second against first: 0, less than 1, and 2
    assert line < parabola < swing
    assert torch.equal(
        descriptors(torch.ones(5, 2, 3)), torch.zeros(3, 6, dtype=torch.double)
    )  # nothing tells them apart


def test_k_means_finds_planted_groups_again_and_again() -> None:
    generator = torch.Generator().manual_seed(5)
    centres = torch.tensor([[0.0, 0.0], [9.0, 0.0], [0.0, 9.0], [9.0, 9.0]])
    planted = torch.randint(4, (200,), generator=generator)
    points = (centres[planted] + torch.randn(200, 2, generator=generator)).double()
    found = k_means(points, 4)
    assert len({*zip(planted.tolist(), found.tolist(), strict=True)}) == 4
    assert torch.equal(k_means(points, 4), found)


def test_k_means_makes_no_more_clusters_than_there_are_different_points() -> None:
    points = torch.tensor([[1.0], [1.0], [2.0], [1.0], [2.0]]).double()
    assert k_means(points, 4).tolist() in ([0, 0, 1, 0, 1], [1, 1, 0, 1, 0])
    assert k_means(torch.zeros(3, 2).double(), 4).tolist() == [0, 0, 0]


# -- ProfilingDiT -------------------------------------------------------------------------------------------------


def test_gaps_shrink_as_in_the_released_list() -> None:
    strategy = ProfilingDiT().configured(None)
    assert computed_steps(strategy, 50) == [*range(6), 6, 18, 26, 32, 38, 42, 46, 48]
    # first gap 0.24 of 20 steps rounded down, then 4.8 - 3.6 * (s - 6) / 14 from step s on
    assert computed_steps(strategy, 20) == [*range(7), 10, 13, 16, 18, 19]


def test_even_gaps_as_the_released_code_runs() -> None:
    strategy = ProfilingDiT(interval=6).configured(None)
    assert computed_steps(strategy, 50) == [*range(7), 12, 18, 24, 30, 36, 42, 48]
    assert computed_steps(ProfilingDiT(interval=3, warmup=0).configured(None), 10) == [0, 3, 6, 9]


def test_a_later_expert_has_a_schedule_of_its_own() -> None:
    strategy = ProfilingDiT(interval=4, warmup=2).configured(None)
    answers = [
        bool(strategy.should_compute(Context(step=step, schedule=Schedule(40), computed_steps=[20], expert_steps=20)))
        for step in range(21, 30)
    ]
    assert answers == [True, True, False, False, False, True, False, False, False]  # 21 22 and 26


def test_runs_of_the_published_blocks() -> None:
    wan = (0, *range(2, 8), *range(10, 21), *range(25, 33), 37, 38)
    bounds = [(0, 1), (2, 8), (10, 21), (25, 33), (37, 39)]
    assert ProfilingDiT(background=wan).sites == tuple([Stack(*bound) for bound in bounds])
    assert ProfilingDiT(background=wan[::-1]).sites == ProfilingDiT(background=wan).sites
    assert ProfilingDiT().sites == (Stack(),)  # which blocks is not known yet, only that it is blocks


def test_the_blocks_that_drift_least_are_background() -> None:
    profile = drifting([0.1, 0.4, 0.2, 0.3, 0.5], [0.1, 0.1, 0.6, 0.3, 0.1])  # worst: 0.1 0.4 0.6 0.3 0.5
    assert ProfilingDiT(share=0.6).configured(profile).background == (0, 1, 3)
    assert ProfilingDiT().configured(profile).background == (0, 1, 3)  # 0.65 of 5, rounded
    assert ProfilingDiT(share=0.01).configured(profile).background == (0,)
    assert ProfilingDiT(share=1).configured(profile).background == (0, 1, 2, 3, 4)
    assert ProfilingDiT(background=(4,)).configured(profile).background == (4,)


def test_profiling_takes_open_options_from_the_profile() -> None:
    profile = drifting([0.1, 0.2], defaults={"share": 0.5, "interval": 6})
    wanted = ProfilingDiT((0,), share=0.5, warmup=6, interval=6, largest=0.24, smallest=0.06)
    assert ProfilingDiT().configured(profile) == wanted
    assert ProfilingDiT(interval=0, share=1.0).configured(profile).interval == 0


def test_a_given_background_needs_no_profile_and_foreground_blocks_always_run() -> None:
    case = CASES["wan"]
    model = case.build()
    strategy = ProfilingDiT(background=(0, 2), warmup=1, interval=4)
    cachedit.wrap(model, strategy, num_inference_steps=10, **blocks_option(case))
    executed = []
    with count_blocks(model, case) as count:
        for i in range(10):
            count.clear()
            drive(model, case, [1 - i / 10])
            executed.append(count.per_block[:])
    assert executed == [[1, 1, 1, 1] if i in (0, 1, 5, 9) else [0, 1, 0, 1] for i in range(10)]


def test_the_profile_decides_which_blocks_run() -> None:
    case = CASES["wan"]
    model = case.build()
    profile = drifting([0.2, 0.9, 0.1, 0.8])
    cachedit.wrap(model, "profiling-dit", share=0.5, profile=profile, num_inference_steps=20)
    with count_blocks(model, case) as count:
        drive(model, case, [1 - i / 20 for i in range(20)])
    assert record_of(model).computed_steps == [*range(7), 10, 13, 16, 18, 19]
    assert count.per_block == [12, 20, 12, 20]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"background": ()}, "background=.*allowed: a tuple of block indices, each once"),
        ({"background": [1, 2]}, "background="),
        ({"background": (1, 1)}, "background="),
        ({"background": (-1,)}, "background="),
        ({"share": 0}, "share=0; allowed: a share above 0, up to 1"),
        ({"share": 1.5}, "share=1.5"),
        ({"warmup": -1}, "warmup=-1; allowed: an integer, 0 or more"),
        ({"interval": 1.5}, "interval=1.5"),
        ({"largest": 0.1, "smallest": 0.2}, "largest=0.1; allowed: smallest=0.2 or more"),
    ],
)
def test_profiling_refuses_impossible_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"ProfilingDiT {message}"):
        ProfilingDiT(**options)


def test_blocks_that_the_model_has_not_got_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="the stack has 4 blocks, and blocks 7 to 7"):
        cachedit.wrap(CASES["wan"].build(), ProfilingDiT(background=(0, 7)), num_inference_steps=10)


def drift(strategy: ProfilingDiT, steps: int) -> Any:
    """What is measured of one block with a constant delta of 1 and one whose delta is the step."""
    measure = BlockDrift(strategy)
    measure.trial = trial(depth=2, num_inference_steps=steps)
    ones = torch.ones(1, 4, 3)
    values = [{Stack(0, 1): ones, Stack(1, 2): i * ones} for i in range(steps)]
    return measure.arrays([show(measure, values, branches=("cond", "uncond"))])


def test_drift_is_the_error_of_a_skipped_block_against_the_size_of_all() -> None:
    arrays = drift(ProfilingDiT(warmup=1, interval=3), 8)
    # computed 0 1 4 7; at 2 3 5 6 the second block is off by 1 2 1 2, and the mean delta is 1.5 2 3 3.5
    wanted = (1 / 1.5 + 2 / 2 + 1 / 3 + 2 / 3.5) / 4
    assert arrays == {"block_drift": {branch: [0.0, pytest.approx(wanted, abs=1e-6)] for branch in ("cond", "uncond")}}


def test_drift_needs_skipped_steps() -> None:
    with pytest.raises(ProfileError, match="in 6 steps ProfilingDiT.*skips nothing"):
        drift(ProfilingDiT(), 6)


# -- the polynomial of TeaCache -----------------------------------------------------------------------------------


def test_a_rising_polynomial_is_found_exactly() -> None:
    row = [3.0, 0.5, 2.0, 0.25, 0.125]
    x = np.linspace(0.01, 0.6, 20)
    assert rising_fit(x.tolist(), np.polyval(row, x).tolist()) == pytest.approx(row, abs=1e-6)


def test_fits_that_can_be_checked_by_hand() -> None:
    assert np.polyval(rising_fit([0.1, 0.2, 0.3], [3.0, 2.0, 1.0]), [0.0, 0.1, 9.0]) == pytest.approx([2.0] * 3)
    assert np.polyval(rising_fit([0.2], [0.1]), 0.2) == pytest.approx(0.1)
    assert rising_fit([0.0, 0.0], [0.5, 0.7]) == pytest.approx([0, 0, 0, 0, 0.6])
    assert rising_fit([0.1, 0.2], [0.0, 0.0]) == [0.0] * 5


def test_a_fit_of_anything_is_nowhere_negative_and_nowhere_falls() -> None:
    free_dips = 0
    for seed in range(40):
        draw = np.random.default_rng(seed)
        x = draw.uniform(0.02, 0.3, draw.integers(1, 30))
        y = np.abs(x ** draw.integers(0, 4) + draw.normal(0, 0.05, len(x)))
        row = rising_fit(x.tolist(), y.tolist())
        curve = np.polyval(row, np.linspace(0, 2 * x.max(), 200))
        assert curve.min() >= -1e-9, seed
        assert np.diff(curve).min() >= -1e-9 * (1 + curve.max()), seed
        miss = np.square(np.polyval(row, x) - y).sum()  # constants and lines through 0 are among the candidates
        assert miss <= np.square(y.mean() - y).sum() + 1e-9, seed
        assert miss <= np.square(x * (x @ y) / (x @ x) - y).sum() + 1e-9, seed
        if len(x) > 5:
            free_dips += np.polyval(np.polyfit(x, y, 4), np.linspace(0, 2 * x.max(), 200)).min() < 0
    assert free_dips > 15  # which is why the fit is not free


def test_pairs_are_of_consecutive_steps_of_the_branch_that_is_heard() -> None:
    measure, parts = IndicatorPolynomial(Listening()), []
    for k, factor in enumerate((1.0, -3.0)):  # relative changes of 0.1 and 0.2, in both runs
        outputs = [{Output(): factor * torch.full((1, 4, 2, 2), value)} for value in (1.0, 1.1, 1.32)]
        parts.append(show(measure, outputs, prompt=k, branches=("cond", "uncond"), signals=[None, 0.1, 0.2]))
    (row,) = measure.arrays(parts)["indicator_polynomial"].values()
    assert np.polyval(row, [0.1, 0.2]) == pytest.approx([0.1, 0.2], abs=1e-5)
    assert measure.notes["indicator"] == {"pairs": 4, "largest_change": 0.2, "explained": 1.0}


def test_the_loudest_sample_of_a_batch_counts() -> None:
    measure = IndicatorPolynomial(Listening())
    rows = torch.tensor([[1.0, 1.0], [1.0, 1.5]])  # the second sample changes by a half
    part = show(measure, [{Output(): rows[:, k].reshape(2, 1, 1, 1)} for k in range(2)], signals=[None, 0.3])
    (row,) = measure.arrays([part])["indicator_polynomial"].values()
    assert np.polyval(row, 0.3) == pytest.approx(0.5)


def test_an_output_that_was_zero_is_refused() -> None:
    measure = IndicatorPolynomial(Listening())
    part = show(measure, [{Output(): torch.full((1, 1), float(k))} for k in range(2)], signals=[None, 0.3])
    with pytest.raises(ProfileError, match="change of the output has inf among"):
        measure.arrays([part])


# -- calibration of the sample pipeline ---------------------------------------------------------------------------

STEPS = 20


@pytest.fixture(scope="module")
def pipe() -> Any:
    torch.set_num_threads(1)
    pipe = load_pipeline(str(sample_path("image")), None, None)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def latents(pipe: Any, seed: int = 7) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    output = pipe(prompts("image")[5], num_inference_steps=STEPS, generator=generator, output_type="latent")
    return torch.as_tensor(output[0])


@pytest.fixture(scope="module")
def uncached(pipe: Any) -> torch.Tensor:
    return latents(pipe)


def error(pipe: Any, uncached: torch.Tensor, strategy: FeatureStrategy, profile: Profile) -> float:
    """Relative distance from the uncached latents of a prompt that was not calibrated on."""
    with cachedit.cached(pipe, strategy, profile=profile):
        return float((latents(pipe) - uncached).norm() / uncached.norm())


def test_hyca_beats_the_solvers_it_did_not_choose(pipe: Any, uncached: torch.Tensor) -> None:
    chosen = HyCa(interval=4, warmup=9)
    profile = calibrate(pipe, chosen, prompts=prompts("image")[:2], num_inference_steps=STEPS)
    assert profile.axes == {"channel_cluster": ["channel"], "cluster_solver": ["cluster"]}
    assert len(profile.arrays["channel_cluster"]["all"]) == pipe.transformer.config.num_attention_heads * (
        pipe.transformer.config.attention_head_dim
    )
    assert 1 < len(profile.arrays["cluster_solver"]["all"]) <= CLUSTERS
    noted = profile.provenance["forecast_error"]
    assert noted["by channel"] <= noted["by cluster"] <= min(noted[name] for name in SOLVERS)
    assert HyCa().configured(Profile.from_json(profile.to_json())) == chosen
    others = []
    for name in ("plain", "newton 2"):
        other = copy.deepcopy(profile)
        other.arrays["cluster_solver"]["all"] = [PLACE[name]] * len(profile.arrays["cluster_solver"]["all"])
        others.append(error(pipe, uncached, chosen, other))
    assert error(pipe, uncached, chosen, profile) < min(others)


def test_the_blocks_that_drift_least_cost_least(pipe: Any, uncached: torch.Tensor) -> None:
    strategy = ProfilingDiT(share=3 / 8, warmup=2)
    profile = calibrate(pipe, strategy, prompts=prompts("image")[:1], num_inference_steps=STEPS)
    drifts = profile.arrays["block_drift"]
    assert [len(row) for row in drifts.values()] == [8, 8]
    calm = strategy.configured(profile).background
    assert calm is not None
    worst = [max(row[k] for row in drifts.values()) for k in range(8)]
    lively = tuple(sorted(sorted(range(8), key=worst.__getitem__)[-3:]))
    by_drift = error(pipe, uncached, ProfilingDiT(background=calm, warmup=2), profile)
    assert by_drift < 0.8 * error(pipe, uncached, ProfilingDiT(background=lively, warmup=2), profile)


def test_the_polynomial_explains_the_change_of_the_output(pipe: Any) -> None:
    profile = calibrate(pipe, Listening(), prompts=prompts("image")[:1], num_inference_steps=STEPS)
    assert profile.axes == {"indicator_polynomial": ["power"]}
    noted = profile.provenance["indicator"]
    assert noted["pairs"] == STEPS - 1
    assert noted["explained"] > 0.3
    (row,) = profile.arrays["indicator_polynomial"].values()
    curve = np.polyval(row, np.linspace(0, 2 * noted["largest_change"], 50))
    assert np.diff(curve).min() >= -1e-9
    assert curve[0] >= 0
    assert 0.05 < np.polyval(row, noted["largest_change"]) < 2
