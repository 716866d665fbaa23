"""What signal-driven policies listen to: the numbers, whose they are, and what a denoiser runs to get them."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from conftest import SIGMAS, STEPS, Scripted, attach, blocks_option, drive, equal_steps, record_of
from diffusers import ContextParallelConfig, ParallelConfig
from test_threads_ranks import ranks
from torch import nn
from torch.overrides import TorchFunctionMode

from cachedit import Context, FeatureStrategy, UnsupportedModelError
from cachedit.feature.blocks import Tap
from cachedit.feature.place import Forecast
from cachedit.feature.ranks import shared_group
from cachedit.feature.signals import Listener, Signal
from cachedit.strategy import Output, Schedule, Site, Stack
from zoo.models import CASES, Case, count_blocks

INF = math.inf
TEXTS = ("encoder_hidden_states", "pooled_projections")


@dataclass(frozen=True)
class Placed(Scripted, abstract=True):
    """Computes the listed steps."""

    where: Site = Stack(1)

    site: ClassVar[Any] = property(lambda self: self.where)


@dataclass(frozen=True)
class Heard(Placed, abstract=True):
    """Computes the listed steps and listens all the same."""

    kind: str = "first_blocks"

    signal: ClassVar[Any] = property(lambda self: self.kind)


@dataclass(frozen=True)
class Budget(FeatureStrategy, abstract=True):
    """Computes a step when the signals since the last computed one add up to the threshold."""

    kind: str = "first_blocks"
    threshold: float = 1.0
    where: Site = Stack(1)

    signal: ClassVar[Any] = property(lambda self: self.kind)
    site: ClassVar[Any] = property(lambda self: self.where)

    def should_compute(self, ctx: Context) -> bool | str:
        return "loud" if sum(ctx.signals) >= self.threshold else False


def tokens(*rows: Sequence[float]) -> torch.Tensor:
    """[B, N, 1]."""
    return torch.tensor(rows)[..., None]


def heard(kind: str, features: Sequence[tuple[Any, Any]], computed: Sequence[int]) -> list[float | None]:
    """What is heard when the listed steps are computed."""
    listener = Listener(Heard(kind=kind))
    values = []
    for step, (entered, left) in enumerate(features):
        values.append(listener.hear(entered, left))
        listener.settle(step, step in computed)
    return values


# -- the numbers --------------------------------------------------------------------------------------------------


def test_modulated_input_is_compared_with_the_step_before_whatever_was_computed() -> None:
    states = [tokens([1.0, 1.0]), tokens([2.0, 2.0]), tokens([2.0, 3.0]), tokens([2.0, 3.0])]
    for computed in ([0], [0, 1, 2, 3]):
        assert heard("modulated_input", [(None, x) for x in states], computed) == [None, 1.0, 0.25, 0.0]


def test_first_blocks_compare_their_residual_with_that_of_the_last_computed_step() -> None:
    entered = [tokens([5.0, -5.0]), tokens([7.0, 7.0]), tokens([0.0, 0.0]), tokens([1.0, 1.0]), tokens([9.0, 9.0])]
    added = [tokens([2.0, 2.0]), tokens([3.0, 3.0]), tokens([4.0, 2.0]), tokens([4.0, 4.0]), tokens([4.0, 0.0])]
    features = [(x, x + d) for x, d in zip(entered, added, strict=True)]
    assert heard("first_blocks", features, [0]) == [None, 0.5, 0.5, 1.0, 1.0]
    assert heard("first_blocks", features, [0, 3]) == [None, 0.5, 0.5, 1.0, 0.5]


def test_probe_gap_is_the_difference_of_the_two_changes_in_one_step() -> None:
    # entered: 1, 2, 2 (changes 1, 0); left: 2, 3, 6 (changes 0.5, 1)
    features = [(tokens([x]), tokens([y])) for x, y in ((1.0, 2.0), (2.0, 3.0), (2.0, 6.0))]
    assert heard("probe_gap", features, [0]) == [None, 0.5, 1.0]


def test_probe_gap_tells_how_far_the_probe_has_gone_past_the_two_last_computed_steps() -> None:
    listener = Listener(Heard(kind="probe_gap"))
    wanted = [1.0, 1.0, 1.0, 1.5, 3.0, 2.0]  # 1 until two steps are computed; then p = 3, 4, 7 against 1 and 3; last 5
    for step, added in enumerate([1.0, 2.0, 3.0, 4.0, 7.0, 5.0]):
        listener.hear(tokens([1.0]), tokens([1.0 + added]))
        assert listener.trends() == [wanted[step]]
        listener.settle(step, step in (0, 2))


def test_the_trend_of_a_signal_without_a_probe_is_a_single_one() -> None:
    listener = Listener(Heard(kind="first_blocks"))
    listener.hear(tokens([1.0], [2.0]), tokens([3.0], [5.0]))
    assert listener.trends() == [1.0]


def test_the_trend_of_a_probe_that_stood_still_is_one() -> None:
    listener = Listener(Heard(kind="probe_gap"))
    for step, added in enumerate([1.0, 1.0, 5.0]):
        listener.hear(tokens([1.0]), tokens([1.0 + added]))
        listener.settle(step, step < 2)
    assert listener.trends() == [1.0]


def test_output_change_takes_its_rate_between_the_two_last_computed_steps() -> None:
    latents, outputs = [8.0, 6.0, 5.0, 3.0, 2.0, 0.5], [1.0, 5.0, None, None, 8.0, None]
    # Steps 0, 1, 4 are computed. Rate 4 / 2 at step 1; |8 - 5| / |2 - 6| at step 4.
    wanted = [None, None, 2.0 * 1.0 / 5.0, 2.0 * 2.0 / 5.0, 2.0 * 1.0 / 5.0, 0.75 * 1.5 / 8.0]
    listener = Listener(Heard(kind="output_change"))
    for step, (x, v) in enumerate(zip(latents, outputs, strict=True)):
        assert listener.hear(torch.tensor([[x]]), None) == pytest.approx(wanted[step])
        listener.settle(step, v is not None)
        listener.signal.observe(torch.tensor([[99.0 if v is None else v]]))


# -- numbers that cannot be trusted -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["modulated_input", "first_blocks", "probe_gap"])
@pytest.mark.parametrize("after", [0.0, 1.0, math.nan, INF])
def test_nothing_follows_from_a_division_by_zero_or_from_what_is_not_finite(kind: str, after: float) -> None:
    before = 0.0 if after in (0.0, 1.0) else 1.0
    listener = Listener(Budget(kind=kind, threshold=INF))  # of itself it would never compute
    entered = tokens([before, before])
    listener.hear(entered, entered + before)
    listener.settle(0, True)
    assert listener.hear(tokens([after, after]), tokens([2 * after, 2 * after])) is None
    assert listener.should_compute(Context(step=1, computed_steps=[0])) == "nothing finite to compare with"


@pytest.mark.parametrize("latents", [(1.0, 1.0, 1.0), (1.0, 2.0, math.nan)], ids=["no rate", "not a number"])
def test_a_latent_that_stood_still_or_broke_foretells_nothing(latents: tuple[float, ...]) -> None:
    listener = Listener(Budget(kind="output_change", threshold=INF))
    for step, x in enumerate(latents):
        value = listener.hear(torch.tensor([[x]]), None)
        assert value is None
        assert listener.should_compute(Context(step=step, computed_steps=[*range(step)]))
        listener.settle(step, True)
        listener.signal.observe(torch.tensor([[1.0 + step]]))


def test_what_a_strategy_makes_of_a_number_that_is_not_one_does_not_matter() -> None:
    @dataclass(frozen=True)
    class Careless(Budget, abstract=True):
        def should_compute(self, ctx: Context) -> bool:
            return sum(ctx.signals) - INF > 1  # never true

    listener = Listener(Careless())
    listener.hear(tokens([1.0]), tokens([2.0]))
    listener.settle(0, True)
    for left, wanted in ((3.0, False), (math.nan, "nothing finite to compare with")):
        listener.hear(tokens([1.0]), tokens([left]))
        assert listener.should_compute(Context(step=1, computed_steps=[0])) == wanted


def test_a_signal_of_another_branch_is_not_compared() -> None:
    listener = Listener(Budget(threshold=INF))
    values = [listener.hear(tokens([1.0]), tokens([2.0]), branch=branch) for branch in ("cond", "uncond", "uncond")]
    assert values == [None, None, None]  # never settled
    listener.settle(0, True)
    assert listener.hear(tokens([1.0]), tokens([2.0]), branch="uncond") == 0.0
    assert listener.hear(tokens([1.0]), tokens([2.0]), branch="cond") is None


def test_streams_that_are_joined_inside_the_probe_are_refused_in_words() -> None:
    with pytest.raises(UnsupportedModelError, match=r"take \[1, 2, 1\] and return \[1, 3, 1\].*choose fewer"):
        Listener(Heard()).hear(tokens([1.0, 1.0]), tokens([1.0, 1.0, 1.0]))


def test_what_is_written_into_the_features_later_does_not_matter() -> None:
    for kind in ("modulated_input", "first_blocks", "probe_gap", "output_change"):
        values = []
        for spoil in (False, True):
            listener = Listener(Heard(kind=kind))
            values.append([])
            for step in range(4):
                entered, left = tokens([1.0 + step, 2.0]), tokens([3.0, 5.0 * (step + 1)])
                values[-1].append(listener.hear(entered, left))
                listener.settle(step, True)
                listener.signal.observe(left)
                if spoil:
                    entered.fill_(7.0)
                    left.fill_(7.0)
        assert values[0] == values[1]
        assert values[0][-1] is not None


# -- a batch ------------------------------------------------------------------------------------------------------


def decisions(listener: Listener, rows: list[Any], most_reused: int | None = None) -> list[int]:
    """Steps that are computed; step 0 always. ``rows``: (entered, left, output, samples) of every step."""
    computed: list[int] = []
    for step, (entered, left, output, samples) in enumerate(rows):
        listener.hear(entered, left, samples)
        context = Context(step=step, schedule=Schedule(len(rows)), computed_steps=computed)
        compute = not computed or bool(listener.should_compute(context, most_reused))
        listener.settle(step, compute)
        if compute:
            computed.append(step)
        listener.signal.observe(output)
    return computed


def drawn(seed: int, samples: int, steps: int = 20) -> list[list[tuple[torch.Tensor, ...]]]:
    """Per sample and step (entered, left, output) [1, 6, 2] that walk at random, some fast and some slowly."""
    generator = torch.Generator().manual_seed(seed)

    def walk(speed: float) -> torch.Tensor:
        return 1 + speed * torch.randn(steps, 1, 6, 2, generator=generator).cumsum(0)

    draw = random.Random(seed)
    speeds = [draw.choice([0.02, 0.1, 0.3]) for _ in range(samples)]
    entered = [walk(speed) for speed in speeds]
    return [list(zip(x, x + walk(speed), walk(speed), strict=True)) for x, speed in zip(entered, speeds, strict=True)]


@pytest.mark.parametrize(
    ("kind", "form"),
    [*((kind, form) for kind in sorted(Signal.kinds) for form in ("tensor", "folded")), ("output_change", "list")],
)
@pytest.mark.parametrize("most_reused", [None, 1])
def test_rule_4_a_batch_computes_exactly_the_steps_that_its_samples_would_alone(
    kind: str, most_reused: int | None, form: str
) -> None:
    """``folded`` has 3 frames in the batch dimension, ``list`` a tensor per sample, each of another size."""
    threshold = 0.4 if most_reused is None else 0.05 if kind == "probe_gap" else 0.15
    strategy = Budget(kind=kind, threshold=threshold)

    def one(features: Sequence[torch.Tensor], samples: int) -> Any:
        if form == "list":
            return [x[0, : 6 - i] for i, x in enumerate(features)]
        joined = torch.cat(tuple(features))
        return joined.reshape(3 * samples, 2, 2) if form == "folded" else joined

    different = reused = 0
    for seed in range(8):
        samples = drawn(seed, 3)
        alone = []
        for i, sample in enumerate(samples):
            rows = [[[x[0, : 6 - i]] if form == "list" else one([x], 1) for x in step] + [1] for step in sample]
            alone.append(set(decisions(Listener(strategy), rows, most_reused)))
        rows = [[*(one([s[step][k] for s in samples], 3) for k in range(3)), 3] for step in range(20)]
        together = decisions(Listener(strategy), rows, most_reused)
        assert together == sorted(set.union(*alone))
        different += len({tuple(sorted(steps)) for steps in alone}) > 1
        reused += 20 - len(together)
    assert different > 2
    assert reused > 2


def test_rule_4_holds_in_a_model() -> None:
    """Sample 0 rests, sample 1 moves: on prescribed inputs the batch computes what either would alone."""
    case = CASES["flux"]
    inputs = [case.inputs(seed, 1) for seed in (0, 1)]
    moves = [[1.0] * STEPS, [1.0, 1.0, 1.6, 1.6, 1.6, 1.0, 1.6, 1.6, 1.6, 1.6]]

    def computed(rows: Sequence[int]) -> list[int]:
        model = attach(case.build(), case, Budget(threshold=1.2))
        for i, sigma in enumerate(SIGMAS):
            latents = torch.cat([moves[row][i] * inputs[row]["hidden_states"] for row in rows])
            others = {key: torch.cat([inputs[row][key] for row in rows]) for key in TEXTS}
            case.call(model, sigma, batch=len(rows), hidden_states=latents, **others)
        return record_of(model).computed_steps

    still, moving, both = computed([0]), computed([1]), computed([0, 1])
    assert both == sorted({*still, *moving})
    assert set(still) - set(moving)
    assert set(moving) - set(still)
    assert len(both) < STEPS


# -- cost ---------------------------------------------------------------------------------------------------------


class Syncs(TorchFunctionMode):
    """Counts what makes the host wait for the device."""

    WAITS = ("tolist", "item", "__float__", "__bool__", "__int__", "__index__", "nonzero", "cpu", "numpy", "equal")
    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") in self.WAITS
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", sorted(Signal.kinds))
def test_the_host_waits_once_per_measured_step(kind: str) -> None:
    listener, rows = Listener(Budget(kind=kind, threshold=0.4)), drawn(3, 2)
    for step in range(12):
        entered, left, output = (torch.cat([rows[i][step][k] for i in range(2)]) for k in range(3))
        with Syncs() as hearing:
            listener.hear(entered, left)
        with Syncs() as deciding:
            compute = listener.should_compute(Context(step=step, computed_steps=[0]))
            listener.settle(step, bool(compute) or step == 0)
            listener.signal.observe(output)
            listener.trends()
        assert (hearing.count, deciding.count) == (1, 0)


def test_features_are_kept_in_their_own_dtype_and_dropped_on_request() -> None:
    listener = Listener(Heard(kind="probe_gap"))
    assert listener.nbytes == 0
    features = torch.ones(2, 4, 8, dtype=torch.bfloat16)
    for step in range(3):
        listener.hear(features, 2 * features)
        listener.settle(step, True)
    # what entered, what left, and the residuals of this step and of the one computed before it
    assert listener.nbytes == 4 * 2 * 4 * 8 * 2
    listener.release()
    assert listener.nbytes == 0


def test_bf16_is_averaged_in_fp32() -> None:
    x = torch.ones(1, 4096, 1, dtype=torch.bfloat16)
    y = x.clone()
    y[0, :1001] = 2.0
    assert heard("modulated_input", [(None, x), (None, y)], [0]) == [None, 1001 / 4096]  # not a bf16 number


# -- what a denoiser runs -----------------------------------------------------------------------------------------


@contextmanager
def count_calls(root: nn.Module) -> Iterator[dict[str, int]]:
    """How often the forward of every module below ``root`` ran."""
    counts = {name: 0 for name, _ in root.named_modules() if name}

    def counter(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            counts[name] += 1

        return hook

    handles = [module.register_forward_hook(counter(name)) for name, module in root.named_modules() if name]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def test_nothing_of_the_first_block_runs_after_the_decision() -> None:
    case = CASES["flux"]
    model = attach(case.build(), case, Heard(compute=(0, 4), kind="modulated_input", where=Stack()))
    runs = []
    for sigma in SIGMAS[:6]:
        with count_calls(model.transformer_blocks[0]) as counts, count_blocks(model, case) as blocks:
            drive(model, case, [sigma])
        runs.append((counts["norm1"], counts["attn"], counts["attn.to_q"], counts["ff"], blocks.per_block[1:]))
    computed, reused = (1, 1, 1, 1, [1] * 4), (1, 0, 0, 0, [0] * 4)
    assert runs == [computed, reused, reused, reused, computed, reused]


@pytest.mark.parametrize(("name", "front"), [("flux", 1), ("flux", 2), ("latte", 1), ("plain", 1), ("plain", 3)])
def test_the_probe_runs_at_every_step_and_the_others_at_computed_ones(name: str, front: int) -> None:
    case = CASES[name]
    model = attach(case.build(), case, Heard(compute=(0, 3), where=Stack(front)))
    runs = []
    for sigma in SIGMAS[:5]:
        with count_blocks(model, case) as count:
            drive(model, case, [sigma])
        runs.append(count.per_block)
    rest = len(runs[0]) - front
    assert runs == [[1] * (front + rest) if i in (0, 3) else [1] * front + [0] * rest for i in range(5)]


PROBES = {"attention": Stack(), "blocks": Stack(1)}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("where", PROBES)
def test_a_pass_decided_under_way_is_bit_equal_or_exact_on_unchanged_inputs(case: Case, where: str) -> None:
    model, asked = case.build(), []
    plain = case.call(model)
    blocks, sites = blocks_option(case).get("blocks"), [PROBES[where]]
    if (case.name, where) == ("plain", "attention"):
        with pytest.raises(UnsupportedModelError, match="no attention whose input could be listened to"):
            Tap(model, blocks, sites, where)
        return
    tap = Tap(model, blocks, sites, where)
    tap.attach()
    (place,) = tap.places

    def ask(entered: Any, left: torch.Tensor) -> bool:
        asked.append(left)
        place.begin(len(asked) > 1, forecast)
        return len(asked) > 1

    forecast = None
    tap.begin(False, ask)
    assert torch.equal(case.call(model), plain)
    residual = place.captured()
    assert residual is not None
    place.release()
    place.begin(False, None)
    forecast = Forecast([residual])
    tap.begin(False, ask)
    reused = case.call(model)
    tap.end()
    tap.detach()
    assert len(asked) == 2  # once per pass
    assert torch.equal(*asked)
    assert float((reused - plain).abs().max() / plain.abs().max()) < 1e-6


# -- in a run -----------------------------------------------------------------------------------------------------


def test_branches_follow_the_first_of_them() -> None:
    """The second branch jumps about, and changes nothing: the strip is that of the first branch alone."""
    case = CASES["plain"]

    def run(branches: Sequence[int]) -> Any:
        model = attach(case.build(), case, Budget(threshold=0.9))
        for i, sigma in enumerate(SIGMAS):
            for branch in branches:
                case.call(model, sigma, x=case.inputs(branch, 1)["x"] * (1 + 3 * branch * (i % 2)))
        return record_of(model)

    both, first, second = run([0, 1]), run([0]), run([1])
    assert both.strip() == first.strip()
    assert second.strip() != first.strip()
    assert "□" in first.strip()
    assert [step.computed for step in both.steps[::2]] == [step.computed for step in both.steps[1::2]]
    assert [step.signal for step in both.steps[::2]] == [step.signal for step in first.steps]
    assert {step.signal for step in both.steps[1::2]} == {None}


def test_the_record_tells_the_signal_and_stays_json() -> None:
    case = CASES["plain"]
    model = attach(case.build(), case, Budget(threshold=0.3))
    drive(model, case)
    record = record_of(model)
    assert record.steps[0].signal is None
    signals = [step.signal for step in record.steps[1:]]
    assert all(signal is not None and signal > 0 for signal in signals)
    assert {"loud"} == {step.reason for step in record.steps[1:] if step.computed}

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    read = json.loads(record.to_json(), parse_constant=refuse)
    assert [step["signal"] for step in read["steps"]] == [None, *signals]


@pytest.mark.parametrize("kind", sorted(Signal.kinds))
def test_runs_repeat_themselves_and_copies_are_independent(kind: str) -> None:
    case = CASES["flux"]
    where: Site = {"modulated_input": Stack(), "output_change": Output(residual=True)}.get(kind, Stack(1))
    model = attach(case.build(), case, Budget(kind=kind, threshold=0.2, where=where))

    def run(model: nn.Module) -> tuple[list[torch.Tensor], str]:
        noise = case.inputs(0, 1)["hidden_states"]
        outputs = [case.call(model, sigma, hidden_states=noise * (1 + sigma)) for sigma in SIGMAS]
        return outputs, record_of(model).strip()

    outputs, strip = run(model)
    assert "□" in strip
    assert "■" in strip[1:] or kind != "first_blocks"
    twin = copy.deepcopy(model)
    for again in (model, twin):
        repeated, same = run(again)
        assert same == strip
        assert equal_steps(repeated, outputs) == [*range(STEPS)]


def test_a_step_that_failed_is_computed_when_it_is_called_again() -> None:
    """It was heard, and taken as the one to compare with: it must not find itself unchanged."""
    case = CASES["flux"]
    for kind, where in (("first_blocks", Stack(1)), ("modulated_input", Stack()), ("probe_gap", Stack(1))):
        plain = case.build()
        model = attach(case.build(), case, Budget(kind=kind, threshold=0.2, where=where))
        noise = case.inputs(0, 1)["hidden_states"]
        case.call(model, 1.0, hidden_states=noise)

        def fail(*_: Any) -> None:
            raise MemoryError

        handle = model.proj_out.register_forward_pre_hook(fail)
        with pytest.raises(MemoryError):
            case.call(model, 0.9, hidden_states=3 * noise)
        handle.remove()
        output = case.call(model, 0.9, hidden_states=3 * noise)
        assert torch.equal(output, case.call(plain, 0.9, hidden_states=3 * noise))


@pytest.mark.parametrize("kind", sorted(Signal.kinds))
def test_what_the_signal_holds_is_counted_and_gone_after_the_last_step(kind: str) -> None:
    case = CASES["flux"]
    where: Site = {"modulated_input": Stack(), "output_change": Output(residual=True)}.get(kind, Stack(1))
    deaf, model = (
        attach(case.build(), case, Placed(where=where)),
        attach(case.build(), case, Heard(kind=kind, where=where)),
    )
    listener = model.__dict__["_cachedit"].plan.listener
    drive(model, case, SIGMAS[:-1])
    assert listener.nbytes > 0
    drive(model, case, SIGMAS[-1:])
    assert listener.nbytes == 0
    drive(deaf, case)
    assert record_of(model).cache_bytes_peak > record_of(deaf).cache_bytes_peak > 0


def test_a_replaced_first_block_is_listened_to() -> None:
    case = CASES["flux"]
    model = attach(case.build(), case, Heard(compute=(0, 4), kind="modulated_input", where=Stack()))
    drive(model, case)
    model.transformer_blocks[0] = copy.deepcopy(model.transformer_blocks[0])
    drive(model, case)
    assert record_of(model).strip() == "■□□□■□□□□□"
    assert all(step.signal is not None for step in record_of(model).steps[1:])


def test_a_wrap_that_fails_for_want_of_an_attention_leaves_the_old_one() -> None:
    case = CASES["plain"]
    model = attach(case.build(), case, Scripted(compute=(0, 5)))
    with pytest.raises(UnsupportedModelError, match="Stage has no attention"):
        attach(model, case, Heard(kind="modulated_input", where=Stack()))
    drive(model, case)
    assert record_of(model).strip() == "■□□□□■□□□□"


def test_the_guard_of_short_runs_counts_for_every_sample() -> None:
    """Sample 0 rests, sample 1 makes the batch compute step 1; alone, sample 0 is computed at step 2."""
    case = CASES["plain"]
    still, moved = case.inputs(0, 1)["x"], -case.inputs(5, 1)["x"]
    for batch, wanted in ((1, [0, 2]), (2, [0, 1, 2])):
        model = attach(case.build(), case, Budget(threshold=1.0), num_inference_steps=8)
        for i in range(3):
            rows = [still, moved if i else still][:batch]
            case.call(model, 1 - i / 8, batch=batch, x=torch.cat(rows))
        assert record_of(model).computed_steps == wanted


def test_a_block_compiled_by_itself_may_be_left_in_its_middle() -> None:
    case = CASES["flux"]
    model = attach(case.build(), case, Heard(compute=(0, 4), kind="modulated_input", where=Stack()))
    expected = drive(model, case)
    model.compile_repeated_blocks(backend="eager", fullgraph=True)
    for ours, theirs in zip(drive(model, case), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert record_of(model).strip() == "■□□□■□□□□□"


# -- ranks --------------------------------------------------------------------------------------------------------

RANK = """
import json
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import cachedit
from cachedit import FeatureStrategy
from cachedit.feature.ranks import shared_group
from cachedit.strategy import Stack

class Threshold(FeatureStrategy, abstract=True):
    signal = "first_blocks"
    site = Stack(1)

    def should_compute(self, ctx):
        return ctx.signals[-1] > 0.5

class Block(nn.Module):
    def forward(self, x, t):
        return x + x * x

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x, timestep):
        for block in self.blocks:
            x = block(x, timestep)
        return x

def strip(model, rank, group):
    times = [1 - i / 10 for i in range(10)]
    cachedit.wrap(model, Threshold(), timesteps=times, process_group=group)
    with torch.no_grad():
        for i, time in enumerate(times):  # rank 0 rests, rank 1 moves
            model(torch.full((1, 4, 8), 1 + 0.1 * rank * i), time)
    return cachedit.last_run(model).strip()

def main(rank, world, address):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    alone, together = strip(Model().eval(), rank, None), strip(Model().eval(), rank, dist.group.WORLD)
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("ring", "ulysses"))["ring", "ulysses"]._flatten()
    model = Model().eval()  # as diffusers' enable_parallelism leaves it
    context = SimpleNamespace(_flattened_mesh=mesh)
    model.__dict__["_parallel_config"] = SimpleNamespace(context_parallel_config=context)
    found = dist.get_process_group_ranks(shared_group(model))
    detected = strip(model, rank, None)
    dist.barrier()
    dist.destroy_process_group()
    return {"alone": alone, "together": together, "detected": detected, "found": found}

if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))
"""


def test_ranks_of_one_process_group_decide_alike(tmp_path: Path) -> None:
    """Tokens differ between the ranks; without the group each decides for itself."""
    script = tmp_path / "rank.py"
    script.write_text(RANK, encoding="utf-8")
    resting, moving = ranks(script)
    assert resting["alone"] == "■□□□□□□□□□"
    assert moving["alone"] == "■□□■□□■□□□"  # the residual is x^2: 1.69 at step 3 and 2.56 at 6
    for kind in ("together", "detected"):
        assert resting[kind] == moving[kind] == moving["alone"]
    assert resting["found"] == moving["found"] == [0, 1]


def test_a_model_on_one_rank_shares_no_group() -> None:
    model = CASES["flux"].build()
    assert model._parallel_config is None  # diffusers' attribute
    assert shared_group(model) is None
    assert shared_group(nn.Linear(1, 1)) is None
    for parallel in (SimpleNamespace(), SimpleNamespace(context_parallel_config=SimpleNamespace(_flattened_mesh=None))):
        model.__dict__["_parallel_config"] = parallel
        assert shared_group(model) is None


def test_diffusers_still_calls_its_private_attributes_so() -> None:
    assert ParallelConfig().context_parallel_config is None
    assert ContextParallelConfig(ulysses_degree=2)._flattened_mesh is None
