"""Sentences 11 to 13 of the design: threads in short, few steps, and errors that help."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FLAT, SIGMAS, STEPS, Scripted, attach, drive, record_of
from test_rule_objects import FOREIGN
from torch import nn

import cachedit
from cachedit import FeatureStrategy, MagCache, Profile, ProfileError, UnsupportedModelError
from zoo.draw import settle
from zoo.models import CASES, count_blocks
from zoo.pipelines import PIPELINES, run
from zoo.plain import PlainDenoiser

PLAIN, FLUX = CASES["plain"], CASES["flux"]
GREEDY = MagCache(threshold=1.0, max_skip_steps=100, retention_ratio=0.0)  # reuses whatever it may

# -- 12: few steps, and what last_run says ------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [GREEDY, Scripted()], ids=["magcache", "scripted"])
@pytest.mark.parametrize(
    ("steps", "strip"),
    [(1, "■"), (2, "■■"), (4, "■■■■"), (5, "■□■□■"), (8, "■□■□■□■□"), (9, "■□□□□□□□□")],
)
def test_rule_12_few_steps_are_guarded(strategy: FeatureStrategy, steps: int, strip: str) -> None:
    built = PIPELINES["flux"]()
    cachedit.wrap(built.pipe, strategy, profile=FLAT if strategy is GREEDY else None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(built, steps=steps)
    assert record_of(built.pipe).strip() == strip
    cachedit.wrap(built.pipe, strategy, profile=FLAT if strategy is GREEDY else None, few_step_guard=False)
    run(built, steps=max(steps, 2))
    assert record_of(built.pipe).strip() == "■" + "□" * (max(steps, 2) - 1)


@pytest.mark.parametrize("steps", [4, 8, 10])
def test_rule_12_few_steps_are_guarded_where_their_number_is_unknown(steps: int) -> None:
    """The run may end at any step, so nothing is reused among the first 4, and no two in a row among the first 8."""
    model = cachedit.wrap(PLAIN.build(), Scripted(), blocks=["stages"])
    drive(model, PLAIN, [1 - i / steps for i in range(steps)])
    record = record_of(model)
    assert not set(record.reused_steps) & {0, 1, 2, 3}
    assert "□□" not in record.strip()[:8]


def test_rule_12_the_guard_names_itself() -> None:
    model = attach(PLAIN.build(), PLAIN, Scripted(), num_inference_steps=8)
    drive(model, PLAIN, [1 - i / 8 for i in range(8)])
    assert [step.reason for step in record_of(model).steps] == [
        "no residual yet", "", *["one reused step in a row up to 8 steps", ""] * 3
    ]  # fmt: skip


def test_rule_12_last_run_says_what_was_reused_and_why_not() -> None:
    model = attach(PLAIN.build(), PLAIN, MagCache(threshold=0.06), profile=Profile.from_ratios([1.0] * 9 + [2.0]))
    drive(model, PLAIN)
    record = record_of(model)
    assert [step.reason for step in record.steps] == [
        "no residual yet", "warm-up", "", "", "", "max_skip_steps reached", "", "", "", "max_skip_steps reached"
    ]  # fmt: skip
    assert (record.strip(), record.nfe) == ("■■□□□■□□□■", 4)
    for text in ("■■□□□■□□□■  4 of 10 computed", "warm-up x1", "max_skip_steps reached x2"):
        assert text in str(record)


@pytest.mark.parametrize("steps", [4, 10])
def test_rule_12_a_cache_that_never_fires_says_so_once(steps: int) -> None:
    built = PIPELINES["flux"]()
    cachedit.wrap(built.pipe, MagCache(threshold=0.0), profile=Profile.from_ratios([1.0] + [1.1] * 9))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            run(built, steps=steps)
    said = [str(w.message) for w in caught if "reused no step" in str(w.message)]
    assert len(said) == 1
    assert ("4 steps or fewer" if steps == 4 else "error reached the threshold") in said[0]
    assert record_of(built.pipe).nfe == steps


# -- 13: errors before the first step -----------------------------------------------------------------------------


def refused(
    error: type[Exception], *words: str, target: Any = None, strategy: Any = "magcache", **options: Any
) -> None:
    """Wrapping raises ``error``, whose message has every word, before any block runs."""
    target = FLUX.build() if target is None else target
    with pytest.raises(error) as caught:
        cachedit.wrap(target, strategy, **options)
    missing = [word for word in words if not re.search(re.escape(word), str(caught.value))]
    assert not missing, f"{missing} not in: {caught.value}"


def test_rule_13_unknown_models() -> None:
    refused(UnsupportedModelError, "Linear", "blocks=", target=nn.Linear(2, 2), profile=FLAT)
    refused(UnsupportedModelError, "str", "Allowed", "nn.Module", target="flux", profile=FLAT)
    refused(UnsupportedModelError, "PlainDenoiser", "stages", "blocks=", target=PLAIN.build(), profile=FLAT)
    refused(UnsupportedModelError, "nope", "stages", target=PLAIN.build(), profile=FLAT, blocks=["nope"])
    refused(UnsupportedModelError, "UNet", "skip connections", target=PIPELINES["sd"]().pipe, profile=FLAT)


def test_rule_13_a_model_without_a_timestep_names_what_it_has() -> None:
    class Timeless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = PLAIN.build().stages

        def forward(self, x: torch.Tensor, when: torch.Tensor) -> torch.Tensor:
            return x

    refused(UnsupportedModelError, "timestep", "x, when", "timestep_arg=", target=Timeless(), profile=FLAT,
            blocks=["stages"], num_inference_steps=STEPS)  # fmt: skip
    refused(UnsupportedModelError, "nope", "x, when", target=Timeless(), profile=FLAT, blocks=["stages"],
            timestep_arg="nope", num_inference_steps=STEPS)  # fmt: skip


def test_rule_13_a_model_that_indexes_its_blocks_is_refused_at_its_first_step() -> None:
    class Indexed(PlainDenoiser):
        def forward(self, x: torch.Tensor, t: torch.Tensor, control: Any = None) -> torch.Tensor:
            temb = self.time(torch.stack([torch.sin(3 * t), torch.cos(3 * t)], dim=-1))
            x = self.embed(x)
            for index in range(len(self.stages)):
                x = self.stages[index](x, temb, bias_index=index)
            return self.head(self.norm(x))

    model = attach(settle(Indexed()), PLAIN, Scripted())
    with pytest.raises(UnsupportedModelError, match=r"Indexed did not iterate.*stages.*blocks="):
        drive(model, PLAIN, SIGMAS[:1])


def test_rule_13_profiles(tmp_path: Path) -> None:
    refused(ProfileError, "FluxTransformer2DModel", "width 32", "flux-dev", "cachedit calibrate")
    refused(ProfileError, "foreign", "OtherModel", "FluxTransformer2DModel", "cachedit calibrate", profile=FOREIGN)
    refused(ProfileError, "flux-dev", "width is 32", "3072", "cachedit calibrate", profile="flux-dev")
    refused(ProfileError, "no-such.json", profile=tmp_path / "no-such.json")
    other = Profile(arrays={"other": {"cond": [1.0]}}, name="mine")
    refused(ProfileError, "mine", "magnitude_ratio", "other", "Calibrate", profile=other)
    damaged = tmp_path / "damaged.json"
    damaged.write_text('{"schema": 1, "arrays": {"magnitude_ratio": {"cond": [1, "two"]}}}')
    refused(ProfileError, "damaged.json", "arrays.magnitude_ratio.cond", profile=damaged)
    damaged.write_text('{"schema": 99, "arrays": {}}')
    refused(ProfileError, "schema", "99", "Upgrade", profile=str(damaged))


def test_rule_13_strategies() -> None:
    refused(ValueError, "magcash", "mag_cache", strategy="magcash", profile=FLAT)
    refused(TypeError, "int", "mag_cache", "an instance such as", strategy=3, profile=FLAT)
    refused(TypeError, "treshold", "threshold", "num_inference_steps", treshold=0.1, profile=FLAT)
    refused(TypeError, "treshold", "threshold", strategy=MagCache(), treshold=0.1, profile=FLAT)
    refused(TypeError, "Scripted", "profile", strategy=Scripted(), profile=FLAT)


IMPOSSIBLE: list[tuple[str, Any]] = [
    ("threshold", -0.1),
    ("threshold", float("nan")),
    ("threshold", "high"),
    ("max_skip_steps", -1),
    ("max_skip_steps", 2.5),
    ("retention_ratio", -0.1),
    ("retention_ratio", 1.5),
    ("retention_rounding", "up"),
    ("resample", "linear"),
    ("always_compute", 11),
    ("num_inference_steps", 0),
    ("num_inference_steps", 2.5),
    ("num_inference_steps", "ten"),
    ("num_inference_steps", True),
    ("timesteps", []),
    ("timesteps", [1.0, 0.5]),
    ("timesteps", "fast"),
    ("cache_dtype", "bf16"),
    ("cache_dtype", torch.int8),
    ("cache_device", "nowhere"),
    ("few_step_guard", "no"),
    ("blocks", []),
    ("blocks", ["transformer_blocks", "transformer_blocks"]),
    ("timestep_arg", "hidden"),
]


@pytest.mark.parametrize(("option", "value"), IMPOSSIBLE, ids=[f"{o}={v}" for o, v in IMPOSSIBLE])
def test_rule_13_an_impossible_option_names_itself_and_what_is_allowed(option: str, value: Any) -> None:
    options = {"profile": FLAT, "num_inference_steps": STEPS, option: value}
    with pytest.raises((TypeError, ValueError)) as caught:
        cachedit.wrap(FLUX.build(), "magcache", **options)
    assert option in str(caught.value)
    assert re.search("[Aa]llowed|has|Its lists", str(caught.value))


def test_rule_13_magcache_on_a_bare_module_needs_a_schedule() -> None:
    refused(ValueError, "MagCache", "FluxTransformer2DModel", "timesteps=", "num_inference_steps=", profile=FLAT)
    for announced in ({"timesteps": SIGMAS}, {"num_inference_steps": STEPS}, {"timesteps": torch.tensor(SIGMAS)}):
        model = attach(FLUX.build(), FLUX, **announced)
        drive(model, FLUX)
        assert record_of(model).strip() == "■■□□□■□□□■"


def test_rule_13_a_timestep_outside_the_announced_schedule_is_an_error_before_any_block() -> None:
    model = attach(PLAIN.build(), PLAIN, timesteps=SIGMAS)
    drive(model, PLAIN, SIGMAS[:2])
    with (
        count_blocks(model, PLAIN) as count,
        pytest.raises(ValueError, match=r"0\.77.*10 steps, 1 to 0\.1.*timesteps="),
    ):
        drive(model, PLAIN, [0.77])
    assert count.total == 0


def test_rule_13_more_steps_than_announced_is_an_error() -> None:
    model = attach(PLAIN.build(), PLAIN, num_inference_steps=5)
    drive(model, PLAIN, SIGMAS[:5])
    with count_blocks(model, PLAIN) as count, pytest.raises(ValueError, match=r"5 steps.*num_inference_steps="):
        drive(model, PLAIN, SIGMAS[5:6])
    assert count.total == 0


def test_rule_13_a_call_without_its_timestep_is_an_error() -> None:
    model = attach(FLUX.build(), FLUX)
    with torch.no_grad(), pytest.raises(UnsupportedModelError, match=r"timestep.*timestep_arg="):
        model(**FLUX.inputs(0, 1))


def test_rule_13_errors_do_not_break_the_next_run() -> None:
    expected = drive(attach(PLAIN.build(), PLAIN, timesteps=SIGMAS), PLAIN)
    model = attach(PLAIN.build(), PLAIN, timesteps=SIGMAS)
    for sigmas in (SIGMAS[:3], [0.77]):
        try:
            drive(model, PLAIN, sigmas)
        except ValueError:
            assert sigmas == [0.77]
    assert [torch.equal(a, b) for a, b in zip(drive(model, PLAIN), expected, strict=True)] == [True] * STEPS
