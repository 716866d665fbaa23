"""The command line: what it prints, what it writes, and how it refuses."""

import contextlib
import io
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from rich.console import Console
from test_demo import profile, tiny_pipeline

import cachedit
from cachedit.cli import main
from cachedit.evaluate.comparison import Comparison, Row, Shot
from cachedit.evaluate.demo import parse_options
from cachedit.evaluate.table import print_comparison


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a tiny pipeline."""
    folder = tmp_path_factory.mktemp("model")
    tiny_pipeline().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(capsys, *words: str) -> str:
    """The one line on stderr with which a command is refused."""
    try:
        code = main(list(words))
    except SystemExit as exit_:
        code = exit_.code
    out, err = capsys.readouterr()
    assert code == 2, (out, err)
    assert out == ""
    assert err.startswith("cachedit")
    assert len(err.splitlines()) == 1, err
    return err


@dataclass
class Done:
    """A finished demo: what it printed, its JSON, its page and the names of the files it left."""

    printed: str
    data: dict
    page: str
    files: list[str]


@pytest.fixture(scope="module")
def done(model, tmp_path_factory):
    """A demo of the tiny pipeline with every option."""
    folder, printed = tmp_path_factory.mktemp("demo"), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.chdir(folder)
        profile().save("my.json")
        code = main(
            ["demo", "--model", model, "--profile", "my.json", "--prompt", "red star", "blue moon", "--steps", "10"]
            + ["--option", "retention_ratio=0.1", "--option", "threshold=0.08", "--json", "out.json", "--seed", "3"]
            + ["--guidance", "2", "--height", "32", "--width", "32", "--threads", "1", "--strategy", "mag-cache"]
        )
    assert code == 0
    return Done(
        printed.getvalue(),
        json.loads((folder / "out.json").read_text(encoding="utf-8")),
        (folder / "cachedit-demo" / "index.html").read_text(encoding="utf-8"),
        sorted(path.name for path in folder.rglob("*")),
    )


class TestDemo:
    def test_json(self, done, model):
        conditions, (baseline, cached) = done.data["conditions"], done.data["rows"]
        assert conditions["model"] == model
        assert conditions["command"].startswith("cachedit demo --model ")
        assert conditions["profiles"] == {"mag-cache": "my.json"}
        assert conditions["seeds"] == [3, 4]
        assert conditions["call_options"] == {"guidance_scale": 2.0, "height": 32, "width": 32}
        assert (baseline["strategy"], baseline["speedup"], baseline["nfe"]) == ("baseline", 1.0, 10)
        assert cached["strategy"] == "mag-cache"
        assert cached["nfe"] == cached["strip"].count("■") < 10
        assert "threshold=0.08" in cached["configuration"]

    def test_print(self, done):
        for name in ("strategy", "latency", "speed-up", "NFE", "rho", "cache", "PSNR", "SSIM", "st-lpips"):
            assert name in done.printed.splitlines()[0]
        strip = done.data["rows"][1]["strip"]
        for part in ("torch:", "diffusers:", "FlowMatchEulerDiscreteScheduler", strip, "index.html", "out.json"):
            assert part in done.printed

    def test_strip_on_a_terminal_without_its_marks(self):
        run = cachedit.Run("s", steps=[cachedit.Step(i, None, None, "0", "t", computed=i == 0) for i in range(3)])
        baseline = Row("baseline", 2.0, 1.0, 3)
        result = Comparison({}, [baseline, Row.of_cache("s", [Shot("x", 0, [1.0], run=run)], baseline)])
        for encoding, strip in (("ascii", "#.."), ("utf-8", "■□□")):
            written = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
            print_comparison(Console(file=written, width=120), result)
            assert f"s  {strip}  (" in written.buffer.getvalue().decode(encoding)

    def test_page(self, done):
        assert done.data["rows"][1]["strip"] in done.page
        assert done.data["conditions"]["device"] in done.page
        assert done.page.count("<img") == 2 * 3

    def test_no_file_is_left_half_written(self, done):
        assert done.files == ["cachedit-demo", "index.html", "my.json", "out.json"]

    def test_a_cache_that_reuses_nothing_is_told_in_words(self, model, here, capsys):
        profile().save("my.json")
        Path("prompts.txt").write_text("red star\n\nblue moon\n", encoding="utf-8")
        words = [
            "--model",
            model,
            "--profile",
            "my.json",
            "--prompts",
            "prompts.txt",
            "--num-prompts",
            "1",
            "--steps",
            "4",
        ]
        assert main(["demo", *words, "--out", "there"]) == 0
        out, err = capsys.readouterr()
        told = "reused nothing: every step was computed (4 steps or fewer"
        assert told in out
        assert told in Path("there/index.html").read_text(encoding="utf-8")
        assert "UserWarning" not in err

    def test_sample_smallest(self, here):
        assert main(["demo", "--num-prompts", "1", "--steps", "8", "--json", "out.json"]) == 0
        _, cached = json.loads(Path("out.json").read_text(encoding="utf-8"))["rows"]
        assert cached["nfe"] + cached["reused"] == 8
        assert "□□" not in cached["strip"]
        assert (cached["note"] or "").startswith("reused nothing") is (cached["reused"] == 0)

    def test_sample_default_steps(self, here):
        assert main(["demo", "--num-prompts", "1", "--json", "out.json"]) == 0
        data = json.loads(Path("out.json").read_text(encoding="utf-8"))
        _, cached = data["rows"]
        assert data["conditions"]["steps"] == 28
        assert cached["nfe"] < 28
        assert cached["rho"] < 0.5
        assert cached["psnr"] > 15


class TestRefusals:
    @pytest.mark.parametrize(
        ("words", "parts"),
        [
            ("", ["COMMAND", "--help"]),
            ("nosuch", ["invalid choice: 'nosuch'", "demo"]),
            ("demo --nosuch", ["unrecognized arguments: --nosuch"]),
            ("demo --steps 0", ["--steps: got 0, allowed: 1 or more"]),
            ("demo --strategy nosuch", ["'nosuch'", "Allowed: ", "mag_cache", "cachedit strategies"]),
            ("demo --option threshold", ["'threshold'", "allowed: key=value"]),
            ("demo --option nosuch=1", ["no option 'nosuch'", "Allowed: threshold"]),
            ("demo --option threshold=-1", ["threshold=-1", "allowed: 0.0 or more"]),
            ("demo --model nowhere/at/all", ["nowhere/at/all is missing", "Allowed: a folder"]),
            ("demo --model .", ["has no model_index.json", "Allowed: a folder"]),
            ("demo --prompts nowhere.txt", ["nowhere.txt"]),
            ("demo --prompts empty.txt", ["empty.txt holds no prompts"]),
            ("demo --num-prompts 99", ["99", "Allowed: 1 to 8"]),
            ("demo --json nowhere/out.json", ["--json nowhere/out.json", "does not exist", "mkdir -p nowhere"]),
            ("calibrate -o p.json", ["MODEL", "--sample"]),
            ("calibrate x -o nowhere/p.json", ["-o nowhere/p.json", "does not exist", "mkdir -p nowhere"]),
            ("calibrate x -o .", ["is a folder"]),
            ("calibrate --sample nosuch -o p.json", ["'nosuch'", "image"]),
        ],
    )
    def test_one_line(self, words, parts, here, capsys):
        Path("empty.txt").write_text("\n\n", encoding="utf-8")
        message = refusal(capsys, *words.split())
        for part in parts:
            assert part in message

    def test_model_that_cannot_be_loaded(self, here, capsys):
        Path("broken").mkdir()
        Path("broken/model_index.json").write_text("{", encoding="utf-8")
        assert "cannot load model broken" in refusal(capsys, "demo", "--model", "broken")

    def test_no_profile_fits(self, model, here, capsys):
        message = refusal(capsys, "demo", "--model", model)
        assert "needs a profile for CogView4Transformer2DModel" in message
        assert "cachedit calibrate" in message

    def test_damaged_profile(self, model, here, capsys):
        profile().save("cut.json")
        Path("cut.json").write_text(Path("cut.json").read_text(encoding="utf-8")[:40], encoding="utf-8")
        message = refusal(capsys, "demo", "--model", model, "--profile", "cut.json")
        assert "cut.json: not valid JSON" in message

    def test_what_the_pipeline_refuses(self, model, here, capsys):
        profile().save("my.json")
        message = refusal(capsys, "demo", "--model", model, "--profile", "my.json", "--height", "33")
        assert "divisible" in message

    def test_traceback_on_request(self, here):
        with pytest.raises(ValueError, match="nosuch"):
            main(["--traceback", "demo", "--strategy", "nosuch"])


class TestOptions:
    def test_literals(self):
        texts = ["a=0.1", "b=true", "c=None", "d=[1, 2]", "e=nearest", "f=torch.bfloat16", "g=cuda:0"]
        assert parse_options(texts) == {
            "a": 0.1, "b": True, "c": None, "d": (1, 2), "e": "nearest", "f": torch.bfloat16, "g": "cuda:0",
        }  # fmt: skip

    @pytest.mark.parametrize("text", ["threshold", "=1", "a b=1"])
    def test_not_a_pair(self, text):
        with pytest.raises(ValueError, match="allowed: key=value"):
            parse_options([text])


class TestStrategies:
    def test_table(self, capsys):
        assert main(["strategies"]) == 0
        out = capsys.readouterr().out
        for part in ("mag_cache", "MagCache", "arXiv 2506.09045", "yes", "accumulated magnitude error"):
            assert part in out

    def test_json_lists_the_registry(self, capsys):
        assert main(["strategies", "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)
        assert [row["name"] for row in rows] == list(cachedit.strategies())
        row = next(row for row in rows if row["name"] == "mag_cache")
        assert set(row) == {"name", "class", "paper", "summary", "needs_profile"}
        assert row["needs_profile"] is True
        assert all(row["summary"] and "\n" not in row["summary"] for row in rows)

    def test_strategies_as_markdown_are_the_table_of_the_readme(self, capsys):
        assert main(["strategies", "--markdown"]) == 0
        table = capsys.readouterr().out
        assert all(f"`{cls.__name__.lower()}`" in table for cls in cachedit.strategies().values())
        assert table in (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8"), (
            "paste the output of `cachedit strategies --markdown` into the README"
        )


class TestCalibrate:
    def test_profile_is_written_and_serves_the_demo(self, model, here, capsys):
        words = ["--prompt", "red star", "--steps", "10", "--name", "tiny", "-o", "my.json", "--seed", "7"]
        assert main(["calibrate", model, *words]) == 0
        out = capsys.readouterr().out
        for part in ("my.json", "CogView4Transformer2DModel", "magnitude_ratio (10 steps)", "1 prompts x 10 steps"):
            assert part in out
        stored = cachedit.Profile.load("my.json")
        assert stored.name == "tiny"
        assert stored.command.startswith("cachedit calibrate ")
        demo = ["--model", model, "--profile", "my.json", "--num-prompts", "1", "--steps", "10", "--json", "out.json"]
        assert main(["demo", *demo]) == 0
        assert json.loads(Path("out.json").read_text(encoding="utf-8"))["rows"][1]["nfe"] <= 10

    def test_of_the_sample(self, here, capsys):
        words = ["--num-prompts", "1", "--steps", "10", "-o", "my.json"]
        assert main(["calibrate", "--sample", "image", *words]) == 0
        stored = cachedit.Profile.load("my.json")
        assert stored.name == "image"
        assert stored.model["class"] == "CogView4Transformer2DModel"


class TestStart:
    def test_version(self, capsys):
        with pytest.raises(SystemExit) as exit_:
            main(["--version"])
        assert exit_.value.code == 0
        assert capsys.readouterr().out == f"cachedit {cachedit.__version__}\n"

    def test_help_imports_neither_diffusers_nor_transformers(self):
        code = (
            "import sys, cachedit.cli as cli\n"
            "try: cli.main(['demo', '--help'])\n"
            "except SystemExit: pass\n"
            "print(sorted({'diffusers', 'transformers', 'rich', 'torchmetrics'} & set(sys.modules)))"
        )
        root = Path(__file__).parent.parent
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, timeout=120)
        assert "--num-prompts" in done.stdout, done.stderr
        assert done.stdout.splitlines()[-1] == "[]"

    def test_interrupt_is_no_traceback(self, monkeypatch, capsys):
        def interrupted(_: object) -> int:
            raise KeyboardInterrupt

        monkeypatch.setattr("cachedit.cli.strategies.run", interrupted)
        assert main(["strategies"]) == 130
        assert capsys.readouterr().err == "cachedit: interrupted\n"
