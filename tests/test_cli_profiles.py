"""``cachedit profile``, and where ``cachedit calibrate`` puts what it measured, how it is interrupted and refused."""

import contextlib
import functools
import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from diffusers import CogView4Pipeline
from test_cli import model, refusal  # noqa: F401  (a fixture)
from test_demo import tiny_pipeline

import cachedit
from cachedit import Profile
from cachedit.cli import main
from cachedit.shipped import shipped

ROOT = Path(__file__).parent.parent


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The user's folder of profiles, not made yet; the working folder is empty."""
    monkeypatch.setenv("CACHEDIT_HOME", str(tmp_path / "home"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "home" / "profiles"


def measured(**changes) -> Profile:
    """Two branches of two steps, and a frontier of two budgets."""
    fields = {
        "arrays": {
            "magnitude_ratio": {"cond": [1.0, 0.5], "uncond": [1.0, 0.8]},
            "error": {"all": [[0.0, 2.0, 4.0], [0.0, 3.0, 6.0]]},
            "frontier": {"nfe": [4, 8], "psnr": [31.25, 40.5]},
        },
        "axes": {"error": ["step", "gap"], "frontier": ["budget"]},
        "sigmas": [1.0, 0.25],
        "name": "mine",
        "strategy": "auto",
        "model": {"class": "Tiny", "fingerprint": {"blocks": {"blocks": 4}, "width": 32}, "names": ["tiny"]},
        "sampler": {"class": "Euler", "shift": 3.0},
        "defaults": {"threshold": 0.1},
        "provenance": {"prompts": 2},
    }
    return Profile(**{**fields, **changes})


def printed(capsys, *words: str, code: int = 0) -> str:
    """Standard output of a command that must end with this code."""
    assert main(list(words)) == code
    return capsys.readouterr().out


class TestShow:
    def test_of_a_file(self, folder, capsys):
        measured().save("mine.json")
        out = printed(capsys, "profile", "show", "mine.json")
        lines = [" ".join(line.replace("│", " ").split()) for line in out.splitlines()]
        for line in (
            "strategy auto",
            "model Tiny (blocks.blocks 4, width 32)",
            "sampler class Euler, shift 3.0",
            "noise levels 2, 1 to 0.25",
            "defaults threshold 0.1",
            "provenance prompts 2",
            "magnitude_ratio cond, uncond 2 steps 0.5 1",
            "error all 2 steps x 3 gaps 0 6",
            "nfe psnr",
            "4 31.25",
            "8 40.5",
        ):
            assert any(line in shown.replace("┃ ", "") for shown in lines), (line, out)

    def test_json(self, folder, capsys):
        measured().save("mine.json")
        data = json.loads(printed(capsys, "profile", "show", "--json", "mine.json"))
        assert data["arrays"]["error"] == {
            "axes": ["step", "gap"], "keys": ["all"], "shapes": [[2, 3]], "min": 0.0, "max": 6.0,
        }  # fmt: skip
        assert data["frontier"] == {"nfe": [4, 8], "psnr": [31.25, 40.5]}
        assert data["noise_levels"] == {"count": 2, "first": 1.0, "last": 0.25}
        assert data["model"]["class"] == "Tiny"

    def test_without_model_levels_and_frontier(self, folder, capsys):
        Profile.from_ratios([1.0, 0.5]).save("bare.json")
        out = printed(capsys, "profile", "show", "bare.json")
        assert "by position in the schedule" in out
        assert "frontier" not in out

    def test_by_name(self, folder, capsys):
        assert "FluxTransformer2DModel" in printed(capsys, "profile", "show", "flux-dev")
        folder.mkdir(parents=True)
        measured().save(folder / "flux-dev.json")
        assert "Tiny" in printed(capsys, "profile", "show", "flux-dev")

    def test_from_the_hub_without_a_network(self, folder):
        command = [sys.executable, "-m", "cachedit.cli", "profile", "show", "hub:me/flux"]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(folder)}
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120)
        assert (done.returncode, done.stdout) == (2, "")
        for part in ("cannot get profile hub:me/flux", "HF_HUB_OFFLINE is set", str(folder), "profile='FILE'"):
            assert part in done.stderr
        assert len(done.stderr.splitlines()) == 1


class TestValidate:
    def test_whole(self, folder, capsys):
        measured().save("mine.json")
        assert printed(capsys, "profile", "validate", "mine.json") == "mine.json: a whole profile\n"
        data = json.loads(printed(capsys, "profile", "validate", "mine.json", "--json"))
        assert data == {"file": "mine.json", "valid": True, "error": None}

    def test_the_field_is_named(self, folder, capsys):
        text = measured().to_json().replace("31.25", '"31"')
        Path("bad.json").write_text(text, encoding="utf-8")
        assert "bad.json: field 'arrays.frontier.psnr' must be" in refusal(capsys, "profile", "validate", "bad.json")
        data = json.loads(printed(capsys, "profile", "validate", "bad.json", "--json", code=2))
        assert data["valid"] is False
        assert "field 'arrays.frontier.psnr'" in data["error"]

    def test_a_name_is_no_file(self, folder, capsys):
        assert "cannot read profile flux-dev" in refusal(capsys, "profile", "validate", "flux-dev")


class TestDiff:
    def test_equal(self, folder, capsys):
        measured().save("a.json")
        measured().save("b.json")
        assert printed(capsys, "profile", "diff", "a.json", "b.json") == ""
        data = json.loads(printed(capsys, "profile", "diff", "a.json", "b.json", "--json"))
        assert data == {"equal": True, "metadata": {}, "arrays": {}}

    def test_metadata_and_arrays(self, folder, capsys):
        a, b = measured(), measured(sampler={"class": "Euler", "shift": 1.0}, date="2030-01-01", sigmas=[1.0, 0.2])
        b.arrays["magnitude_ratio"]["uncond"] = [1.0, 1.0]  # 0.2 apart, of 1.0
        b.arrays["error"]["all"][1][2] = 8.0  # 2 apart, of 8
        del b.arrays["frontier"], b.axes["frontier"]
        a.save("a.json")
        b.save("b.json")
        assert printed(capsys, "profile", "diff", "a.json", "b.json", code=1).splitlines() == [
            "sampler.shift: 3.0 | 1.0",
            "axes.frontier: ['budget'] | -",
            "date: - | 2030-01-01",
            "sigmas: largest relative difference 0.2 at [1]",
            "magnitude_ratio: largest relative difference 0.2 at uncond[1]",
            "error: largest relative difference 0.25 at all[1, 2]",
            "frontier: only in the first",
        ]
        data = json.loads(printed(capsys, "profile", "diff", "a.json", "b.json", "--json", code=1))
        assert data["equal"] is False
        assert data["metadata"]["sampler.shift"] == [3.0, 1.0]
        assert data["arrays"]["error"] == {"largest": 0.25, "at": "all[1, 2]"}

    @pytest.mark.parametrize(
        ("arrays", "told"),
        [
            ({"r": {"cond": [0.0, 0.0]}}, ""),
            ({"r": {"cond": [0.0, -1.0]}}, "r: largest relative difference 1 at cond[1]"),
            ({"r": {"cond": [0.0, 0.0, 0.0]}}, "r: cond has shape [2] and [3]"),
            ({"r": {"all": [0.0, 0.0]}}, "r: of cond and of all"),
            ({"r": {"cond": [0.0, 0.0]}, "s": {"cond": [0.0, 0.0]}}, "s: only in the second"),
        ],
    )
    def test_arrays(self, arrays, told, folder, capsys):
        Profile(arrays={"r": {"cond": [0.0, 0.0]}}).save("a.json")
        Profile(arrays=arrays).save("b.json")
        out = printed(capsys, "profile", "diff", "a.json", "b.json", code=int(bool(told)))
        assert out.strip() == told

    def test_trouble_is_no_difference(self, folder, capsys):
        assert "no profile is called 'nosuch'" in refusal(capsys, "profile", "diff", "flux-dev", "nosuch")


class TestList:
    def test_yours_and_shipped_ones(self, folder, capsys):
        folder.mkdir(parents=True)
        measured().save(folder / "mine.json")
        (folder / "cut.json").write_text("{", encoding="utf-8")
        out = printed(capsys, "profile", "list")
        for part in ("mine", "magnitude_ratio, error, frontier", "yours", "flux-dev", "shipped", f"yours: {folder}"):
            assert part in out
        assert f"damaged: {folder / 'cut.json'}: not valid JSON" in out
        data = json.loads(printed(capsys, "profile", "list", "--json"))
        assert data["folder"] == str(folder)
        rows = {row["name"]: row for row in data["profiles"]}
        assert list(rows) == ["cut", "mine", *shipped()]
        assert rows["mine"] == {
            "name": "mine", "model": "Tiny", "arrays": ["magnitude_ratio", "error", "frontier"], "from": "yours",
            "error": None,
        }  # fmt: skip
        assert "not valid JSON" in rows["cut"]["error"]
        assert rows["flux-dev"]["from"] == "shipped"


def calibrated(capsys, *words: str) -> tuple[str, str]:
    """Output and errors of a calibration of ten steps on one prompt."""
    assert main(["calibrate", *words, "--prompt", "red star", "--steps", "10"]) == 0
    return capsys.readouterr()


class TestCalibrateIntoTheFolder:
    def test_it_is_found_by_wrap_and_by_name(self, model, folder, capsys):  # noqa: F811
        out, _ = calibrated(capsys, model, "--name", "My-Tiny")
        stored = Profile.load(folder / "My-Tiny.json")
        assert stored.name == "My-Tiny"
        assert f"profile: {folder / 'My-Tiny.json'}" in out
        assert 'cachedit.wrap(pipe, "magcache")' in out
        assert [path.name for path in folder.iterdir()] == ["My-Tiny.json"]
        pipe = cachedit.wrap(tiny_pipeline(), "magcache")
        assert cachedit.unwrap(pipe) is pipe
        out = printed(capsys, "profile", "show", "my_tiny")
        assert "CogView4Transformer2DModel" in out

    def test_the_name_comes_from_the_model(self, model, folder, capsys):  # noqa: F811
        link = Path("My Model (v2)")
        link.symlink_to(model)
        calibrated(capsys, f"./{link}")
        assert [path.name for path in folder.iterdir()] == ["my-model-v2.json"]

    def test_a_second_time_replaces(self, model, folder, capsys):  # noqa: F811
        calibrated(capsys, model, "--name", "tiny", "--seed", "1")
        calibrated(capsys, model, "--name", "tiny", "--seed", "2")
        assert Profile.load(folder / "tiny.json").provenance["seed"] == 2

    def test_the_profile_of_another_model_is_kept(self, model, folder, capsys):  # noqa: F811
        folder.mkdir(parents=True)
        other = measured()
        other.save(folder / "tiny.json")
        words = ["calibrate", model, "--name", "tiny", "--prompt", "red star", "--steps", "10"]
        message = refusal(capsys, *words)
        for part in ("a profile of another model", "class is 'CogView4Transformer2DModel'", "--name NAME", "-o "):
            assert part in message
        assert Profile.load(folder / "tiny.json") == other
        (folder / "tiny.json").write_text("{", encoding="utf-8")
        assert "no whole profile" in refusal(capsys, *words)

    def test_of_the_same_shape_the_name_tells_models_apart(self, model, folder, capsys):  # noqa: F811
        calibrated(capsys, model, "--name", "tiny")
        stored = Profile.load(folder / "tiny.json")
        stored.model["names"] = ["another"]
        stored.save(folder / "tiny.json")
        message = refusal(capsys, "calibrate", model, "--name", "tiny", "--prompt", "red star", "--steps", "10")
        assert f"it is called '{Path(model).name}', the profile's another" in message

    def test_what_says_more_is_kept(self, model, folder, capsys):  # noqa: F811
        calibrated(capsys, model, "--name", "tiny")
        words = ["calibrate", model, "--name", "tiny", "--strategy", "lemica", "--prompt", "red star", "--steps", "10"]
        assert "holds magnitude_ratio, which this calibration does not measure" in refusal(capsys, *words)

    def test_json_is_all_there_is_on_stdout(self, model, folder, capsys):  # noqa: F811
        out, err = calibrated(capsys, model, "--name", "tiny", "--json")
        data = json.loads(out)
        assert data["file"] == str(folder / "tiny.json")
        assert data["arrays"]["magnitude_ratio"]["shapes"] == [[10]]
        assert "10/10 (100 %)" in err

    @pytest.mark.parametrize("name", ["a/b", "..", "-x", "a b"])
    def test_no_name_for_a_file(self, name, folder, capsys):
        assert "allowed: letters, digits" in refusal(capsys, "calibrate", "x", f"--name={name}")

    def test_without_a_home(self, folder, capsys, monkeypatch):
        monkeypatch.setattr("cachedit.user_profiles.folder", lambda: Path("~/.cache/cachedit/profiles"))
        assert "Set CACHEDIT_HOME to a folder, or name a file: -o FILE" in refusal(capsys, "calibrate", "x")


class TestInterruptAndProcesses:
    WORDS = ("--prompt", "red star", "blue moon", "--steps", "10", "--strategy", "lemica")

    def interrupt(self, patch, at: int) -> None:
        """Ctrl-C when that many steps are done."""

        @contextlib.contextmanager
        def progress_bar():
            def progress(done: int, total: int, text: str) -> None:
                if done == at:
                    raise KeyboardInterrupt

            yield progress

        patch.setattr("cachedit.evaluate.progress.progress_bar", progress_bar)

    def count_runs(self, patch) -> list[str]:
        """A list that gets the prompt of every run of the pipeline."""
        runs: list[str] = []
        call = CogView4Pipeline.__call__

        @functools.wraps(call)
        def counted(*args: object, **options: object) -> object:
            runs.append(str(options["prompt"]))
            return call(*args, **options)

        patch.setattr(CogView4Pipeline, "__call__", counted)
        return runs

    def test_it_says_how_to_go_on_and_ends_where_it_would_have(self, model, folder, capsys, monkeypatch):  # noqa: F811
        runs = self.count_runs(monkeypatch)
        assert main(["calibrate", model, "-o", "whole.json", *self.WORDS]) == 0
        whole = len(runs)
        capsys.readouterr()
        words = ["calibrate", model, "-o", "my.json", *self.WORDS]
        with pytest.MonkeyPatch.context() as patch:
            self.interrupt(patch, at=35)  # two watched runs of ten steps are whole, and one of lemica's own
            assert main(words) == 130
            told = f"cachedit: interrupted. Go on where it stopped: {shlex.join(['cachedit', *words])} --resume\n"
            assert capsys.readouterr() == ("", told)
            self.interrupt(patch, at=45)
            assert main([*words, "--resume"]) == 130
            assert capsys.readouterr() == ("", told)
        assert not Path("my.json").exists()
        assert "holds 4 finished units of an interrupted calibration" in refusal(capsys, *words)
        runs.clear()
        assert main([*words, "--resume"]) == 0
        capsys.readouterr()
        assert len(runs) == whole - 4
        assert sorted(path.name for path in Path().iterdir()) == ["my.json", "whole.json"]
        out = printed(capsys, "profile", "diff", "my.json", "whole.json", code=1)
        assert [line.split(":")[0] for line in out.splitlines()] == ["command"]
        assert "--resume" not in out

    def test_nothing_was_kept(self, model, folder, capsys, monkeypatch):  # noqa: F811
        def calibrate(*_: object, **__: object) -> Profile:
            raise KeyboardInterrupt

        monkeypatch.setattr("cachedit.calibration.calibrate", calibrate)
        assert main(["calibrate", model, "-o", "my.json"]) == 130
        assert capsys.readouterr().err == "cachedit: interrupted. Nothing was kept\n"

    def test_of_several_processes_one_prints_and_writes(self, model, folder, monkeypatch):  # noqa: F811
        for rank, wanted in (("1", ""), ("0", "profile: my.json")):
            monkeypatch.setenv("RANK", rank)
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                assert main(["calibrate", model, "-o", "my.json", "--prompt", "red star", "--steps", "10"]) == 0
            assert out.getvalue().startswith(wanted)
            assert bool(out.getvalue()) is bool(err.getvalue()) is Path("my.json").exists() is (rank == "0")


class TestRefusals:
    @pytest.mark.parametrize(
        ("words", "parts"),
        [
            ("profile", ["ACTION", "cachedit profile --help"]),
            ("profile show", ["PROFILE"]),
            ("profile show nosuch", ["no profile is called 'nosuch'", "flux-dev", "cachedit profile list"]),
            ("profile show nosuch.json", ["cannot read profile nosuch.json"]),
            ("profile show hub:nosuch", ["hub:nosuch", "allowed: hub:org/name"]),
            ("profile diff flux-dev", ["B"]),
            ("demo --profile nosuch --num-prompts 1 --steps 8", ["no profile is called 'nosuch'"]),
            ("demo --device nosuch", ["--device nosuch cannot be used", "Allowed: cpu"]),
            ("demo --device cuda:99", ["--device cuda:99 cannot be used"]),
        ],
    )
    def test_one_line(self, words, parts, folder, capsys):
        message = refusal(capsys, *words.split())
        for part in parts:
            assert part in message
