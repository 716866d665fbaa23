"""The peer benchmark: its JSON, and the numbers that have no noise. Times are not tested."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MASK = "11110010010010010011"
COLUMNS = {
    "model", "size", "method", "run_ratio", "ms_reused", "ms_reused_floor", "extra_calls_reused",
    "extra_calls_computed", "rel_l2", "cache_bytes", "steps",
}  # fmt: skip
METHODS = ["uncached", "floor", "cachedit", "cachedit-scheduler", "diffusers-magcache"]
PEERS = ["cache-dit-f1", "cache-dit-f8"] if importlib.util.find_spec("cache_dit") else []
MOST_CALLS_REUSED, MOST_CALLS_COMPUTED = 38, 54
"""Python calls over the floor and over the plain model. Whoever needs more pays for it at every step of every run."""
ONE_RESIDUAL = 16 * 64 * 4  # tokens x width x fp32: the image stream of the tiny Flux


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """The quick run, in a process of its own: peers alter what they import."""
    file = tmp_path_factory.mktemp("peers") / "peers.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "peers.py"), "--quick", "--json", str(file)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(file.read_text()), sorted(entry.name for entry in file.parent.iterdir())


@pytest.fixture(scope="module")
def rows(quick):
    return {row["method"]: row for row in quick[1]["rows"]}


def test_json_has_every_method_and_column(quick, rows):
    _, result, files = quick
    assert [row["method"] for row in result["rows"]] == METHODS + PEERS
    assert all(set(row) == COLUMNS for row in result["rows"])
    assert {(row["model"], row["size"]) for row in result["rows"]} == {("flux", "tiny")}
    assert files == ["peers.json"]
    reuse = [row for name, row in rows.items() if name != "uncached"]
    assert all(isinstance(row["ms_reused"], float) and isinstance(row["run_ratio"], float) for row in reuse)
    assert rows["uncached"]["ms_reused"] is None
    assert rows["uncached"]["extra_calls_reused"] is None


def test_conditions_name_what_the_numbers_depend_on(quick):
    output, result, _ = quick
    conditions = result["conditions"]
    assert conditions["schedule"] == MASK
    assert conditions["threads"] == 1
    assert {"command", "cpu", "clock", "repeats", "python", "torch", "diffusers", "cachedit", "cache-dit"} <= set(
        conditions
    )
    assert "| flux | tiny | cachedit |" in output
    assert all(f"- {name}: " in output for name in conditions)


def test_every_method_computes_exactly_the_schedule(rows):
    assert rows["uncached"]["steps"] == "1" * len(MASK)
    assert {row["steps"] for name, row in rows.items() if name != "uncached"} == {MASK}


def test_calls(rows):
    floor, ours, peer = rows["floor"], rows["cachedit"], rows["diffusers-magcache"]
    assert (floor["extra_calls_reused"], floor["extra_calls_computed"]) == (0, 1)
    for row in (ours, rows["cachedit-scheduler"]):
        assert 0 < row["extra_calls_reused"] <= MOST_CALLS_REUSED < peer["extra_calls_reused"]
        assert 0 < row["extra_calls_computed"] <= MOST_CALLS_COMPUTED < peer["extra_calls_computed"]
    assert all(ours["extra_calls_reused"] < rows[name]["extra_calls_reused"] for name in PEERS)


def test_bytes_and_error(rows):
    assert rows["uncached"]["cache_bytes"] == 0
    assert {rows[name]["cache_bytes"] for name in ("floor", "cachedit", "cachedit-scheduler")} == {ONE_RESIDUAL}
    assert rows["diffusers-magcache"]["cache_bytes"] > ONE_RESIDUAL
    assert rows["uncached"]["rel_l2"] == 0
    for name in ("cachedit", "cachedit-scheduler", "diffusers-magcache"):
        assert rows[name]["rel_l2"] == pytest.approx(rows["floor"]["rel_l2"], rel=1e-3)
