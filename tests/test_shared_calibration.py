"""Calibration by several processes: the profile of one, and one rank's failure is everybody's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from painter import Painter
from rank_calibration import STRATEGIES, calibrated
from test_threads_ranks import environment, ranks

import cachedit
from cachedit.calibration.ranks import Ranks, device_of_rank

SCRIPT = Path(__file__).with_name("rank_calibration.py")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks saw, in everything that they went through together."""
    return ranks(SCRIPT, str(tmp_path_factory.mktemp("ranks")))


def test_two_ranks_make_the_profile_of_one_and_share_its_runs(seen: list[dict[str, Any]]) -> None:
    for name in STRATEGIES:
        alone = calibrated(name)
        assert [rank["profiles"][name] == alone for rank in seen] == [True, True], name
    # Three prompts are watched by two and one at every stage; then 8 steps of each, or two runs of every prompt.
    wanted = {"lemica": (2 + 12, 1 + 12), "ertacache": (6 + 3, 3 + 3), "cachequant": (4 + 3, 2 + 3), "hyca": (2, 1)}
    assert {name: tuple(rank["runs"][name] for rank in seen) for name in STRATEGIES} == wanted


def test_the_main_process_tells_the_progress_of_all(seen: list[dict[str, Any]]) -> None:
    main, other = (rank["told"] for rank in seen)
    assert other == []
    totals = [9 * 27, 9 * 15, 9 * 12, 9 * 3]
    ends = [now for now, then in zip(main, [*main[1:], [0, 0]], strict=True) if then[0] < now[0]]
    assert ends == [[total, total] for total in totals]
    assert main[:18] == [[done, totals[0]] for done in range(1, 10)] + [[18, 243]] + [
        [done, totals[0]] for done in range(19, 27)
    ]


@pytest.mark.parametrize(
    ("how", "failing", "own", "others", "kept"),
    [
        ("failed", 1, ["MemoryError", "out of memory"], "RuntimeError", 9),
        ("refused", 1, ["ProfileError", "zero features"], "ProfileError", 0),
        ("interrupted", 0, ["KeyboardInterrupt", ""], "KeyboardInterrupt", 7),
        ("stopped", 1, ["Stop", "now"], "RuntimeError", 9),
    ],
)
def test_a_rank_that_fails_makes_all_fail_with_its_reason(
    seen: list[dict[str, Any]], how: str, failing: int, own: list[str], others: str, kept: int
) -> None:
    """In its fifth run; what all finished in the turns before is kept, and resuming gives the whole profile."""
    mine, theirs = seen[failing][how], seen[1 - failing][how]
    assert mine[:2] == own
    assert theirs[:2] == [others, f"rank {failing} of 2 failed: {own[0]}: {own[1]}"]
    assert [mine[2], theirs[2]] == [kept, kept]
    assert mine[3] == theirs[3] == seen[0]["profiles"]["lemica"]


def test_a_process_alone_is_the_main_one_and_chooses_its_device() -> None:
    assert Ranks.here() == Ranks(0, 1, None)
    assert Ranks().is_main
    assert device_of_rank() is None


LAUNCHED = """
import json
import sys
from pathlib import Path
from painter import Painter
from rank_calibration import calibrated
import cachedit
from cachedit.calibration.ranks import Ranks, device_of_rank

pipe, device = Painter(), device_of_rank()
profile = calibrated("magcache", pipe)
ranks = Ranks.here()
found = json.dumps([ranks.index, ranks.count, device, pipe.prompts, profile])
Path(sys.argv[1], f"{ranks.index}.json").write_text(found, encoding="utf-8")
"""


def test_processes_of_accelerate_find_each_other(tmp_path: Path) -> None:
    script = tmp_path / "launched.py"
    script.write_text(LAUNCHED, encoding="utf-8")
    launcher = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    options = ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    ran = subprocess.run(
        [sys.executable, *launcher, *options, script, tmp_path],
        env=environment() | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr.decode()
    found = [json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1)]
    alone = calibrated("magcache")
    assert found == [
        [0, 2, "cpu:0", ["a sphere", "a cone"], alone],
        [1, 2, "cpu:0", ["two cubes"], alone],
    ]


def test_the_package_is_a_command() -> None:
    command = [sys.executable, "-m", "cachedit", "--version"]
    printed = subprocess.run(command, env=environment(), check=True, capture_output=True).stdout.decode()
    assert printed.strip() == f"cachedit {cachedit.__version__}"


def test_ranks_that_share_one_model_are_refused() -> None:
    pipe = Painter()
    mesh = SimpleNamespace(get_group=lambda: "a group")
    context = SimpleNamespace(_flattened_mesh=mesh)  # as diffusers' enable_parallelism leaves it
    pipe.transformer.__dict__["_parallel_config"] = SimpleNamespace(context_parallel_config=context)
    with pytest.raises(ValueError, match="share the tokens of one model.*allowed: a whole model per process"):
        calibrated("magcache", pipe)
    assert pipe.prompts == []
