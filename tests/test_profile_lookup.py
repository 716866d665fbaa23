"""Where a profile is found: what is asked for, then the user's folder, then what is shipped; and on the hub."""

from __future__ import annotations

import copy
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from torch import nn

import cachedit
from cachedit import Profile, ProfileError, user_profiles
from cachedit.shipped import find_profile, resolve, shipped

# Two shipped profiles have this fingerprint; their models are called FLUX.1-dev and FLUX.1-Kontext-dev.
FLUX: dict[str, Any] = {"class": "FluxTransformer2DModel", **shipped()["flux-dev"].model["fingerprint"]}  # type: ignore[index]
KONTEXT = "black-forest-labs/FLUX.1-Kontext-dev"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, still empty."""
    monkeypatch.setenv("CACHEDIT_HOME", str(tmp_path / "home"))
    place = tmp_path / "home" / "profiles"
    place.mkdir(parents=True)
    return place


def keep(path: Path, *names: str, second: float = 0.5, age: int = 0, **changes: Any) -> Profile:
    """Write a profile of a Flux model of these names, changed ``age`` seconds before the epoch's millionth."""
    profile = Profile.from_ratios([1.0, second])
    model = copy.deepcopy(shipped()["flux-dev"].model)
    assert model is not None
    profile.model = {**model, "names": list(names)}
    for field, value in changes.items():
        setattr(profile, field, value)
    profile.save(path)
    os.utime(path, (10**6 - age, 10**6 - age))
    return profile


# -- the folder ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("platform", "environment", "wanted"),
    [
        ("linux", {"CACHEDIT_HOME": "/data/cachedit", "XDG_CACHE_HOME": "/xdg"}, "/data/cachedit/profiles"),
        ("linux", {"CACHEDIT_HOME": "~/mine"}, "/home/me/mine/profiles"),
        ("linux", {"XDG_CACHE_HOME": "/xdg"}, "/xdg/cachedit/profiles"),
        ("linux", {"XDG_CACHE_HOME": ""}, "/home/me/.cache/cachedit/profiles"),
        ("linux", {}, "/home/me/.cache/cachedit/profiles"),
        ("darwin", {"XDG_CACHE_HOME": "/xdg"}, "/home/me/Library/Caches/cachedit/profiles"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/cachedit/profiles"),
        ("win32", {}, "/home/me/AppData/Local/cachedit/profiles"),
    ],
)
def test_the_folder(platform: str, environment: dict[str, str], wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CACHEDIT_HOME", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert user_profiles.folder() == Path(wanted)


def test_a_folder_that_is_not_there_holds_no_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHEDIT_HOME", str(tmp_path / "nowhere"))
    assert user_profiles.stored() == []
    assert resolve(None, FLUX, KONTEXT).name == "flux-kontext"


def test_new_changed_and_deleted_files_are_noticed_and_others_are_not_read_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    load = Profile.load.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(Profile, "load", classmethod(lambda cls, path: read.append(path.name) or load(cls, path)))
    keep(folder / "a.json")
    (folder / "a.json.part").write_text("what a calibration keeps to be resumed")
    for wanted in (["a.json"], []):
        assert [entry.name for entry in user_profiles.stored()] == ["a"]
        assert read == wanted
        read.clear()
    keep(folder / "b.json")
    assert [entry.name for entry in user_profiles.stored()] == ["a", "b"]
    assert read == ["b.json"]
    keep(folder / "a.json", second=0.25, age=-1)
    assert find_profile("a").arrays["magnitude_ratio"]["cond"] == [1.0, 0.25]
    assert read == ["b.json", "a.json"]
    (folder / "a.json").unlink()
    assert [entry.name for entry in user_profiles.stored()] == ["b"]


# -- by name ------------------------------------------------------------------------------------------------------


def test_a_file_comes_before_the_users_and_the_users_before_a_shipped_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_profile("flux-dev") == shipped()["flux-dev"]
    own = keep(folder / "flux-dev.json")
    assert find_profile("flux-dev") == find_profile("FLUX_dev") == own
    (tmp_path / "flux-dev").mkdir()  # a folder is no profile
    assert find_profile("flux-dev") == own
    (tmp_path / "flux-dev").rmdir()
    file = keep(tmp_path / "flux-dev", second=0.25)
    assert find_profile("flux-dev") == file
    assert find_profile(file) is file


def test_the_exact_spelling_comes_first(folder: Path) -> None:
    keep(folder / "my-flux.json", second=0.25)
    keep(folder / "my_flux.json", second=0.75)
    ratios = [find_profile(name).arrays["magnitude_ratio"]["cond"][1] for name in ("my-flux", "my_flux")]
    assert ratios == [0.25, 0.75]


def test_an_unknown_name_lists_the_names(folder: Path) -> None:
    keep(folder / "mine.json")
    with pytest.raises(ProfileError, match=r"no profile is called 'nosuch'.*hub:org/name, or one of mine,.*flux-dev"):
        find_profile("nosuch")
    with pytest.raises(ProfileError, match=r"cannot read profile nowhere/nosuch"):
        find_profile("nowhere/nosuch")


# -- by model -----------------------------------------------------------------------------------------------------


def test_a_profile_of_the_user_that_fits_comes_before_shipped_ones(folder: Path) -> None:
    own = keep(folder / "mine.json", "FLUX.1-Kontext-dev")
    assert resolve(None, FLUX, KONTEXT) == own
    assert resolve(None, FLUX, "/data/renamed") == own  # two shipped ones fit, and the name does not decide
    assert resolve(None, FLUX, "") == own


def test_a_profile_of_the_user_for_another_name_does_not_take_the_place_of_the_named_one(folder: Path) -> None:
    keep(folder / "mine.json", "FLUX.1-Kontext-dev")
    assert resolve(None, FLUX, "black-forest-labs/FLUX.1-dev").name == "flux-dev"
    nameless = keep(folder / "another.json")  # of a pipeline that did not know its name
    assert resolve(None, FLUX, "black-forest-labs/FLUX.1-dev") == nameless


def test_the_newest_of_several_for_one_model(folder: Path) -> None:
    keep(folder / "a.json", "my-flux", second=0.25, age=10)
    newest = keep(folder / "b.json", "my-flux", second=0.5)
    keep(folder / "c.json", "my-flux", second=0.75, age=20)
    assert resolve(None, FLUX, "me/my-flux") == newest
    assert resolve(None, FLUX, "elsewhere") == newest


def test_several_for_several_models_are_named(folder: Path) -> None:
    keep(folder / "a.json", "first")
    keep(folder / "b.json", "second")
    with pytest.raises(ProfileError, match=r"2 of your profiles fit.*'elsewhere'.*profile='a' or 'b'"):
        resolve(None, FLUX, "elsewhere")


def test_what_lacks_the_arrays_is_no_candidate(folder: Path) -> None:
    keep(folder / "mine.json", "FLUX.1-Kontext-dev", arrays={"drift": {"cond": [1.0, 2.0]}})
    assert resolve(None, FLUX, KONTEXT).name == "flux-kontext"
    assert "drift" in resolve(None, FLUX, KONTEXT, arrays={"drift": ("step",)}).arrays
    with pytest.raises(
        ProfileError, match=r"Drifter needs .* holds elsewhere.*Yours in .*: mine\..*--strategy Drifter"
    ):
        resolve(None, FLUX, KONTEXT, "Drifter", {"elsewhere": ("step",)})


# -- damaged files ------------------------------------------------------------------------------------------------


def test_a_damaged_file_is_skipped_with_one_warning_and_refused_by_name(folder: Path) -> None:
    own = keep(folder / "whole.json", "FLUX.1-Kontext-dev")
    (folder / "cut.json").write_text(own.to_json()[:60])
    with pytest.warns(UserWarning, match=r"cut.json: not valid JSON.*Repair or delete") as told:
        assert resolve(None, FLUX, KONTEXT) == own
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve(None, FLUX, KONTEXT) == own
        assert find_profile("whole") == own
    with pytest.raises(ProfileError, match="cut.json: not valid JSON"):
        find_profile("cut")
    (folder / "cut.json").write_text("[]")
    with pytest.warns(UserWarning, match="cut.json: field 'schema' is missing"):
        resolve(None, FLUX, KONTEXT)


def test_a_link_to_nowhere_is_a_damaged_file(folder: Path) -> None:
    (folder / "gone.json").symlink_to(folder / "nowhere.json")
    with pytest.raises(ProfileError, match=r"cannot read profile .*gone.json"):
        find_profile("gone")


def test_wrap_finds_what_was_put_there_since_the_last_wrap(folder: Path) -> None:
    class Block(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    model = Own().eval()
    with pytest.raises(ProfileError, match="needs a profile for Own"):
        cachedit.wrap(model, "magcache", num_inference_steps=10)
    profile = Profile.from_ratios([1.0] * 10)
    profile.model = {"class": "Own", "fingerprint": {"blocks": {"blocks": 3}}, "names": []}
    profile.save(folder / "own.json")
    cachedit.wrap(model, "magcache", num_inference_steps=10)
    cachedit.wrap(model, "magcache", num_inference_steps=10, profile="own")


# -- the hub ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reference", "wanted"),
    [
        ("hub:me/flux", ("me/flux", "profile.json", None)),
        ("hub:me/flux/deep/50.json", ("me/flux", "deep/50.json", None)),
        ("hub:me/flux@v2", ("me/flux", "profile.json", "v2")),
        ("hub:me/flux/50.json@refs/pr/1", ("me/flux", "50.json", "refs/pr/1")),
    ],
)
def test_what_is_asked_of_the_hub(
    reference: str, wanted: tuple[str, str, str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = keep(tmp_path / "downloaded")

    def download(repository: str, file: str, *, revision: str | None = None) -> str:
        assert (repository, file, revision) == wanted
        return str(tmp_path / "downloaded")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert resolve(reference, FLUX, "") == own


@pytest.mark.parametrize("reference", ["hub:", "hub:flux", "hub:me/", "hub:me/flux//a.json", "hub:me/flux@"])
def test_what_is_no_place_on_the_hub(reference: str) -> None:
    with pytest.raises(ProfileError, match=r"allowed: hub:org/name, hub:org/name/file.json, and @revision"):
        find_profile(reference)


def test_the_hub_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(ProfileError) as caught:
        find_profile("hub:me/flux@v2")
    kept = huggingface_hub.constants.HF_HUB_CACHE
    for part in ("profile.json of", "me/flux at v2", "ConnectionError: no route to host", kept, "profile='FILE'"):
        assert part in str(caught.value)


def test_without_a_network_the_message_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ProfileError, match=r"HF_HUB_OFFLINE is set.*LocalEntryNotFoundError"):
        find_profile("hub:cachedit-tests/no-such-repository")


# -- of several strategies ----------------------------------------------------------------------------------------


def test_a_profile_that_was_made_for_the_strategy_comes_first(folder: Path) -> None:
    keep(folder / "for-auto.json", "flux", strategy="auto", age=0)
    keep(folder / "for-magcache.json", "flux", second=0.25, strategy="mag_cache", age=5)
    assert resolve(None, FLUX, "flux", "MagCache").arrays["magnitude_ratio"]["cond"] == [1.0, 0.25]
    assert resolve(None, FLUX, "flux", "Auto").arrays["magnitude_ratio"]["cond"] == [1.0, 0.5]
    assert resolve(None, FLUX, "flux", "Other").arrays["magnitude_ratio"]["cond"] == [1.0, 0.5]  # the newest


def test_of_shipped_profiles_of_one_model_the_one_for_the_strategy_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (copy.deepcopy(shipped()["flux-dev"]) for _ in range(2))
    first.strategy, second.strategy = "mag_cache", "auto"
    monkeypatch.setattr("cachedit.shipped.shipped", lambda: {"first": first, "second": second})
    assert resolve(None, FLUX, "somewhere/else", "MagCache") is first
    assert resolve(None, FLUX, "somewhere/else", "Auto") is second
    with pytest.raises(ProfileError, match="2 shipped profiles fit"):
        resolve(None, FLUX, "somewhere/else", "Other")
