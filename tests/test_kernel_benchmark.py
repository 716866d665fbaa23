"""The kernel benchmark on the CPU: what it writes, and the passes that it counts. Times are not tested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The run that has no times, in a process of its own, from another folder."""
    target = tmp_path_factory.mktemp("kernels") / "kernels.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "kernels.py"), "--device", "cpu", "--json", str(target)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=target.parent, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(target.read_text())


@pytest.fixture(scope="module")
def rows(result: Any) -> dict[str, Any]:
    return {row["op"]: row for row in result[1]["rows"] if row["model"] in ("small", "LLaDA, 1k keys")}


@pytest.mark.parametrize(
    ("op", "passes", "eager", "launches"),
    [
        ("forecast_0", 3, 3, 1),  # x and R are read, the sum is written: nothing to save
        ("forecast_1", 4, 14, 6),
        ("forecast_2", 5, 19, 8),
        ("capture", 4, 21, 12),
        ("capture_magnitude", 4, 15, 18),
        ("capture_change", 4, 12, 7),
    ],
)
def test_passes(rows: dict[str, Any], op: str, passes: int, eager: int, launches: int) -> None:
    row = rows[op]
    assert row["passes"] == row["floor"] == passes
    assert row["eager_passes"] == pytest.approx(eager, abs=0.1)
    assert (row["launches"], row["eager_launches"]) == (1, launches)


@pytest.mark.parametrize("op", ["rope_scatter_kv", "subset_attention"])
def test_attention_reads_little_more_than_it_must(rows: dict[str, Any], op: str) -> None:
    row = rows[op]
    assert row["floor"] <= row["passes"] <= row["floor"] + 0.3  # the angles of so few channels are not nothing
    assert row["eager_passes"] > 2 * row["passes"]


def test_conditions_and_table(result: Any) -> None:
    output, written = result
    assert {"command", "device", "torch", "triton", "cachedit", "commit"} <= set(written["conditions"])
    assert "| forecast_1 | small | 4 | 4 | 14 |" in output


def test_no_gpu_is_said() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "benchmarks" / "kernels.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert "Allowed here: --device cpu" in done.stderr


def test_the_benchmark_does_not_pass_for_another_library() -> None:
    """Its folder comes first on the path of every benchmark, and transformers looks for a library called "kernels"."""
    code = "import kernels; print([name for name in vars(kernels) if not name.startswith('_')])"
    for folders in ([ROOT / "benchmarks"], [ROOT / "benchmarks", ROOT], [ROOT, ROOT / "benchmarks"]):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd="/")
        assert done.stdout.strip() == "[]", done.stderr


def test_the_benchmark_hands_over_to_an_installed_library(tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text("answer = 'the real one'\n")
    for folders in ([ROOT / "benchmarks", ROOT, tmp_path], [ROOT, ROOT / "benchmarks", tmp_path]):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
        command = [sys.executable, "-c", "import kernels; print(kernels.answer)"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/")
        assert done.stdout.strip() == "the real one", done.stderr


def test_steps_of_a_small_model_and_the_report(result: Any, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "benchmarks" / "end_to_end.py"), "--device", "cpu", "--models", "flux"]
    command += ["--runs", "1", "--json", str(tmp_path / "steps.json")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "steps.json").read_text())["rows"]
    assert [row["strategy"] for row in rows] == ["reuse", "forecast of three", "first block", "modules"]
    plain, three, first, modules = (row["cache_bytes"] for row in rows)
    assert three == 3 * plain  # of the image's stream alone, since the text's is not read after the stack
    assert modules > first > plain
    assert all(row["rho"] > 0 for row in rows)

    (tmp_path / "results").mkdir()
    (tmp_path / "kernels.json").write_text(json.dumps(result[1]))
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_report.py"), str(tmp_path), str(tmp_path / "results")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    (written,) = (tmp_path / "results").iterdir()
    assert set(json.loads(written.read_text())) == {"conditions", "kernels", "steps"}
    assert "| forecast_1 | small |" in done.stdout
    assert "| flux | forecast of three |" in done.stdout
