"""The video benchmark: its JSON, and the numbers that have no noise. Times are not tested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("video") / "video.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "video.py"), "--quick", "--json", str(file)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "against recomputing all" in done.stdout
    return json.loads(file.read_text())


def test_every_method_has_a_time_for_every_chunk(quick: dict[str, Any]) -> None:
    assert [row["method"] for row in quick["rows"]][:2] == ["cached", "cached, window"]
    assert len(quick["rows"]) == 8
    assert all(len(row["chunk_ms"]) == 4 and min(row["chunk_ms"]) > 0 for row in quick["rows"])


def test_bytes_and_memory(quick: dict[str, Any]) -> None:
    assert quick["bytes_over_fp32"]["cached, window, int8"] == (48 + 4) / (4 * 48)
    assert quick["memory"]["cache_bytes"][0] == quick["memory"]["cache_bytes"][1] == 2 * 4 * 12 * 36 * 192 * 4
    assert quick["memory_flat"] is True


def test_the_kept_results() -> None:
    kept = json.loads((ROOT / "benchmarks" / "results" / "video-cpu.json").read_text())
    assert kept["speedup_total"] >= 3.9
    assert kept["speedup_last_chunk"] >= 6
    assert kept["speedup_vs_window"] >= 2.3
    assert kept["over_absolute"]["cached, window, sink_shift"] <= 1.05
    assert kept["over_absolute"]["cached, window, int8"] <= 1.10
    assert kept["bytes_over_fp32"]["cached, window, int8"] <= 0.3
