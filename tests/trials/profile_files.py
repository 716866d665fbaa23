"""Profile files that somebody has damaged, or made to do harm, and what becomes of them."""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import cachedit
from cachedit import Profile, ProfileError, Schedule

TINY: dict[str, Any] = {
    "schema": 1,
    "name": "tiny",
    "strategy": "mag_cache",
    "model": {"class": "Tiny", "fingerprint": {"blocks": {"blocks": 4}, "width": 32}, "names": ["me/tiny"]},
    "sampler": {"class": "FlowMatchEulerDiscreteScheduler", "num_inference_steps": 3},
    "branches": ["cond", "uncond"],
    "arrays": {"magnitude_ratio": {"cond": [1.0, 0.9, 0.8], "uncond": [1.0, 0.7, 0.6]}},
    "axes": {},
    "sigmas": [1.0, 0.6, 0.2],
    "defaults": {"threshold": 0.1},
    "provenance": {"source": "a test"},
    "versions": {"torch": "2"},
    "date": "2026-11-30",
    "command": "cachedit calibrate",
}
WHOLE: dict[str, Any] = TINY | {
    "arrays": {
        **TINY["arrays"],
        "residual_error": {"cond": [[0.0, 0.1, 0.2], [0.0, 0.2, 0.3], [0.0, 0.1, 0.4]]},
        "indicator_polynomial": {"all": [0.0, 0.0, 0.0, 1.0, 0.0]},
    },
    "axes": {"residual_error": ["step", "gap"], "indicator_polynomial": ["power"]},
}
FINGERPRINT = {"class": "Tiny", "blocks": {"blocks": 4}, "width": 32}
SCHEDULES = (Schedule(7, sigmas=tuple(np.linspace(1, 0.1, 7).tolist())), Schedule(1, sigmas=(1.0,)), Schedule(5))

HARM = "__import__('os').system('touch harm')"
JUNK: list[Any] = [
    None, True, False, 0, -1, 1, 2**63, 10**400, -(10**400), 1e308, -1e308, 1e-308, 5e-324, -0.0, float("nan"),
    float("inf"), float("-inf"), "", "x", "NaN", "1.0", "\x00", "\ud800", "../../x", "{}", HARM, [], [[]], [1.0],
    [[1.0], [1.0]], [1.0, "a"], {}, {"a": {}}, {"": [1.0]}, {"__class__": "os"}, ["step"], ["gap", "step"],
    {"py/object": "os.system", "py/reduce": [HARM]},
]  # fmt: skip
NUMBERS = (0.0, -1.0, 1.0, 0.5, 2.0, 1e-12, 1e12, 1e308, -1e308, 1e-308, 5e-324, math.nan, math.inf, -math.inf)
PIECES = ["", '"', "[", "]", "{", "}", ",", ":", "9", "-", "e", ".", "\\", "\ud800", "NaN", "Infinity", "1e999", "\x00"]
DEEP, DEPTHS = "deep ", (2, 40, 300, 480, 700, 950, 3000, 100_000)
FORBIDDEN = (
    "exec", "compile", "os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "pickle.find_class",
    "socket.connect", "ctypes.dlopen",
)  # fmt: skip


def mutated(draw: random.Random) -> bytes:
    """The whole profile with nodes replaced, removed, repeated or wrapped, with characters or bytes changed, or cut."""
    data = copy.deepcopy(WHOLE)
    for _ in range(draw.randrange(4)):
        _change(data, draw)
    text = list(json.dumps(data))
    if draw.random() < 0.4:
        for _ in range(draw.randrange(1, 4)):
            place = draw.randrange(len(text))
            text[place : place + draw.randrange(3)] = draw.choice(PIECES)
    whole = "".join(text)
    for depth in DEPTHS:
        opening, closing = draw.choice((("[", "]"), ('{"a": ', "}")))
        whole = whole.replace(f'"{DEEP}{depth}"', opening * depth + "1.0" + closing * depth)
    raw = bytearray(whole.encode("utf-8", "surrogatepass"))
    if draw.random() < 0.2:
        for _ in range(draw.randrange(1, 4)):
            raw[draw.randrange(len(raw))] = draw.randrange(256)
    if draw.random() < 0.1:
        del raw[draw.randrange(len(raw)) :]
    return bytes(raw)


def _change(data: dict[str, Any], draw: random.Random) -> None:
    """Change one node at any depth."""
    node: Any = data
    while node:
        key = draw.choice(list(node) if isinstance(node, dict) else range(len(node)))
        if not isinstance(node[key], (dict, list)) or not node[key] or draw.random() < 0.3:
            break
        node = node[key]
    else:
        return
    kind = draw.randrange(9)
    if kind > 6:
        _change_numbers(data, draw)
    elif kind == 6:
        _swap_tables(data, draw)
    elif kind == 0:
        del node[key]
    elif kind == 1 and isinstance(node[key], list):
        node[key] = node[key] * draw.choice((0, 2, 1000))
    elif kind == 2:
        node[key] = draw.choice(([node[key]], {"cond": node[key]}, f"{DEEP}{draw.choice(DEPTHS)}"))
    elif kind == 3:
        data.setdefault("axes", {})
        if isinstance(data["axes"], dict):
            axis = draw.choice((["step"], ["step", "gap"], ["budget"], ["a"] * 500, f"{DEEP}300"))
            data["axes"][draw.choice(["magnitude_ratio", "residual_error", "other"])] = axis
    else:
        node[key] = draw.choice(JUNK)


def _change_numbers(data: dict[str, Any], draw: random.Random) -> None:
    """Set a few numbers of the tables or of the noise levels to others."""
    node: Any = data.get(draw.choice(["arrays", "arrays", "sigmas"]))
    while isinstance(node, (dict, list)) and node:
        key = draw.choice(list(node) if isinstance(node, dict) else range(len(node)))
        if isinstance(node[key], (int, float)):
            node[key] = draw.choice(NUMBERS)
            return
        node = node[key]


def _swap_tables(data: dict[str, Any], draw: random.Random) -> None:
    """Give a table the name of another one, and perhaps its axes."""
    names = draw.sample(["magnitude_ratio", "residual_error", "indicator_polynomial"], 2)
    for key in ("arrays", "axes")[: draw.choice((1, 2))]:
        tables = data.get(key)
        if isinstance(tables, dict):
            swapped = dict(zip(names, reversed(names), strict=True))
            data[key] = {swapped.get(name, name): table for name, table in tables.items()}


def use(path: Path) -> str:
    """Load a profile and take from it what runs take; tells what came of it.

    Raises:
        AssertionError: what was loaded is not valid after all.
        Exception: anything but a ProfileError, or a ValueError that cachedit itself raises, is a fault.
    """
    try:
        profile = Profile.load(path)
    except ProfileError:
        return "refused when it was read"
    assert Profile.from_json(profile.to_json()) == profile, "what is saved is not what was loaded"
    try:
        profile.check_fits(FINGERPRINT)
        for schedule, array in itertools.product(SCHEDULES, profile.arrays):
            _consult(profile, array, schedule)
    except ValueError as error:
        *_, last = traceback.extract_tb(error.__traceback__)
        if Path(last.filename).parent != Path(cachedit.__file__).parent:
            raise
        return "refused when it was used"
    return "valid"


def _consult(profile: Profile, array: str, schedule: Schedule) -> None:
    if array == "magnitude_ratio":
        for rule in ("sigma", "nearest"):
            for row in profile.magnitude_ratios(schedule, rule).values():  # type: ignore[arg-type]
                assert len(row) == schedule.num_steps
                assert all(0 < ratio < math.inf for ratio in row)
    elif array == "residual_error":
        profile.errors(array, schedule)
    if profile.axes.get(array, ["step"])[0] == "step":
        rows = profile.rows(array, schedule).values()
        assert {len(row) for row in rows} == {schedule.num_steps}


class Watch:
    """Hears of everything that Python reports to audit hooks and that no reader of data has to do.

    A hook cannot be taken off again; outside of ``with`` it does nothing.
    """

    def __init__(self) -> None:
        self.active, self.heard = False, Counter[str]()
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.active and (event in FORBIDDEN or (event == "open" and "w" in str(arguments[1]))):
            self.heard[event] += 1

    def __enter__(self) -> Watch:
        self.active = True
        return self

    def __exit__(self, *_: object) -> None:
        self.active = False


def fuzz(seeds: Sequence[int], folder: Path) -> dict[str, Any]:
    """Write and use a mutated file per seed.

    Args:
        seeds: one per file.
        folder: where the files are written, one over the other.

    Returns:
        How many were refused or valid, CPU seconds of the slowest, and forbidden events by name.

    Raises:
        AssertionError: something else than an error of cachedit or a valid profile; tells seed and contents.
    """
    path, found, slowest, watch = folder / "a.json", Counter[str](), 0.0, Watch()
    path.write_text(json.dumps(WHOLE))
    assert use(path) == "valid"  # and everything that is imported late has been imported
    for seed in seeds:
        path.write_bytes(mutated(random.Random(seed)))
        began = time.thread_time()
        try:
            with watch, warnings.catch_warnings():
                warnings.simplefilter("error")
                found[use(path)] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}, file {path.read_bytes()[:3000]!r}") from error
        slowest = max(slowest, time.thread_time() - began)
    return {"files": len(seeds), **found, "slowest_cpu_s": slowest, "forbidden_events": dict(watch.heard)}
