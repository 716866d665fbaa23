"""The Pareto benchmark: its answers on numbers made by hand, its counting, and a run in its smallest form."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STEPS = 9
METHODS = {("cachedit", "TaylorSeer"), ("cachedit", "DeepCache"), ("diffusers", "PAB")}


@pytest.fixture(scope="module")
def table():
    """The module beside the script, which is no package."""
    spec = importlib.util.spec_from_file_location("pareto_table", ROOT / "benchmarks" / "pareto_table.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["pareto_table"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def smallest(tmp_path_factory):
    """One prompt, few steps, two strategies (one cannot run here), one peer; in a process of its own."""
    folder = tmp_path_factory.mktemp("pareto")
    settings = {"TaylorSeer": [{"interval": n, "warmup": 1, "order": 0} for n in (2, 4)], "deep_cache": [{}]}
    (folder / "settings.json").write_text(json.dumps(settings))
    command = [
        sys.executable, str(ROOT / "benchmarks" / "pareto.py"), "--prompts", "1", "--steps", str(STEPS), "--repeats",
        "1", "--strategies", "taylor-seer", "deepcache", "--peers", "pab", "--settings",
        str(folder / "settings.json"), "--json", str(folder / "out.json"), "--markdown", str(folder / "out.md"),
    ]  # fmt: skip
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((folder / "out.json").read_text()), (folder / "out.md").read_text()


def row(table, group, name, speedup, psnr, **values):
    return table.Row(group, name, {}, calls=40, computed=20, flops=0.5, speedup=speedup, psnr=psnr, **values)


def test_front_drops_what_is_beaten_in_both(table):
    assert table.front([(2, 40), (1, 50), (2, 45), (1.5, 44), (3, 30)]) == [(1, 50), (2, 45), (3, 30)]


@pytest.mark.parametrize(
    ("speed", "psnr"),
    [(1.5, 50), (2, 50), (2.25, 45), (2.5, 40), (3, 35), (3.5, 30), (3.6, None)],
)
def test_psnr_between_settings_is_on_the_line_and_beyond_the_fastest_unknown(table, speed, psnr):
    # (2.4, 20) is beaten by (2.5, 40) and must not bend the line
    assert table.psnr_at([(3.5, 30), (2, 50), (2.4, 20), (2.5, 40)], speed) == psnr


def test_psnr_of_no_settings_is_unknown(table):
    assert table.psnr_at([], 2.0) is None


def test_best_takes_the_better_of_two_methods_not_a_line_between_them(table):
    rows = [
        row(table, "cachedit", "A", 1.0, 60.0), row(table, "cachedit", "A", 3.0, 40.0),
        row(table, "cachedit", "B", 2.5, 48.0), row(table, "diffusers", "C", 2.0, 47.0),
        row(table, "cachedit", "failed", 9.0, 99.0, error="broken"),
        row(table, "cachedit", "idle", 9.0, math.inf),
    ]  # fmt: skip
    assert table.best_at(rows, "cachedit", "speedup", 2.0) == (50.0, "A")
    assert table.best_at(rows, "cachedit", "speedup", 2.4) == (48.0, "B")
    assert table.best_at(rows, "cache-dit", "speedup", 2.0) is None
    found = {(answer["axis"], answer["target"]): answer for answer in table.answers(rows)}
    assert found["speedup", 2.0]["lead_db"] == {"diffusers": 3.0}
    assert found["speedup", 3.0]["lead_db"] == {}
    assert found["flops_ratio", 2.0]["best"]["cachedit"] == (60.0, "A")
    (first, *_) = table.sentences([found["speedup", 2.0]])
    assert "cachedit 50.0 dB (A); diffusers 47.0 dB (C), +3.0 dB reached; cache-dit -" in first
    assert [(r.name, r.psnr) for r in table.on_front(rows)] == [("A", 60.0), ("A", 40.0), ("B", 48.0)]


def test_every_method_has_its_rows_or_a_reason(smallest):
    output, result, text = smallest
    assert {(row["group"], row["name"]) for row in result["rows"]} == METHODS
    deep, *others = sorted(result["rows"], key=lambda row: row["name"])
    assert deep["error"].startswith("UnsupportedModelError")
    assert not any(row["error"] for row in others)
    assert text in output
    assert "- cachedit: DeepCache (defaults): UnsupportedModelError" in text
    assert result["conditions"]["threads"] == 1
    assert result["conditions"]["seeds"] == [0]
    assert len(result["conditions"]["calibration prompts"]) == 3
    assert not set(result["conditions"]["calibration prompts"]) & set(result["conditions"]["prompts"])
    assert [(answer["axis"], answer["target"]) for answer in result["answers"]] == [
        (axis, target) for axis in ("speedup", "flops_ratio", "nfe_ratio") for target in (2.0, 3.0)
    ]


def test_computed_calls_work_and_strips_are_those_of_the_schedule(smallest):
    quick, slow = [row for row in smallest[1]["rows"] if row["name"] == "TaylorSeer"]
    assert (quick["strips"], slow["strips"]) == (["■□■□■□■□■"], ["■□□□■□□□■"])
    assert (quick["calls"], quick["computed"], slow["computed"]) == (2 * STEPS, 10, 6)
    # a reused call still runs what is outside of the blocks: less than 2 % of the work
    assert 5 / 9 < quick["flops"] < 5 / 9 + 0.02 * 4 / 9
    assert 3 / 9 < slow["flops"] < 3 / 9 + 0.02 * 6 / 9
    assert quick["nfe_ratio"] == pytest.approx(9 / 5)
    assert 10 < slow["psnr"] < quick["psnr"]
    assert 0 < slow["ssim"] < quick["ssim"] < 1
    assert quick["speedup"] > 0


def test_parts_of_a_step_that_are_reused_show_in_the_work_and_not_in_the_calls(smallest):
    (every_other, *_) = [row for row in smallest[1]["rows"] if row["name"] == "PAB"]
    assert every_other["computed"] == 2 * STEPS
    assert 0.8 < every_other["flops"] < 1
    assert "▨" in every_other["strips"][0]
    assert every_other["psnr"] < 60


def test_what_changed_nothing_is_told_from_what_failed(table):
    idle = row(table, "diffusers", "idle", 1.0, math.inf)
    failed = table.Row("diffusers", "failed", {"threshold": 0.25}, error="broken")
    values = idle.to_dict()
    assert (values["psnr"], values["identical"], values["error"]) == (None, True, "")
    assert (failed.to_dict()["psnr"], failed.to_dict()["identical"], failed.to_dict()["error"]) == (
        None,
        False,
        "broken",
    )
    text = table.markdown([idle, failed])
    assert "| diffusers: idle | defaults | 20 / 40 | 0.500 | 1.00 | identical |" in text
    assert text.endswith("- diffusers: failed (threshold 0.25): broken")


def test_plot(table, tmp_path):
    pytest.importorskip("matplotlib")
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from pareto_plot import curves, plot
    finally:
        sys.path.pop(0)
    rows = [row(table, "cachedit", "A", 2.0, 50.0), row(table, "cachedit", "A", 1.5, 55.0)]
    rows += [row(table, "diffusers", "C", 2.0, 47.0), row(table, "diffusers", "C", 3.0, 12.0)]
    assert curves(rows) == {("cachedit", "A"): [(1.5, 55.0), (2.0, 50.0)], ("diffusers", "C"): [(2.0, 47.0)]}
    names = ("pipeline", "steps", "num_prompts", "device", "torch", "diffusers", "cache-dit")
    plot(rows, {**dict.fromkeys(names, "x"), "call_options": {"guidance_scale": 5.0}}, tmp_path / "front.png")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["front.png", "front.svg"]
    assert "diffusers: C" in (tmp_path / "front.svg").read_text()
    with pytest.raises(ValueError, match="nothing to plot"):
        plot([], {}, tmp_path / "none.png")
