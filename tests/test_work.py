"""A calibration in units: it can be interrupted and resumed, and its progress counts every run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from painter import Painter, contents
from test_threads_ranks import environment

from cachedit import FeatureStrategy, Profile, ProfileError
from cachedit.calibration import calibrate
from cachedit.calibration.checkpoint import RECORD, Checkpoint
from cachedit.calibration.work import Work
from cachedit.strategies.harmoni_ca import HarmoniCa
from cachedit.strategies.l2p import L2P
from cachedit.strategies.profiling_di_t import ProfilingDiT
from cachedit.strategy import Strategy

STEPS = 9
PROMPTS = ["a sphere", "two cubes"]
OPTIONS: dict[str, FeatureStrategy] = {
    "harmoni_ca": HarmoniCa(iterations=20),
    "l2p": L2P(interval=3),
    "profiling_di_t": ProfilingDiT(warmup=2),
}
NAMES = sorted(
    name for name, cls in Strategy.registry.items() if issubclass(cls, FeatureStrategy) and cls().profile_arrays
)


def calibrated(strategy: Any, pipe: Painter | None = None, **options: Any) -> Profile:
    arguments = {"prompts": PROMPTS, "num_inference_steps": STEPS, "seed": 3, **options}
    return calibrate(pipe or Painter(), OPTIONS.get(strategy, strategy), **arguments)


def interrupting(steps: int, told: list[tuple[int, int]] | None = None) -> Callable[[int, int, str], None]:
    """Progress that breaks off after so many steps."""

    def progress(done: int, total: int, text: str) -> None:
        if told is not None:
            told.append((done, total))
        if done == steps:
            raise KeyboardInterrupt

    return progress


# -- units --------------------------------------------------------------------------------------------------------


def test_units_are_done_once_and_come_in_the_order_of_their_keys(tmp_path: Path) -> None:
    done: list[Any] = []

    def work(key: tuple[int, str]) -> dict[str, Any]:
        done.append(key)
        if key == (2, "b") and len(done) < 3:
            raise KeyboardInterrupt
        return {"square": key[0] ** 2, "text": key[1], "row": torch.arange(key[0])}

    def session() -> list[Any]:
        checkpoint = Checkpoint(tmp_path / "kept", {"of": "squares"})
        checkpoint.open(resume=True)
        return Work(checkpoint=checkpoint).map("squares", [(3, "a"), (2, "b"), (4, "c")], work)

    with pytest.raises(KeyboardInterrupt):
        session()
    assert done == [(3, "a"), (2, "b")]
    results = session()
    assert done == [(3, "a"), (2, "b"), (2, "b"), (4, "c")]
    assert [(result["square"], result["text"]) for result in results] == [(9, "a"), (4, "b"), (16, "c")]
    assert [result["row"].tolist() for result in results] == [[0, 1, 2], [0, 1], [0, 1, 2, 3]]


def test_units_of_another_key_are_done_again(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "kept", {})
    checkpoint.open(resume=False)
    assert Work(checkpoint=checkpoint).map("n", [1, 2], lambda key: 10 * key) == [10, 20]
    assert Work(checkpoint=checkpoint).map("n", [1, 3], lambda key: -key) == [10, -3]


# -- interruption -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_calibration_is_bit_equal_and_repeats_no_finished_run(name: str, tmp_path: Path) -> None:
    """Interrupted three times: in the second prompt, in the last run, and between them."""
    whole, path = Painter(), tmp_path / "kept"
    told: list[tuple[int, int]] = []
    expected = contents(calibrated(name, whole, progress=interrupting(-1, told)))
    total = len(whole.prompts) * STEPS
    assert told[-1] == (total, total)
    pieces = [Painter() for _ in range(4)]
    for pipe, stop in zip(pieces, (STEPS + 2, total // 2, total - 1), strict=False):
        with pytest.raises(KeyboardInterrupt):
            calibrated(name, pipe, checkpoint=path, resume=pipe is not pieces[0], progress=interrupting(stop))
        assert (path / RECORD).exists()
    assert contents(calibrated(name, pieces[-1], checkpoint=path, resume=True)) == expected
    assert not path.exists()
    runs = [len(pipe.prompts) for pipe in pieces]
    if name != "harmoni_ca":  # which saves its training every so many updates, and not after every run
        assert sum(runs) <= len(whole.prompts) + 3  # the runs that were broken off


def test_progress_counts_on_where_it_was_interrupted(tmp_path: Path) -> None:
    first: list[tuple[int, int]] = []
    second: list[tuple[int, int]] = []
    with pytest.raises(KeyboardInterrupt):
        calibrated("lemica", checkpoint=tmp_path / "kept", progress=interrupting(2 * STEPS + 3, first))
    calibrated("lemica", checkpoint=tmp_path / "kept", resume=True, progress=interrupting(-1, second))
    total = (2 + 2 * (STEPS - 1)) * STEPS  # two prompts watched, and each step of both reused once
    assert first == [(done, total) for done in range(1, 2 * STEPS + 4)]
    assert second == [(2 * STEPS, total), *((done, total) for done in range(2 * STEPS + 1, total + 1))]


KILLED = """
import os, signal, sys
from painter import Painter
from cachedit.calibration import calibrate

def progress(done, total, text):
    if done == 21:  # in the third run
        os.kill(os.getpid(), signal.SIGKILL)

calibrate(Painter(), "lemica", prompts=["a sphere", "two cubes"], num_inference_steps=9, seed=3,
          checkpoint=sys.argv[1], progress=progress)
"""


def test_what_was_finished_before_a_kill_is_not_lost(tmp_path: Path) -> None:
    script, path, pipe = tmp_path / "killed.py", tmp_path / "kept", Painter()
    script.write_text(KILLED, encoding="utf-8")
    code = subprocess.run([sys.executable, script, path], env=environment(), capture_output=True).returncode
    assert code == -9
    assert sorted(file.name for file in path.iterdir()) == [RECORD, "watched-0-0.pt", "watched-0-1.pt"]
    profile = calibrated("lemica", pipe, checkpoint=path, resume=True)
    assert len(pipe.prompts) == 2 * (STEPS - 1)
    assert contents(profile) == contents(calibrated("lemica"))


# -- refusals -----------------------------------------------------------------------------------------------------


@pytest.fixture
def interrupted(tmp_path: Path) -> Path:
    """A checkpoint with one of two prompts."""
    with pytest.raises(KeyboardInterrupt):
        calibrated("magcache", checkpoint=tmp_path / "kept", progress=interrupting(STEPS + 1))
    return tmp_path / "kept"


def test_finished_runs_are_not_thrown_away_unasked(interrupted: Path) -> None:
    with pytest.raises(ValueError, match=r"kept holds 1 finished units.*allowed: resume=True \(--resume\).*Delete"):
        calibrated("magcache", checkpoint=interrupted)
    calibrated("magcache", checkpoint=interrupted, resume=True)
    assert not interrupted.exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 4}, "seed 3, now 4"),
        ({"num_inference_steps": 8}, "sampler .*'num_inference_steps': 9.*now .*'num_inference_steps': 8"),
        ({"prompts": ["a sphere"]}, r"prompts \['a sphere', 'two cubes'\], now \['a sphere'\]"),
        ({"call_options": {"output_type": "pt"}}, "call options {}, now .*output_type"),
        ({"strategy": "lemica"}, "strategy .MagCache.*now .LeMiCa"),
    ],
)
def test_a_checkpoint_of_another_calibration_is_refused(
    interrupted: Path, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"of another calibration, which had {message}.*Allowed.*delete"):
        calibrated(**{"strategy": "magcache", "checkpoint": interrupted, "resume": True, **changed})
    assert [file.name for file in interrupted.glob("*.pt")] == ["watched-0-0.pt"]


def test_a_checkpoint_of_another_model_is_refused(interrupted: Path) -> None:
    pipe = Painter()
    pipe.transformer.double()
    with pytest.raises(ValueError, match=r"dtype 'torch.float32', now 'torch.float64'"):
        calibrated("magcache", pipe, checkpoint=interrupted, resume=True)
    del pipe.transformer.float().single_transformer_blocks[-1]
    with pytest.raises(ValueError, match="fingerprint .*_blocks': 3.*now .*_blocks': 2"):
        calibrated("magcache", pipe, checkpoint=interrupted, resume=True)
    assert pipe.prompts == []


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").touch()
    with pytest.raises(ValueError, match="thesis is no checkpoint of a calibration.*allowed.*Choose another path"):
        calibrated("magcache", checkpoint=tmp_path / "thesis", resume=True)


def test_to_resume_takes_a_checkpoint() -> None:
    with pytest.raises(ValueError, match="resume=True without a checkpoint"):
        calibrated("magcache", resume=True)


def test_resume_without_anything_to_resume_begins(tmp_path: Path) -> None:
    assert contents(calibrated("magcache", checkpoint=tmp_path / "new", resume=True)) == contents(
        calibrated("magcache")
    )


def test_runs_of_which_no_profile_can_be_made_are_not_kept(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="runs of 4 steps"):
        calibrated("lemica", num_inference_steps=4, checkpoint=tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


def test_an_interruption_before_the_first_run_is_done_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        calibrated("magcache", checkpoint=tmp_path / "kept", progress=interrupting(STEPS - 1))
    assert not (tmp_path / "kept").exists()
    (tmp_path / "kept").mkdir()  # what a kill between the folder and its first file leaves
    (tmp_path / "kept" / RECORD).write_text("{}", encoding="utf-8")
    calibrated("magcache", checkpoint=tmp_path / "kept")
    assert not (tmp_path / "kept").exists()
