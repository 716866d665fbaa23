"""What the command line offers of auto: calibrating with a frontier, tuning, and targets for the demo."""

import contextlib
import functools
import json
import os
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from diffusers import CogView4Pipeline
from test_cli import model, refusal  # noqa: F401  (a fixture)
from test_cli_profiles import folder, printed  # noqa: F401  (a fixture)
from test_frontier_plot import panels

from cachedit import Profile
from cachedit.cli import main
from cachedit.frontier import Frontier

ROOT = Path(__file__).parent.parent
WORDS = ("--strategy", "auto", "--prompt", "red star", "blue moon", "--steps", "6")
CIRCLE = "{http://www.w3.org/2000/svg}circle"


@pytest.fixture(scope="module")
def stored(model, tmp_path_factory):  # noqa: F811
    """A profile of the tiny pipeline with a frontier of runs of 6 and 9 steps, the line that told of it, and a plot."""
    there = tmp_path_factory.mktemp("stored")
    words = [*WORDS, "--frontier-steps", "6", "9", "-o", str(there / "my.json"), "--plot", str(there / "my.svg")]
    assert main(["calibrate", model, *words]) == 0
    return there / "my.json"


@contextlib.contextmanager
def counted(interrupt: tuple[int, int] | None = None):
    """Lists of the prompts of all runs of the pipeline, one for each progress bar; ``interrupt``: bar, steps done."""
    bars: list[list[str]] = []
    call = CogView4Pipeline.__call__

    @contextlib.contextmanager
    def progress_bar():
        bars.append([])
        number = len(bars) - 1

        def progress(done: int, total: int, text: str) -> None:
            if interrupt is not None and number == interrupt[0] and done >= interrupt[1]:
                raise KeyboardInterrupt

        yield progress

    @functools.wraps(call)
    def run(*args: object, **options: object) -> object:
        bars[-1].append(str(options["prompt"]))
        return call(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cachedit.evaluate.progress.progress_bar", progress_bar)
        patch.setattr(CogView4Pipeline, "__call__", run)
        yield bars


def same_but_for_times(a: Path, b: Path) -> bool:
    """True if two profiles hold the same numbers, those aside that come from a clock."""
    first, second = (Profile.load(path).arrays for path in (a, b))
    for arrays in (first, second):
        del arrays["time"], arrays["frontier"]["speedup"]
    return first == second


class TestCalibrate:
    def test_the_profile_has_a_frontier_of_the_lengths_that_were_asked_for(self, stored):
        profile = Profile.load(stored)
        frontier = profile.arrays["frontier"]
        assert set(frontier["steps"]) == {6, 9}
        assert all(nfe < steps for steps, nfe in zip(frontier["steps"], frontier["nfe"], strict=True))
        assert {"psnr", "psnr_spread", "ssim", "speedup", "cost"} <= set(frontier)
        assert len(profile.arrays["sensitivity"]["all"]) == 6
        assert profile.provenance["prompts"] == 1  # the other one was held out
        assert profile.provenance["frontier"]["prompts"] == 1
        assert sorted(path.name for path in stored.parent.iterdir()) == ["my.json", "my.svg"]

    def test_it_is_drawn(self, stored):
        budgets = len(Profile.load(stored).arrays["frontier"]["nfe"])
        for panel in panels(stored.with_suffix(".svg").read_text(encoding="utf-8")):
            assert len(panel.findall(CIRCLE)) == budgets

    def test_interrupted_in_either_half_it_goes_on(self, model, folder, capsys):  # noqa: F811
        words = ["calibrate", model, *WORDS, "-o", "my.json"]
        told = f"cachedit: interrupted. Go on where it stopped: {shlex.join(['cachedit', *words])} --resume\n"
        with counted() as whole:
            assert main(["calibrate", model, *WORDS, "-o", "whole.json"]) == 0
        capsys.readouterr()
        with counted(interrupt=(0, 18)) as begun:  # three runs of six steps
            assert main(words) == 130
        assert capsys.readouterr() == ("", told)
        assert "holds 2 finished units" in refusal(capsys, *words)  # the third ended in the interruption
        with counted(interrupt=(1, 30)) as resumed:
            assert main([*words, "--resume"]) == 130
        assert capsys.readouterr() == ("", told)
        assert len(begun[0]) == 3
        assert len(resumed[0]) == len(whole[0]) - 2
        assert not Path("my.json").exists()
        assert "my.json.calibrated holds 1 finished units" in refusal(capsys, *words)
        finished = len([*Path("my.json.frontier").glob("*.pt")])
        assert finished >= 1
        with counted() as last:
            assert main([*words, "--resume"]) == 0
        capsys.readouterr()
        assert len(last) == 1  # the frontier alone
        assert len(last[0]) == len(whole[1]) - finished
        assert sorted(path.name for path in Path().iterdir()) == ["my.json", "whole.json"]
        assert same_but_for_times(Path("my.json"), Path("whole.json"))
        assert "--resume" not in Profile.load("my.json").command

    def test_a_profile_that_is_there_stays_until_the_new_one_is_whole(self, model, folder, stored):  # noqa: F811
        Path("my.json").write_bytes(stored.read_bytes())
        with counted(interrupt=(1, 12)):
            assert main(["calibrate", model, *WORDS, "-o", "my.json"]) == 130
        assert Path("my.json").read_bytes() == stored.read_bytes()

    def test_another_calibration_is_not_resumed(self, model, folder, capsys):  # noqa: F811
        words = ["calibrate", model, *WORDS, "-o", "my.json"]
        with counted(interrupt=(1, 12)):
            assert main(words) == 130
        capsys.readouterr()
        message = refusal(capsys, *words, "--resume", "--seed", "5")
        assert "my.json.calibrated is of another calibration, which had seed 0, now 5" in message

    def test_a_second_time_replaces(self, model, folder, stored, capsys, monkeypatch):  # noqa: F811
        folder.mkdir(parents=True)
        (folder / "tiny.json").write_bytes(stored.read_bytes())
        monkeypatch.setattr("cachedit.calibration.calibrate", interrupt)
        assert main(["calibrate", model, *WORDS, "--name", "tiny"]) == 130  # it has begun


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


class TestShow:
    def test_predictors_and_criteria_have_names(self, stored, capsys):
        told = json.loads(printed(capsys, "profile", "show", str(stored), "--json"))["frontier"]
        assert set(told["predictor"]) <= {"plain", "line", "quadratic", "fitted", "damped"}
        assert set(told["criterion"]) <= {"min_sum", "minimax"}
        assert told["nfe"] == Profile.load(stored).arrays["frontier"]["nfe"]
        out = printed(capsys, "profile", "show", str(stored))
        assert told["predictor"][0] in out
        assert told["criterion"][0] in out

    def test_plot(self, stored, folder, capsys):  # noqa: F811
        assert "plot: a.svg" in printed(capsys, "profile", "show", str(stored), "--plot", "a.svg")
        assert Path("a.svg").read_text(encoding="utf-8") == stored.with_suffix(".svg").read_text(encoding="utf-8")
        ET.parse("a.svg")
        json.loads(printed(capsys, "profile", "show", str(stored), "--plot", "b.svg", "--json"))
        assert Path("b.svg").exists()


def tuned(capsys, *words: str) -> tuple[str, str]:
    """Output and errors of a run of seven steps."""
    assert main(["tune", *words, "--prompt", "red star", "blue moon", "--run-steps", "7"]) == 0
    return capsys.readouterr()


class TestTune:
    def test_with_a_profile_that_is_named(self, model, folder, stored, capsys):  # noqa: F811
        out, _ = tuned(capsys, model, "--max-nfe", "4", "--profile", str(stored), "--seed", "3")
        lines = dict(line.split(None, 1) for line in out.splitlines())
        assert lines["profile:"] == f"{stored} (named)"
        assert lines["chosen:"].endswith("4 of 7 steps computed")
        assert lines["chosen:"].split()[0].count("■") == 4
        assert "4 computed steps, PSNR " in lines["expected:"]
        assert "for the whole call" in lines["taken:"]
        assert lines["snippet:"] == f"{Path(model).name}-tuned.py"
        text = Path(lines["snippet:"]).read_text(encoding="utf-8")
        for part in (
            f'DiffusionPipeline.from_pretrained("{model}")',
            f'cachedit.wrap(pipe, "auto", profile="{stored}", max_nfe=4)',
            'prompt="red star",',
            "num_inference_steps=7,",
            "torch.Generator().manual_seed(3),",
        ):
            assert part in text
        compile(text, "snippet", "exec")

    def test_json(self, model, folder, stored, capsys):  # noqa: F811
        low, high = Frontier.of(Profile.load(stored)).range("psnr", 7)
        middle = (low + high) / 2
        words = ["--min-psnr", f"{middle}", "--profile", str(stored), "--json", "--snippet", "a.py", "--guidance", "2"]
        data = json.loads(tuned(capsys, model, *words)[0])
        assert data["target"] == {"min_psnr": middle}
        assert data["profile"] == {"use": str(stored), "name": data["profile"]["name"], "origin": "named"}
        assert data["run"]["nfe"] == data["expected"]["computed_steps"] < 7
        assert data["expected"]["psnr"] >= middle
        assert data["snippet"]["text"] == Path("a.py").read_text(encoding="utf-8")
        assert f"min_psnr={middle}" in data["snippet"]["text"]
        assert "guidance_scale=2.0," in data["snippet"]["text"]
        assert data["seconds"] > 0

    def test_measured_then_found(self, model, folder, capsys, monkeypatch):  # noqa: F811
        out, err = tuned(capsys, model, "--max-nfe", "4", "--name", "tiny", "--steps", "6")
        mine = folder / "tiny.json"
        assert "no profile is found (--profile names one): Auto needs a profile for CogView4Transformer2DModel" in err
        assert f"{mine} (measured now)" in out
        assert "frontier" in Profile.load(mine).arrays
        assert f'profile="{mine}"' in Path("tiny-tuned.py").read_text(encoding="utf-8")
        monkeypatch.setattr("cachedit.calibration.calibrate", interrupt)
        out, err = tuned(capsys, model, "--max-nfe", "5")
        assert f"{mine} (found among yours)" in out
        assert err == ""
        for anew in (["--recalibrate", "--name", "tiny"], ["-o", "b.json"], ["--resume", "--name", "tiny"]):
            assert main(["tune", model, "--max-nfe", "5", *anew]) == 130

    def test_one_without_a_frontier_is_not_found(self, model, folder, stored, capsys, monkeypatch):  # noqa: F811
        folder.mkdir(parents=True)
        profile = Profile.load(stored)
        del profile.arrays["frontier"]
        profile.save(folder / "tiny.json")
        monkeypatch.setattr("cachedit.calibration.calibrate", interrupt)
        assert main(["tune", model, "--max-nfe", "5", "--name", "other"]) == 130

    def test_interrupted_it_says_how_to_go_on(self, model, folder, capsys):  # noqa: F811
        words = ["tune", model, "--max-nfe", "4", "--prompt", "red star", "blue moon", "--steps", "6", "-o", "my.json"]
        with counted(interrupt=(0, 18)):
            assert main(words) == 130
        out, err = capsys.readouterr()
        assert out == ""
        assert err == f"cachedit: interrupted. Go on where it stopped: {shlex.join(['cachedit', *words])} --resume\n"

    def test_out_of_range_no_program_is_written(self, model, folder, stored, capsys):  # noqa: F811
        words = ["tune", model, "--profile", str(stored), "--prompt", "red star", "--run-steps", "9"]
        message = refusal(capsys, *words, "--min-psnr", "500")
        assert "PSNR 500; allowed for 9 steps: " in message
        assert not [*Path().iterdir()]

    def test_the_program_runs(self, folder, capsys):  # noqa: F811
        words = ["--sample", "image", "--num-prompts", "2", "--steps", "6", "--run-steps", "9"]
        assert main(["tune", *words, "--max-nfe", "5", "--json"]) == 0
        data = json.loads(capsys.readouterr().out)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "image-tuned.py"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
        assert done.returncode == 0, done.stderr
        assert f"{data['run']['strip']}  5 of 9 computed" in done.stdout
        assert Path("image-tuned.png").read_bytes().startswith(b"\x89PNG")


class TestDemo:
    def test_a_target_is_of_auto_alone(self, model, folder, stored, capsys):  # noqa: F811
        words = ["--model", model, "--profile", str(stored), "--prompt", "red star", "--steps", "7", "--json", "a.json"]
        out = printed(capsys, "demo", "--strategy", "magcache", "auto", "--max-nfe", "4", *words)
        _, other, auto = json.loads(Path("a.json").read_text(encoding="utf-8"))["rows"]
        assert auto["nfe"] == auto["expected"]["computed_steps"] == 4
        assert "max_nfe=4" in auto["configuration"]
        assert other["expected"] is None
        told = f"4 computed steps, PSNR {auto['expected']['psnr']:.1f}, SSIM "
        assert next(line for line in out.splitlines() if line.startswith("auto expected ")).count(told) == 1
        assert f"x, {told}" in Path("cachedit-demo/index.html").read_text(encoding="utf-8")


class TestRefusals:
    @pytest.mark.parametrize(
        ("words", "parts"),
        [
            ("tune x", ["one of the arguments --target-speedup --max-nfe", "is required"]),
            ("tune --max-nfe 4", ["MODEL", "--sample"]),
            ("tune x --max-nfe 4 --min-psnr 30", ["--min-psnr: not allowed with argument --max-nfe"]),
            ("tune x --max-nfe 0", ["--max-nfe: got 0, allowed: 1 or more"]),
            ("tune x --target-speedup 0.5", ["target_speedup=0.5; allowed: a number, 1 or more"]),
            ("tune x --max-nfe 4 --option max_gap=1", ["no option 'max_gap'", "Allowed: target_speedup"]),
            ("tune x --max-nfe 4 --option min_psnr=1", ["allowed: one of them"]),
            ("tune x --max-nfe 4 --snippet nowhere/a.py", ["--snippet nowhere/a.py", "does not exist"]),
            ("tune x --max-nfe 4 --snippet .", ["is a folder"]),
            ("tune x --max-nfe 4 --profile a --recalibrate", ["--recalibrate: not allowed with argument --profile"]),
            ("tune x --max-nfe 4 --profile a -o b", ["--profile a is taken as it is; allowed: without -o"]),
            ("tune x --max-nfe 4 --profile nosuch", ["no profile is called 'nosuch'"]),
            ("demo --max-nfe 4", ["--max-nfe 4 is asked of auto", "allowed: with --strategy auto", "beside magcache"]),
            ("demo --strategy auto --min-psnr -1", ["Auto min_psnr=-1.0; allowed: a number, 0 or more"]),
            ("calibrate x --strategy auto --prompt a", ["got 1 prompt; allowed: 2 or more"]),
            ("calibrate x --strategy auto --steps 4", ["with 4 steps; allowed: 5 or more"]),
            ("calibrate x --strategy auto --frontier-steps 9 2", ["with 2 steps; allowed: 5 or more"]),
            ("calibrate x --frontier-steps 9", ["--frontier-steps is of auto", "not with mag_cache"]),
            ("calibrate x --plot a.svg", ["--plot is of auto", "not with mag_cache"]),
            ("calibrate x --strategy auto --plot nowhere/a.svg", ["--plot nowhere/a.svg", "does not exist"]),
            ("profile show flux-dev --plot a.svg", ["profile flux-dev has no frontier", "cachedit calibrate MODEL"]),
        ],
    )
    def test_one_line(self, words, parts, folder, capsys):  # noqa: F811
        message = refusal(capsys, *words.split())
        for part in parts:
            assert part in message
        assert not [*Path().iterdir()]

    def test_a_folder_that_may_not_be_written_to(self, folder, capsys, monkeypatch):  # noqa: F811
        monkeypatch.setattr("os.access", lambda path, mode: False)
        assert "may not be written to" in refusal(capsys, "tune", "x", "--max-nfe", "4")
