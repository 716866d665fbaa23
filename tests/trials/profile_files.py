"""Profile files that somebody has damaged, or made to do harm, and what becomes of them."""

from __future__ import annotations

import copy
import dataclasses
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

import cachedit
from cachedit import Profile, ProfileError
from zoo.models import CASES

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
STEPS, BLOCKS, WIDTH = 5, 4, 32  # of the calibration, and of the model
TABLE = [[0.01 * gap * (1 + 0.1 * step) for gap in range(4)] for step in range(STEPS)]
ARRAYS: dict[str, dict[str, list[Any]]] = {
    "magnitude_ratio": {"cond": [1.0, 0.9, 0.8, 0.9, 1.1], "uncond": [1.0, 0.7, 0.6, 0.7, 0.9]},
    "residual_error": {"cond": TABLE, "uncond": TABLE},
    "output_error": {"cond": TABLE},
    "module_error": {"attn": TABLE, "mlp": TABLE},
    "amplification": {"all": [1.0, 2.0, 3.0, 2.0, 1.0]},
    "sensitivity": {"all": [1.0, 2.0, 3.0, 2.0, 1.0]},
    "response": {"all": [0.2] * STEPS},
    "residual_distance": {"cond": [1e-4 * (j - i) ** 2 for i in range(STEPS) for j in range(i + 1, STEPS)]},
    "residual_square": {"cond": [1.0] * STEPS},
    "frontier": {
        "steps": [5, 5], "nfe": [2, 3], "predictor": [0, 1], "criterion": [0, 1], "cost": [0.2, 0.1],
        "psnr": [30.0, 33.0], "psnr_spread": [1.0, 2.0],
    },
    "time": {"reused": [0.1], "outside": [0.5], "keeping": [0.01]},
    "step_scale": {"all": [1.0] * STEPS},
    "correction_mask": {"all": [1, 0, 0, 1, 0]},
    "correction_scale": {"": [[1.0], [1.1], [1.0], [1.2], [1.0]]},
    "correction_shift": {"": [[0.0], [0.1], [0.0], [0.2], [0.0]]},
    "indicator_polynomial": {"all": [0.0, 0.0, 0.0, 1.0, 0.0]},
    "channel_cluster": {"all": [k % 3 for k in range(WIDTH)]},
    "cluster_solver": {"all": [0, 1, 2]},
    "block_drift": {"cond": [0.1 * k for k in range(BLOCKS)], "uncond": [0.2] * BLOCKS},
    "forecast_weights": {"all": [[0.0, 0.5, 0.5]] * STEPS},
    "router": {"mlp": [[1.0] * BLOCKS, *[[0.0, 1.0, 0.0, 0.05]] * (STEPS - 1)]},
    "impact": {str(k): [1.0 + k] * STEPS for k in range(3)},
}  # fmt: skip
AXES = {
    "residual_distance": ["pair"], "frontier": ["budget"], "time": ["value"], "indicator_polynomial": ["power"],
    "channel_cluster": ["channel"], "cluster_solver": ["cluster"], "block_drift": ["block"],
    "forecast_weights": ["step", "term"], "router": ["step", "module"],
    **dict.fromkeys(["residual_error", "output_error", "module_error"], ["step", "gap"]),
    **dict.fromkeys(["correction_scale", "correction_shift"], ["step", "channel"]),
}  # fmt: skip
BESIDE = {
    "auto": ["frontier", "time", "response"],
    "mix_cache": ["magnitude_ratio"],
}  # read too, or there to be swapped
WAN = CASES["wan"]
MODEL = WAN.build()
STRATEGIES = sorted(name for name, cls in cachedit.strategies().items() if getattr(cls, "profile_arrays", ()))
DEFAULTS = {"auto": {"terms": 2}, "ertacache": {"threshold": 0.03}, "cache_quant": {"interval": 4}}
CALIBRATED: dict[str, Any] = TINY | {
    "model": {
        "class": "WanTransformer3DModel",
        "fingerprint": {"blocks": {"blocks": BLOCKS}, "width": WIDTH},
        "names": ["me"],
    },
    "sigmas": [1.0, 0.8, 0.6, 0.4, 0.2],
}


def whole(strategy: str) -> dict[str, Any]:
    """A profile for the strategy, and with an array or two that others read."""
    arrays = [*cachedit.strategies()[strategy].profile_arrays, *BESIDE.get(strategy, ["residual_error"])]  # type: ignore[attr-defined]
    return CALIBRATED | {
        "strategy": strategy,
        "arrays": {name: ARRAYS[name] for name in arrays},
        "axes": {name: AXES[name] for name in arrays if name in AXES},
        "defaults": DEFAULTS.get(strategy, {}),
    }


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


def mutated(profile: dict[str, Any], draw: random.Random) -> bytes:
    """The profile reshaped, with nodes replaced, removed or repeated, with characters or bytes changed, or cut."""
    data = json.loads(json.dumps(profile))
    if draw.random() < 0.4:
        draw.choice((_reshape, _recommend))(data, draw)
    for _ in range(draw.randrange(3)):
        _change(data, draw)
    text = list(json.dumps(data))
    if draw.random() < 0.2:
        for _ in range(draw.randrange(1, 4)):
            place = draw.randrange(len(text))
            text[place : place + draw.randrange(3)] = draw.choice(PIECES)
    whole = "".join(text)
    for depth in DEPTHS:
        opening, closing = draw.choice((("[", "]"), ('{"a": ', "}")))
        whole = whole.replace(f'"{DEEP}{depth}"', opening * depth + "1.0" + closing * depth)
    raw = bytearray(whole.encode("utf-8", "surrogatepass"))
    if draw.random() < 0.1:
        for _ in range(draw.randrange(1, 4)):
            raw[draw.randrange(len(raw))] = draw.randrange(256)
    if draw.random() < 0.05:
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
            data["axes"][draw.choice([*_names(data), "other"])] = axis
    else:
        node[key] = copy.deepcopy(draw.choice(JUNK))


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
    names = draw.sample([*_names(data), "other", "another"], 2)
    for key in ("arrays", "axes")[: draw.choice((1, 2))]:
        tables = data.get(key)
        if isinstance(tables, dict):
            swapped = dict(zip(names, reversed(names), strict=True))
            data[key] = {swapped.get(name, name): table for name, table in tables.items()}


def _reshape(data: dict[str, Any], draw: random.Random) -> None:
    """Give a table an axis more or one less, another length, other keys, or fewer of them."""
    name = draw.choice([*data["arrays"]])
    table, axes = data["arrays"][name], data["axes"].get(name, ["step"])
    kind = draw.randrange(7)
    if kind == 0:
        data["axes"][name] = [*axes, draw.choice(["step", "gap", "term"])]
        changed = {key: [[value] for value in row] for key, row in table.items()}
    elif kind == 1:
        data["axes"][name] = axes[:1]
        changed = {key: [_first(value) for value in row] for key, row in table.items()}
    elif kind == 2:
        cut = draw.randrange(1, 4)
        changed = {key: row[:cut] for key, row in table.items()}
    elif kind == 3:
        changed = {key: row[k:] for k, (key, row) in enumerate(table.items())}
    elif kind == 4:
        changed = {
            key: [value * 3 if isinstance(value, list) else value for value in row] for key, row in table.items()
        }
    elif kind == 5:
        changed = {draw.choice(["cond", "mlp", "0", "x"]): row for row in table.values()}
    else:
        changed = dict([*table.items()][1:])
    data["arrays"][name] = changed


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else value


def _recommend(data: dict[str, Any], draw: random.Random) -> None:
    """Recommend something for an option of the strategy."""
    options = [field.name for field in dataclasses.fields(cachedit.strategies()[data["strategy"]])]
    data["defaults"] = {draw.choice(options): copy.deepcopy(draw.choice([*JUNK, *NUMBERS, 2, 3]))}


def _names(data: dict[str, Any]) -> list[str]:
    """Those of the tables, if they are still there."""
    return [*data["arrays"]] if isinstance(data.get("arrays"), dict) else []


def use(path: Path, strategy: str, steps: int = STEPS) -> str:
    """Load a profile, wrap a model with it and run that; tells what came of it.

    Raises:
        AssertionError: what was loaded is not valid after all.
        Exception: anything but a ProfileError at the wrap, or later a ValueError that cachedit raises, is a fault.
    """
    try:
        profile = Profile.load(path)
    except ProfileError:
        return "refused when it was read"
    assert Profile.from_json(profile.to_json()) == profile, "what is saved is not what was loaded"
    try:
        cachedit.wrap(MODEL, strategy, profile=profile, num_inference_steps=steps, few_step_guard=False)
    except ProfileError:
        return "refused when it was wrapped"
    try:
        for k in range(steps):
            WAN.call(MODEL, 1 - k / steps)
    except ValueError as error:
        *_, last = traceback.extract_tb(error.__traceback__)
        if not (last.line or "").startswith("raise "):
            raise
        return "refused when it was run"
    finally:
        cachedit.unwrap(MODEL)
    return "valid"


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
    for strategy in STRATEGIES:
        path.write_text(json.dumps(whole(strategy)))
        assert use(path, strategy) == "valid", strategy  # and everything that is imported late has been imported
    for seed in seeds:
        draw = random.Random(seed)
        strategy, steps = draw.choice(STRATEGIES), draw.choice((STEPS, STEPS, 7))
        path.write_bytes(mutated(whole(strategy), draw))
        began = time.thread_time()
        try:
            with watch, warnings.catch_warnings():
                warnings.simplefilter("error")
                warnings.filterwarnings("ignore", message="cachedit: ")
                found[use(path, strategy, steps)] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}, {strategy}: {error!r}, file {path.read_bytes()[:3000]!r}") from error
        slowest = max(slowest, time.thread_time() - began)
    return {"files": len(seeds), **found, "slowest_cpu_s": slowest, "forbidden_events": dict(watch.heard)}
