"""Reports: what is measured, kept, resumed and written, on the tiny pipeline of the demo's tests."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from painter import Painter
from PIL import Image
from test_demo import PROMPTS, Frames, profile, tiny_pipeline
from test_threads_ranks import environment, ranks
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import cachedit
from cachedit.cli import main
from cachedit.evaluate.comparison import Comparison, Row, Shot
from cachedit.evaluate.configuration import Configuration, parse_configuration
from cachedit.evaluate.macs import _ON_CPU
from cachedit.evaluate.markdown import render_markdown
from cachedit.evaluate.page import SHOWN, render
from cachedit.evaluate.plot import draw_plot, ticks, undrawn
from cachedit.evaluate.report import Cancelled, Report, measure
from cachedit.evaluate.table import header, table_cells
from cachedit.evaluate.taking import take
from cachedit.feature.attachment import find

SCHEMA = Path(__file__).with_name("report_schema.json")
STEPS = 8
SIZE = {"height": 32, "width": 32}


@pytest.fixture(autouse=True, scope="module")
def _no_weights() -> Iterator[None]:
    """As where those of LPIPS cannot be had; nobody looks for them on the net."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CACHEDIT_LPIPS_WEIGHTS", "nowhere.pth")
        yield


def every() -> list[Configuration]:
    """A cache that reuses, and one that never does."""
    return [
        Configuration("MagCache", {"retention_ratio": 0.1}, profile(), label="magcache: <fast>"),
        Configuration(cachedit.MagCache(threshold=0.0, inclusive=False), {}, profile(), label="never"),
    ]


def measured(folder: Path, pipe: Any = None, **options: Any) -> Report:
    options = {"seeds": (5, 7), "call_options": SIZE, **options}
    return measure(pipe or tiny_pipeline(), every(), PROMPTS, STEPS, folder=folder, **options)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    found = measured(tmp_path_factory.mktemp("report") / "out", conditions={"command": "cachedit report x"})
    found.write()
    return found


def written(report: Report) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((report.folder / "report.json").read_text(encoding="utf-8"))
    return data


class Stopping:
    """Says "stop" after so many steps."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


# -- what is measured ---------------------------------------------------------------------------------------------


def test_every_prompt_is_drawn_from_every_seed_under_every_configuration(report: Report) -> None:
    cells = [(PROMPTS[0], 5), (PROMPTS[0], 7), (PROMPTS[1], 6), (PROMPTS[1], 8)]
    rows = report.comparison.rows
    assert [row.strategy for row in rows] == ["baseline", "magcache: <fast>", "never"]
    assert [[(shot.prompt, shot.seed) for shot in row.shots] for row in rows] == [cells] * 3
    conditions = report.comparison.conditions
    assert list(conditions)[0] == "command"
    assert conditions["seeds"] == [5, 7, 6, 8]
    assert (conditions["size"], conditions["processes"]) == ("32x32", 1)
    assert conditions["baseline_calls"].startswith("4, of ")


def test_pictures_are_the_pipelines_to_the_last_of_eight_bits(report: Report) -> None:
    generator = torch.Generator().manual_seed(7)
    call = {"num_inference_steps": STEPS, "generator": generator, "output_type": "pil", **SIZE}
    expected = tiny_pipeline()(PROMPTS[0], **call).images[0]
    with Image.open(report.folder / "pictures" / "baseline" / "001-seed7.png") as image:
        assert np.array_equal(np.asarray(image), np.asarray(expected))
    names = {path.relative_to(report.folder / "pictures").as_posix() for path in report.folder.rglob("*.png")}
    files = {"001-seed5.png", "001-seed7.png", "002-seed6.png", "002-seed8.png"}
    assert names == {f"{folder}/{file}" for folder in ("baseline", "magcache-fast", "never") for file in files}
    assert {row.shots[1].pictures for row in report.comparison.rows} == {None}


def test_work_is_counted_once_per_configuration(report: Report) -> None:
    baseline, cached, never = report.comparison.rows
    assert never.macs == baseline.macs
    assert (baseline.macs_ratio, never.macs_ratio) == (1, 1)
    assert cached.nfe is not None
    assert cached.macs_ratio is not None
    # A reused step still runs what lies outside the blocks.
    assert cached.nfe / STEPS <= cached.macs_ratio < 1
    with FlopCounterMode(display=False, custom_mapping=_ON_CPU) as counter, torch.no_grad():
        tiny_pipeline()(PROMPTS[0], num_inference_steps=STEPS, **SIZE)
    denoiser = sum(counter.get_flop_counts()["CogView4Transformer2DModel"].values())
    assert baseline.macs == denoiser / 2 < counter.get_total_flops() / 2
    assert [len(shot.latencies) for row in report.comparison.rows for shot in row.shots] == [1] * 12


def test_attention_on_a_cpu_counts() -> None:
    with FlopCounterMode(display=False, custom_mapping=_ON_CPU) as counter:
        x = torch.rand(1, 2, 5, 8)
        F.scaled_dot_product_attention(x, x, x)
    assert counter.get_total_flops() == 2 * (2 * 5 * 5 * 8) * 2  # two heads; two products of two operations


def test_what_cannot_be_measured_is_said_and_not_made_up(report: Report) -> None:
    assert {row.peak_memory for row in report.comparison.rows} == {None}
    assert "not measured" in table_cells(report.comparison, report.comparison.baseline)
    assert "got pictures of 32x32" in report.comparison.unavailable["ms_ssim"]
    page = render(report.comparison)
    assert "MS-SSIM was not computed: MS-SSIM got pictures of 32x32" in page
    assert "ms_ssim" not in report.comparison.rows[1].quality


def row(name: str, strips: list[str], identical: int, speedup: float) -> Row:
    """A row of runs with these strips."""
    shots = []
    for place, strip in enumerate(strips):
        steps = [
            cachedit.run.Step(k, None, None, "", "", mark == "■", "first step" if mark == "■" else "")
            for k, mark in enumerate(strip)
        ]
        same = place < identical
        quality = {"psnr": math.inf if same else 30.0 - place}
        shots.append(Shot("x", place, [1 / speedup], run=cachedit.Run(name, 3, steps), identical=same, quality=quality))
    return Row.of_cache(name, shots, Row("baseline", 1.0, 1.0, 3))


@pytest.mark.parametrize(
    ("strips", "identical", "speedup", "note"),
    [
        (["■□□", "■□□"], 0, 2, ""),
        (["■■■", "■■■"], 2, 1.1, "reused nothing: every step was computed (first step)"),
        (["■■■", "■□■"], 1, 1.1, "reused nothing on 1 of 2 prompts"),
        (["■□■", "■□□"], 0, 1.1, "the strip is that of the first prompt; other prompts have other strips"),
        (["■□□", "■□□"], 2, 2, "changed nothing, although steps were reused: every picture equals the baseline's to"),
        (["■□□", "■□□"], 0, 0.5, "slower than the baseline: 0.50x"),
    ],
)
def test_what_numbers_would_hide_is_said_in_words(strips: list[str], identical: int, speedup: float, note: str) -> None:
    found = row("s", strips, identical, speedup).note
    assert found.startswith(note)
    assert bool(found) is bool(note)


def test_worst_is_in_the_direction_of_the_metric(report: Report) -> None:
    cached = report.comparison.rows[1]
    assert cached.worst["ssim"] == min(shot.quality["ssim"] for shot in cached.shots)
    assert cached.worst["st_lpips"] == max(shot.quality["st_lpips"] for shot in cached.shots)


# -- interruptions ------------------------------------------------------------------------------------------------


def test_a_cancelled_report_goes_on_where_it_stopped(tmp_path: Path, report: Report) -> None:
    pipe = tiny_pipeline()
    # Three warm-up runs, six runs of the first two cells, and one and a half of the third.
    with pytest.raises(Cancelled):
        measured(tmp_path / "out", pipe, cancelled=Stopping(10 * (STEPS + 1) + 5))
    assert find(pipe) is None
    assert len([*(tmp_path / "out" / "unfinished").glob("*.pt")]) == 2
    with pytest.raises(ValueError, match=r"2 finished units of an interrupted report.*--resume"):
        measured(tmp_path / "out")
    with pytest.raises(ValueError, match=r"of another report, which had repeats 1, now 2"):
        measured(tmp_path / "out", repeats=2, resume=True)
    told: list[str] = []
    found = measured(tmp_path / "out", resume=True, progress=lambda done, total, text: told.append(text))
    runs = [text for text in dict.fromkeys(told) if "warm-up" not in text and "counting" not in text]
    assert runs == [
        "",
        *(f"{name}, prompt {k} of 4" for k in (3, 4) for name in ("baseline", "magcache: <fast>", "never")),
    ]
    for ours, theirs in zip(found.comparison.rows, report.comparison.rows, strict=True):
        assert [shot.quality for shot in ours.shots] == [shot.quality for shot in theirs.shots]
        assert [shot.strip for shot in ours.shots] == [shot.strip for shot in theirs.shots]
    found.write()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "pictures", "report.html", "report.json", "report.md",
    ]  # fmt: skip


def test_a_finished_report_is_not_overwritten(report: Report) -> None:
    before = (report.folder / "report.json").read_bytes()
    for resume in (False, True):
        with pytest.raises(ValueError, match=r"holds a finished report; allowed: another folder"):
            measured(report.folder, resume=resume)
    assert (report.folder / "report.json").read_bytes() == before


def test_a_run_ends_within_a_step_of_being_cancelled() -> None:
    taken = []

    def on_step() -> None:
        taken.append(1)
        if len(taken) == 3:
            raise Cancelled

    with pytest.raises(Cancelled):
        take(tiny_pipeline(), None, Shot("red star", 0), STEPS, SIZE, on_step)
    assert len(taken) == 3


def test_names_that_would_share_a_folder_are_refused(tmp_path: Path) -> None:
    same = [Configuration("magcache", {}, profile(), label=label) for label in ("a b", "A:b")]
    with pytest.raises(ValueError, match=r"'a b' and 'A:b' would keep their pictures in one folder; allowed.*label"):
        measure(tiny_pipeline(), same, PROMPTS, STEPS, folder=tmp_path / "out")
    outside = [Configuration("magcache", {}, profile(), label="../../elsewhere")]
    found = measure(tiny_pipeline(), outside, PROMPTS[:1], 2, folder=tmp_path / "out", call_options=SIZE)
    files = [shot.file for row in found.comparison.rows for shot in row.shots if shot.file is not None]
    assert all(file.resolve().is_relative_to(tmp_path / "out" / "pictures") for file in files)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_two_processes_share_the_runs(tmp_path: Path) -> None:
    main, other = ranks(Path(__file__).with_name("rank_report.py"), str(tmp_path), patience=300)
    assert main["strips"] == other["strips"]
    assert [main["files"], other["files"]] == [["pictures", "report.html", "report.json", "report.md"]] * 2
    # Three cells: two here, one there; each of two configurations, a warm-up of both, and one of two counted runs.
    assert [main["runs"], other["runs"]] == [2 * 2 + 2 + 1, 1 * 2 + 2 + 1]
    assert main["processes"] == 2


# -- what is written ----------------------------------------------------------------------------------------------


def shape_of(value: Any) -> Any:
    """The keys and kinds of JSON; a list has those of its first entry."""
    if isinstance(value, dict):
        return {key: shape_of(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [shape_of(value[0])] if value else []
    kinds = {bool: "bool", int: "number", float: "number", str: "text", type(None): "null"}
    return kinds[type(value)]


def test_json_has_the_schema_of_its_version(report: Report) -> None:
    data = written(report)
    baseline, cached, _ = data.pop("rows")
    cached["note"] = cached["note"] or ""  # on a busy machine it may say that the cache was slower
    shapes = {**shape_of(data), "baseline": shape_of(baseline), "cached": shape_of(cached)}
    assert data["version"] == 1
    assert shapes == json.loads(SCHEMA.read_text(encoding="utf-8"))


def test_json_numbers(report: Report) -> None:
    data = written(report)
    baseline, cached, never = data["rows"]
    assert (data["format"], data["kind"]) == ("cachedit-report", "image")
    assert (never["psnr"], never["identical"], never["identical_prompts"]) == (None, True, 4)
    assert cached["worst_psnr"] == min(prompt["psnr"] for prompt in cached["prompts"])
    assert cached["speedup"] == pytest.approx(baseline["latency_s"] / cached["latency_s"])
    assert cached["prompts"][1]["file"] == "pictures/magcache-fast/001-seed7.png"
    assert data["metrics"]["ms_ssim"]["unavailable"].startswith("MS-SSIM got pictures")


def test_page_loads_nothing_and_escapes_everything(report: Report) -> None:
    page = (report.folder / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?://|<script|<link|@import|url\(", page)
    assert "magcache: &lt;fast&gt;" in page
    assert "<fast>" not in page
    assert page.index("<dt>command</dt><dd><code>cachedit report x</code>") < page.index("<table>")
    assert page.index("<table>") < page.index("<svg") < page.index("<img")
    assert page.count("<img") == 4 * 2 * 3
    assert "identical to the baseline" in page


def test_a_page_of_many_prompts_shows_the_worst(report: Report) -> None:
    rows = [Row("baseline", 1.0, 1.0, 3, shots=[]), Row("s", 0.5, 2.0, 2, shots=[])]
    for place in range(SHOWN + 2):
        picture = torch.zeros(1, 3, 4, 4)
        rows[0].shots.append(Shot(f"prompt {place}", place, pictures=picture))
        rows[1].shots.append(Shot(f"prompt {place}", place, pictures=picture, quality={"psnr": 40.0 - place}))
    page = render(Comparison({}, rows))
    shown = re.findall(r"<h3>prompt (\d+)", page)
    assert shown == [str(place) for place in range(SHOWN + 1, 1, -1)]
    assert f"The {SHOWN} worst of {SHOWN + 2} are shown." in page


def test_markdown_stays_in_its_cells(report: Report) -> None:
    text = render_markdown(report.comparison, report.folder, "a | b")
    assert text.startswith("# a | b\n")
    assert "magcache: \\<fast\\>" in text
    links = re.findall(r"\]\((.*?)\)", text)
    assert len(links) == 3 * 3
    assert all((report.folder / link).is_file() for link in links)
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in tables[tables.index("|---|---|") : 20]}) == 1


def test_a_report_is_written_where_its_pictures_are(report: Report, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="where the pictures of this report lie"):
        report.write(tmp_path)
    assert report.write(report.folder) == report.folder / "report.html"


# -- the plot -----------------------------------------------------------------------------------------------------


def test_plot_has_a_point_for_every_cache_with_a_finite_psnr() -> None:
    rows = [Row("baseline", 1.0, 1.0, 9)]
    rows += [Row(f"<{k}>", 1 / k, k, 9, quality={"psnr": 40 - k}, worst={"psnr": 30 - k}) for k in (2, 3)]
    rows.append(Row("same", 1.0, 1.0, 9, quality={"psnr": math.inf}, worst={"psnr": math.inf}))
    drawing = ElementTree.fromstring(draw_plot(Comparison({}, rows)))
    points = drawing.findall("circle")
    assert len(points) == 2
    # Faster is further right, and of higher PSNR further up.
    assert float(points[0].get("cx", 0)) < float(points[1].get("cx", 0))
    assert float(points[0].get("cy", 0)) < float(points[1].get("cy", 0))
    assert "<2> 2.00x at 38.0 dB; <3> 3.00x at 37.0 dB" in "".join(drawing.itertext())
    assert undrawn(Comparison({}, rows)) == ["same"]
    assert draw_plot(Comparison({}, rows[:1])) == ""


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(1, 2.4, [1, 1.5, 2, 2.5]), (30, 30, [29.5, 30, 30.5]), (7, 61, [0, 20, 40, 60, 80])],
)
def test_ticks_are_round_and_enclose(low: float, high: float, expected: list[float]) -> None:
    found = ticks(low, high, 1.0)
    assert found[0] <= low <= high <= found[-1]
    assert found == expected


# -- videos -------------------------------------------------------------------------------------------------------


def test_videos_are_kept_and_played(tmp_path: Path) -> None:
    found = measured(tmp_path / "out", tiny_pipeline(Frames), seeds=(0,))
    page = found.write().read_text(encoding="utf-8")
    assert found.comparison.conditions["size"] == "32x32, 3 frames"
    assert written(found)["kind"] == "video"
    assert 0 < found.comparison.rows[1].quality["temporal"] < 0.1
    assert found.comparison.rows[2].quality["temporal"] == 0
    with Image.open(tmp_path / "out" / "pictures" / "baseline" / "001-seed0.png") as video:
        assert video.n_frames == 3
    assert page.count('class="film"') == 2 * 2 * 3
    assert page.count('<input type="range" min="1" max="3"') == 2
    policy = re.search(r"script-src '(sha256-[^']+)'", page)
    assert policy is not None


# -- configurations -----------------------------------------------------------------------------------------------


def test_configurations_in_one_word() -> None:
    found = parse_configuration("magcache:threshold=0.12,max_skip_steps=3")
    assert (found.strategy, found.options) == ("magcache", {"threshold": 0.12, "max_skip_steps": 3})
    assert found.name == "magcache:threshold=0.12,max_skip_steps=3"
    assert parse_configuration("fora") == Configuration("fora", {}, None, "fora")
    named = parse_configuration("mag-cache:profile=a,b.json,label=mine,always_compute=[1, 2]")
    assert (named.profile, named.name, named.options) == ("a,b.json", "mine", {"always_compute": (1, 2)})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "got the configuration ''; allowed: NAME or NAME:KEY=VALUE"),
        ("magcache:", "got the configuration 'magcache:'"),
        ("magcache:fast", "a configuration got 'fast'; allowed: key=value"),
        ("nosuch:a=1", "no strategy is called 'nosuch'"),
        ("magcache:speed=1", "MagCache has no option 'speed'"),
    ],
)
def test_impossible_configurations(text: str, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        parse_configuration(text)


# -- the command --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_pipeline().save_pretrained(folder)
    return folder


def command(folder: Path, *words: str) -> SimpleNamespace:
    line = [sys.executable, "-m", "cachedit.cli", *words]
    done = subprocess.run(line, cwd=folder, env=environment(), capture_output=True, timeout=300)
    return SimpleNamespace(code=done.returncode, out=done.stdout.decode(), error=done.stderr.decode())


def test_report_from_the_command_line(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["report", str(model), "--strategies", "fora:interval=2", "--prompt", "red star", "--steps", "6"]
    done = command(tmp_path, *words, "--seeds", "2", "--height", "32", "--width", "32", "-o", "out")
    assert done.code == 0, done.error
    assert "■□■□■□" in done.out
    data = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert data["conditions"]["command"].startswith("cachedit report ")
    assert data["conditions"]["seeds"] == [0, 1]
    assert (data["rows"][1]["strategy"], data["rows"][1]["nfe"]) == ("fora:interval=2", 3)
    monkeypatch.chdir(tmp_path)
    assert main([*words, "-o", "out"]) == 2
    refusal = capsys.readouterr().err
    assert "out holds a finished report" in refusal
    assert refusal.count("\n") == 1
    # The pictures of a report are folders that can be compared.
    folders = [f"out/pictures/{name}" for name in ("baseline", "fora-interval=2")]
    assert main(["compare", *folders, "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)["rows"][1]
    files = [np.asarray(Image.open(tmp_path / folder / "001-seed0.png"), dtype=float) for folder in folders]
    assert compared["prompts"][0]["psnr"] == pytest.approx(
        20 * math.log10(255) - 10 * math.log10(np.square(files[0] - files[1]).mean()), abs=1e-3
    )


class OnDevice(Painter):
    """Says that it runs on a GPU, and returns a grey picture."""

    _execution_device = torch.device("cuda", 0)

    def __call__(self, **options: Any) -> SimpleNamespace:
        return SimpleNamespace(images=np.full((1, 12, 12, 3), 0.5, np.float32))


def test_peak_memory_is_the_devices_own_since_the_run_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: what is asked of torch, in which order, and that the largest of several runs counts."""
    asked: list[str] = []
    peaks = [700, 900, 800]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: asked.append("wait"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: asked.append(f"reset {device}"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peaks.pop(0))
    shot = Shot("red star", 0)
    for _ in range(3):
        take(OnDevice(), None, shot, STEPS, {})
    assert asked == ["wait", "reset cuda:0", "wait"] * 3
    assert shot.peak_memory == 900
    baseline = Row.of_baseline([shot, Shot("x", 1, [1.0])], STEPS)
    comparison = Comparison({}, [baseline], counted=True)
    assert dict(zip(header(comparison), table_cells(comparison, baseline), strict=True))["peak memory"] == "900 B"
