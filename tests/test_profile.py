"""Profiles: what is written is read again, what is damaged is named, and the right one is found for a model."""

from __future__ import annotations

import copy
import json
import os
import random
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxTransformer2DModel, WanTransformer3DModel
from torch import nn
from trials.profile_files import TINY as WHOLE

import cachedit
from cachedit import Profile, ProfileError, Schedule
from cachedit import profile as profiles
from cachedit.feature.families import find_stack
from cachedit.shipped import MAGNITUDE, fingerprint, resolve, shipped
from cachedit.strategies.auto import Auto
from cachedit.strategy import Strategy
from cachedit.text.probe import AGREEMENT

# -- files --------------------------------------------------------------------------------------------------------


def test_what_is_saved_is_loaded_again(tmp_path: Path) -> None:
    profile = Profile.from_json(json.dumps(WHOLE))
    profile.save(tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text()) == WHOLE
    assert Profile.load(tmp_path / "a.json") == profile
    assert Profile.load(str(tmp_path / "a.json")).branches == ["cond", "uncond"]


@pytest.mark.parametrize("broken", ["replace", "write", "contents"])
def test_a_failing_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    path = tmp_path / "a.json"
    profile = Profile.from_json(json.dumps(WHOLE))
    profile.save(path)
    before = path.read_bytes()
    profile.name = "changed"

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError("disk full")

    if broken == "replace":
        monkeypatch.setattr(os, "replace", fail)
    elif broken == "write":
        monkeypatch.setattr(os, "fdopen", fail)
    else:
        monkeypatch.setattr(Profile, "to_json", fail)
    with pytest.raises(OSError, match="disk full"):
        profile.save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_saved_profile_can_be_read_by_whom_the_umask_lets(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    Profile.from_ratios([1.0]).save(tmp_path / "a.json")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "a.json")]
    assert modes[0] == modes[1]


@pytest.mark.parametrize("name", sorted(shipped()))
def test_every_shipped_profile_is_whole(name: str, tmp_path: Path) -> None:
    profile = shipped()[name]
    assert profile.model is not None
    profile.save(tmp_path / "copy.json")
    assert Profile.load(tmp_path / "copy.json") == profile
    if profile.sigmas is None:  # of a probe: what is recommended is known, and did best
        best = Strategy.find(profile.strategy, profile.defaults)
        assert profile.arrays["agreement"][str(best)][0] >= AGREEMENT
        assert profile.provenance["prompts"]
        return
    assert profile.sampler["num_inference_steps"] == len(profile.sigmas)
    assert profile.provenance
    schedule = Schedule(len(profile.sigmas), sigmas=tuple(profile.sigmas))
    if profile.strategy == "auto":
        assert len(Auto(max_nfe=12).configured(profile).plan(schedule, profile).computed) == 12
    else:
        configured = cachedit.MagCache().configured(profile)  # its defaults are allowed options
        assert configured.threshold == profile.defaults["threshold"]
    rows = profile.arrays["magnitude_ratio"]
    assert profile.magnitude_ratios(schedule) == {branch: tuple(row) for branch, row in rows.items()}


# -- damage -------------------------------------------------------------------------------------------------------


def damaged(path: str, value: Any) -> str:
    """The whole profile with the value at the dotted path replaced, or removed where it is ``...``."""
    data = copy.deepcopy(WHOLE)
    *parents, last = path.split(".")
    node = data
    for key in parents:
        node = node[key]
    if value is ...:
        del node[last]
    else:
        node[last] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("schema", ..., "schema"),
        ("schema", 2, "schema"),
        ("schema", "1", "schema"),
        ("schema", None, "schema"),
        ("name", 7, "name"),
        ("arrays", ..., "arrays"),
        ("arrays", [], "arrays"),
        ("arrays", {}, "arrays"),
        ("arrays.magnitude_ratio", [1.0], "arrays.magnitude_ratio"),
        ("arrays.magnitude_ratio", {}, "arrays.magnitude_ratio"),
        ("arrays.magnitude_ratio.cond", [], "arrays.magnitude_ratio.cond"),
        ("arrays.magnitude_ratio.cond", "1 1 1", "arrays.magnitude_ratio.cond"),
        ("arrays.magnitude_ratio.cond", [1.0, "0.9", 0.8], "arrays.magnitude_ratio.cond"),
        ("arrays.magnitude_ratio.cond", [1.0, True, 0.8], "arrays.magnitude_ratio.cond"),
        ("arrays.magnitude_ratio.cond", [1.0, None, 0.8], "arrays.magnitude_ratio.cond"),
        ("arrays.magnitude_ratio.cond", [1.0, float("nan"), 0.8], "arrays.magnitude_ratio.cond"),
        ("arrays.magnitude_ratio.cond", [1.0, float("inf"), 0.8], "arrays.magnitude_ratio.cond"),
        ("arrays.magnitude_ratio.cond", [1.0, 10**400, 0.8], "arrays.magnitude_ratio.cond"),
        ("arrays.magnitude_ratio.cond", [1.0, 0.0, 0.8], "arrays.magnitude_ratio.cond"),
        ("arrays.magnitude_ratio.cond", [1.0, -0.9, 0.8], "arrays.magnitude_ratio.cond"),
        ("arrays.magnitude_ratio.uncond", [1.0, 0.9], "arrays.magnitude_ratio"),
        ("sigmas", [1.0, 0.5], "sigmas"),
        ("sigmas", [0.2, 0.6, 1.0], "sigmas"),
        ("sigmas", [1.0, float("nan"), 0.2], "sigmas"),
        ("sigmas", [1000.0, 600.0, 200.0], "sigmas"),
        ("sigmas", {"0": 1.0}, "sigmas"),
        ("sigmas", "", "sigmas"),
        ("model", "Tiny", "model.class"),
        ("model.class", ..., "model.class"),
        ("model.class", 5, "model.class"),
        ("model.fingerprint", [], "model.fingerprint"),
        ("model.names", "me/tiny", "model.names"),
        ("model.names", [5], "model.names"),
        ("sampler", None, "sampler"),
        ("defaults", [], "defaults"),
        ("provenance", "here", "provenance"),
        ("versions", 2, "versions"),
        ("date", 20261130, "date"),
        ("command", ["cachedit"], "command"),
    ],
)
def test_a_damaged_field_is_named(tmp_path: Path, path: str, value: Any, field: str) -> None:
    (tmp_path / "bad.json").write_text(damaged(path, value))
    with pytest.raises(ProfileError, match=rf"bad\.json.*'{field}'"):
        Profile.load(tmp_path / "bad.json")


@pytest.mark.parametrize(
    "contents", [b"", b"[]", b"3", b"{}", b"not json", b'{"schema": 1', b"[" * 100_000, b'{"a": 1}', b"\xff\xfe\x00"]
)
def test_a_foreign_file_is_refused(tmp_path: Path, contents: bytes) -> None:
    (tmp_path / "bad.json").write_bytes(contents)
    with pytest.raises(ProfileError, match=r"bad\.json"):
        Profile.load(tmp_path / "bad.json")


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(ProfileError, match=f"cannot read profile {path}"):
            Profile.load(path)


def test_a_newer_schema_says_upgrade() -> None:
    with pytest.raises(ProfileError, match=r"'schema' is 2.*reads 1.*Upgrade cachedit"):
        Profile.from_json(damaged("schema", 2))


JUNK = [None, True, 0, -1, 1e308, 1e-308, 10**400, "", "x", "\x00", [], [[]], {}, {"a": {}}, [1.0], "NaN", float("nan")]


def mutated(draw: random.Random) -> str:
    """The whole profile with a few nodes replaced by junk, or a few characters changed, or both."""
    data = copy.deepcopy(WHOLE)
    for _ in range(draw.randrange(3)):
        node: Any = data
        while True:
            keys = list(node) if isinstance(node, dict) else range(len(node))
            key = draw.choice(list(keys))
            if not isinstance(node[key], (dict, list)) or not node[key] or draw.random() < 0.3:
                node[key] = draw.choice(JUNK)
                break
            node = node[key]
    text = list(json.dumps(data))
    for _ in range(draw.randrange(4)):
        place = draw.randrange(len(text))
        text[place : place + draw.randrange(3)] = draw.choice(["", '"', "]", "}", "9", "-", "e", ".", "\\", "\ud800"])
    return "".join(text)


def test_300_mutated_files_load_or_raise_a_profile_error(tmp_path: Path) -> None:
    path, loaded = tmp_path / "a.json", 0
    for seed in range(300):
        path.write_bytes(mutated(random.Random(seed)).encode("utf-8", "surrogatepass"))
        try:
            profile = Profile.load(path)
            profile.check_arrays(MAGNITUDE, "MagCache")
            profile.check_fits({"class": "Tiny", "blocks": {"blocks": 4}, "width": 32})
        except ProfileError:
            continue
        except Exception as error:  # pytest would not tell which file
            raise AssertionError(f"seed {seed}: {path.read_bytes()!r}") from error
        loaded += 1
        assert Profile.from_json(profile.to_json()) == profile, f"seed {seed}"
        ratios = profile.magnitude_ratios(Schedule(7, sigmas=tuple(np.linspace(1, 0.1, 7))))
        assert all(len(row) == 7 for row in ratios.values()), f"seed {seed}"
    assert 30 < loaded < 270


# -- which profile fits a model -----------------------------------------------------------------------------------


def stub(cls: str, lists: dict[str, int], heads: int, channels: int, **config: Any) -> nn.Module:
    """A module that looks like the denoiser of a published model: class name, config and number of blocks."""
    model = type(cls, (nn.Module,), {})()
    model.config = {"num_attention_heads": heads, "attention_head_dim": 128, "in_channels": channels, **config}
    for name, count in lists.items():
        setattr(model, name, nn.ModuleList(nn.Identity() for _ in range(count)))
    return model


def wan(blocks: int, heads: int, channels: int, out: int = 16) -> nn.Module:
    return stub("WanTransformer3DModel", {"blocks": blocks}, heads, channels, out_channels=out)


FLUX = stub(
    "FluxTransformer2DModel",
    {"transformer_blocks": 19, "single_transformer_blocks": 38},
    24,
    64,
    out_channels=None,
    guidance_embeds=True,
)
QWEN = stub("QwenImageTransformer2DModel", {"transformer_blocks": 60}, 24, 64, out_channels=16, guidance_embeds=False)
HUNYUAN = stub(
    "HunyuanVideoTransformer3DModel",
    {"transformer_blocks": 20, "single_transformer_blocks": 40},
    24,
    16,
    out_channels=16,
    guidance_embeds=True,
)


def match(model: nn.Module, name: str = "", experts: int = 1) -> Profile:
    return resolve(None, fingerprint(model, find_stack(model), experts), name)


@pytest.mark.parametrize(
    ("model", "name", "experts", "wanted"),
    [
        (FLUX, "black-forest-labs/FLUX.1-dev", 1, "flux-dev"),
        (FLUX, "/models/flux.1-DEV/", 1, "flux-dev"),
        (FLUX, "black-forest-labs/FLUX.1-Kontext-dev", 1, "flux-kontext"),
        (QWEN, "Qwen/Qwen-Image", 1, "qwen-image"),
        (QWEN, "Qwen/Qwen-Image-Edit", 1, "qwen-image-edit"),
        (HUNYUAN, "hunyuanvideo-community/HunyuanVideo", 1, "hunyuanvideo-720p"),
        (wan(30, 12, 16), "", 1, "wan2.1-t2v-1.3b"),
        (wan(40, 40, 16), "", 1, "wan2.1-t2v-14b"),
        (wan(40, 40, 36), "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers", 1, "wan2.1-i2v-480p-14b"),
        (wan(40, 40, 36), "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers", 1, "wan2.1-i2v-720p-14b"),
        (wan(40, 40, 16), "", 2, "wan2.2-t2v-a14b"),
        (wan(40, 40, 36), "", 2, "wan2.2-i2v-a14b"),
        (wan(30, 24, 48, 48), "", 1, "wan2.2-ti2v-5b"),
        # a fine-tune or a renamed folder: the fingerprint decides where it is the only one
        (wan(40, 40, 16), "/data/my-wan", 1, "wan2.1-t2v-14b"),
        # a misleading name never beats the fingerprint
        (wan(40, 40, 16), "Wan-AI/Wan2.1-T2V-14B-Diffusers", 2, "wan2.2-t2v-a14b"),
    ],
)
def test_the_right_profile_is_found(model: nn.Module, name: str, experts: int, wanted: str) -> None:
    assert match(model, name, experts).name == wanted


def test_every_shipped_profile_of_the_library_can_be_found() -> None:
    reachable = {profile.name for profile in shipped().values() if profile.model and profile.model["names"]}
    assert reachable >= {"flux-dev", "flux-kontext", "qwen-image", "qwen-image-edit", "wan2.1-t2v-1.3b"}


@pytest.mark.parametrize("name", ["", "me/my-flux", "black-forest-labs/FLUX.1-schnell"])
def test_an_ambiguous_model_names_the_candidates(name: str) -> None:
    with pytest.raises(ProfileError, match=r"2 shipped profiles fit.*profile='flux-dev' or 'flux-kontext'"):
        match(FLUX, name)


def test_real_models_have_the_fingerprints_of_their_stubs() -> None:
    with torch.device("meta"):
        flux, video = (
            FluxTransformer2DModel(guidance_embeds=True),
            WanTransformer3DModel(num_attention_heads=12, num_layers=30),
        )
    assert fingerprint(flux, find_stack(flux)) == fingerprint(FLUX, find_stack(FLUX))
    assert match(flux, "black-forest-labs/FLUX.1-dev").name == "flux-dev"
    assert match(video).name == "wan2.1-t2v-1.3b"


def test_a_named_profile_of_another_model_is_refused() -> None:
    prints = fingerprint(wan(40, 40, 16), ["blocks"])
    with pytest.raises(ProfileError, match=r"wan2.2-t2v-a14b.*experts is 1, the profile's is 2.*cachedit calibrate"):
        resolve("wan2.2-t2v-a14b", prints, "")
    with pytest.raises(ProfileError, match=r"class is 'WanTransformer3DModel'"):
        resolve("FLUX_dev", prints, "")  # any spelling of a shipped name
    assert resolve("wan21-t2v-14b".replace("21", "2.1"), prints, "").name == "wan2.1-t2v-14b"


def test_an_unknown_model_is_told_what_there_is_and_what_to_do() -> None:
    with pytest.raises(ProfileError) as caught:
        match(wan(12, 12, 16), "me/small-wan")
    for part in ("WanTransformer3DModel", "width 1536", "cachedit calibrate", *shipped()):
        assert part in str(caught.value)


def test_a_profile_without_a_model_fits_every_model(tmp_path: Path) -> None:
    profile = Profile.from_ratios([1.0, 0.9])
    profile.save(tmp_path / "mine.json")
    prints = fingerprint(wan(12, 12, 16), ["blocks"])
    assert resolve(profile, prints, "") is profile
    assert resolve(tmp_path / "mine.json", prints, "") == profile
    with pytest.raises(ProfileError, match="cannot read profile nowhere.json"):
        resolve("nowhere.json", prints, "")


def test_missing_arrays_are_named() -> None:
    with pytest.raises(ProfileError, match=r"lacks drift, which Drifter reads; it holds magnitude_ratio"):
        Profile.from_ratios([1.0]).check_arrays({"drift": ("step",)}, "Drifter")


# -- other schedules ----------------------------------------------------------------------------------------------


def shifted(steps: int, shift: float = 3.0, start: int = 0) -> tuple[float, ...]:
    """Noise levels of a flow schedule, from its step ``start`` on."""
    grid = 1 - np.arange(start, steps) / steps
    return tuple((shift * grid / (1 + (shift - 1) * grid)).tolist())


def log_magnitude(sigma: Any) -> Any:
    """A smooth magnitude of the residual over the noise level; it falls faster towards the end of a run."""
    return 0.3 * np.log(0.05 + np.asarray(sigma)) + 0.5 * np.asarray(sigma)


def table(sigmas: tuple[float, ...]) -> list[float]:
    return [1.0, *np.exp(np.diff(log_magnitude(sigmas))).tolist()]


def on(sigmas: tuple[float, ...]) -> Schedule:
    return Schedule(len(sigmas), sigmas=sigmas)


FIFTY = Profile.from_ratios(table(shifted(50)), shifted(50))


def worst(ratios: tuple[float, ...], sigmas: tuple[float, ...]) -> float:
    """Largest relative error of the product over any stretch of the schedule."""
    total = np.cumsum(np.log(ratios)) - log_magnitude(sigmas)  # constant if all products are right
    return float(np.expm1(total.max() - total.min()))


def test_the_calibrated_schedule_is_read_bit_for_bit() -> None:
    nearly = tuple(sigma + 1e-3 for sigma in shifted(50))  # what rounding of timesteps does
    for schedule in (on(shifted(50)), on(nearly)):
        assert FIFTY.magnitude_ratios(schedule)["cond"] == tuple(table(shifted(50)))


@pytest.mark.parametrize(("steps", "tolerance"), [(25, 1e-4), (10, 1e-4), (28, 1e-2), (100, 1e-2)])
def test_other_numbers_of_steps_keep_every_product(steps: int, tolerance: float) -> None:
    inside = shifted(50)[-1]  # below the last calibrated level nothing was measured
    sigmas = tuple(sigma for sigma in shifted(steps) if sigma >= inside - 1e-9)
    assert worst(FIFTY.magnitude_ratios(on(sigmas))["cond"], sigmas) < tolerance


def test_the_index_rule_loses_a_third_of_the_signal() -> None:
    # 50 -> 25 steps: a step covers two calibrated ones, and the index rule reads one of them.
    true = np.array(table(shifted(25)))
    nearest, cumulative = [
        np.array(FIFTY.magnitude_ratios(on(shifted(25)), rule)["cond"])  # type: ignore[arg-type]
        for rule in ("nearest", "sigma")
    ]
    signal = np.abs(true - 1).mean()
    assert np.abs(nearest - true).mean() > signal / 3
    assert np.abs(cumulative - true).mean() < 1e-4 * signal


def test_the_index_rule_on_hand_counted_indices() -> None:
    profile = Profile.from_ratios([1.0, 2.0, 3.0, 4.0, 5.0])
    # round(k * 4 / 2) = 0 2 4; of 4 steps round(k * 4 / 3) = 0 1 3 4; a single step takes the last entry
    assert profile.magnitude_ratios(Schedule(3), "nearest")["cond"] == (1.0, 3.0, 5.0)
    assert profile.magnitude_ratios(Schedule(4), "nearest")["cond"] == (1.0, 2.0, 4.0, 5.0)
    assert profile.magnitude_ratios(Schedule(1), "nearest")["cond"] == (5.0,)


def test_a_table_without_sigmas_lies_over_the_position() -> None:
    profile = Profile.from_ratios([1.0, 2.0, 2.0, 2.0, 2.0])
    assert profile.magnitude_ratios(Schedule(5))["cond"] == (1.0, 2.0, 2.0, 2.0, 2.0)
    assert profile.magnitude_ratios(Schedule(3))["cond"] == pytest.approx((1.0, 4.0, 4.0))
    assert profile.magnitude_ratios(on((0.9, 0.8, 0.7)))["cond"] == pytest.approx((1.0, 4.0, 4.0))
    assert profile.magnitude_ratios(Schedule(1))["cond"] == (1.0,)


def test_branches_are_resampled_apart() -> None:
    profile = Profile.from_ratios({"cond": [1.0, 2.0, 2.0], "uncond": [1.0, 0.5, 0.5]})
    ratios = profile.magnitude_ratios(Schedule(2))
    assert {branch: pytest.approx(row) for branch, row in ratios.items()} == {"cond": (1.0, 4.0), "uncond": (1.0, 0.25)}


def test_image_to_image_reads_the_end_of_the_table() -> None:
    sigmas = shifted(50, start=25)
    ratios = FIFTY.magnitude_ratios(on(sigmas))["cond"]
    assert ratios[0] == 1.0
    assert ratios[1:] == pytest.approx(table(shifted(50))[26:], rel=1e-12)


def test_a_repeated_noise_level_changes_nothing() -> None:
    # Heun evaluates every level but the first twice.
    sigmas = (1.0, *(sigma for sigma in shifted(25)[1:] for _ in range(2)))
    ratios = FIFTY.magnitude_ratios(on(sigmas))["cond"]
    assert ratios[2::2] == (1.0,) * 24
    assert worst(ratios, sigmas) < 1e-4


def test_a_table_with_repeated_noise_levels() -> None:
    heun = Profile.from_ratios([1.0, 2.0, 1.5, 2.0, 1.5], [1.0, 0.5, 0.5, 0.1, 0.1])
    assert heun.magnitude_ratios(on((1.0, 0.5, 0.5, 0.1, 0.1)))["cond"] == (1.0, 2.0, 1.5, 2.0, 1.5)
    euler = heun.magnitude_ratios(on((1.0, 0.7, 0.3, 0.1)))["cond"]
    assert all(ratio >= 1 for ratio in euler)
    assert 4 <= np.prod(euler) <= 9.001  # 2 * 1.5 * 2 * 1.5, up to which of two equal levels is read at the end


def test_the_memo_returns_what_was_computed_first() -> None:
    assert FIFTY.magnitude_ratios(on(shifted(7))) is FIFTY.magnitude_ratios(on(shifted(7)))


def test_the_memo_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server sees ever new schedules; what is asked for after many others is made again."""
    monkeypatch.setattr(profiles, "REMEMBERED", 3)
    profile, made = Profile.from_ratios([1.0, 0.9]), []

    def asked(key: int) -> int:
        return profile.once(key, lambda: made.append(key) or key)

    assert [asked(key) for key in (0, 1, 2, 0, 1, 2, 3, 3, 0)] == [0, 1, 2, 0, 1, 2, 3, 3, 0]
    assert made == [0, 1, 2, 3, 0]
    assert profile.once("outer", lambda: asked(7) + asked(8) + asked(9)) == 24
    for key in range(100):
        asked(key)
        assert len(profile._memo) <= 3


def test_columns_of_a_table_are_no_branches() -> None:
    arrays = {"magnitude_ratio": {"cond": [1.0, 0.9]}, "frontier": {"nfe": [4.0]}, "time": {"reused": [0.1]}}
    profile = Profile(arrays, axes={"frontier": ["budget"], "time": ["value"]})
    assert profile.branches == ["cond"]
    assert json.loads(profile.to_json())["branches"] == ["cond"]
