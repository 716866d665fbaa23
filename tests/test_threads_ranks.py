"""Two threads on one model, and two ranks of one model."""

from __future__ import annotations

import copy
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FLAT, SIGMAS, STEPS, Scripted, attach, drive, equal_steps, record_of
from torch import nn

import cachedit
from zoo.models import CASES
from zoo.pipelines import PIPELINES, Built, run

PLAIN, FLUX = CASES["plain"], CASES["flux"]
PATIENCE = 30.0  # seconds that a test waits before it calls a thread hung
SCRIPT = Scripted(compute=(0, 1, 5))


class Thread:
    """Runs a function in a thread; ``result`` gives what it returned or raises what it raised."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self.value: Any = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.value = self._function()
        except BaseException as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the thread hangs"

    def result(self) -> Any:
        self.join()
        if self.error is not None:
            raise self.error
        return self.value


class Gate:
    """Stops the first thread that comes through a module on its n-th pass, until it is opened."""

    def __init__(self, module: nn.Module, passes: int) -> None:
        self.reached, self.opened, self._left = threading.Event(), threading.Event(), passes
        self._handle = module.register_forward_hook(self._hook)

    def _hook(self, *_: Any) -> None:
        self._left -= 1
        if self._left == 0:
            self._handle.remove()
            self.reached.set()
            assert self.opened.wait(PATIENCE)

    def wait(self) -> None:
        assert self.reached.wait(PATIENCE), "the gate was never reached"


def plain_expected(seed: int = 0) -> list[torch.Tensor]:
    return drive(attach(PLAIN.build(), PLAIN, SCRIPT), PLAIN, seed=seed)


REFUSAL = r"another thread.*copy\.deepcopy.*take turns"

# Where thread A waits: inside a block of a computed step, or in front of the blocks of a reused one.
PLACES: dict[str, tuple[Callable[[Any], nn.Module], int]] = {
    "a block of the first step": (lambda model: model.stages[1], 1),
    "a block of a later computed step": (lambda model: model.stages[1], 3),
    "in front of a reused step": (lambda model: model.embed, 3),
}


@pytest.mark.parametrize(("where", "passes"), PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("start", [0, 3], ids=["a run of its own", "in the middle"])
def test_rule_11_a_second_thread_inside_a_model_is_refused_and_the_first_goes_on(
    where: Callable[[Any], nn.Module], passes: int, start: int
) -> None:
    model = attach(PLAIN.build(), PLAIN, SCRIPT)
    gate = Gate(where(model), passes)
    first = Thread(lambda: drive(model, PLAIN))
    gate.wait()
    second = Thread(lambda: drive(model, PLAIN, SIGMAS[start:], seed=1))
    with pytest.raises(RuntimeError, match=REFUSAL):
        second.result()
    gate.opened.set()
    assert equal_steps(first.result(), plain_expected()) == [*range(STEPS)]
    assert record_of(model).strip() == "■■□□□■□□□□"
    assert len(record_of(model).steps) == STEPS


@pytest.mark.parametrize(("where", "passes"), PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("how", ["grad", "train"])
def test_rule_11_a_bypassed_call_in_a_second_thread_is_refused_or_right(
    where: Callable[[Any], nn.Module], passes: int, how: str
) -> None:
    """A thread that wants gradients must not see the stand-ins of the thread that samples, nor stop its tracking."""
    model, twin = PLAIN.build(), PLAIN.build()
    attach(model, PLAIN, SCRIPT)
    gate = Gate(where(model), passes)
    first = Thread(lambda: drive(model, PLAIN))
    gate.wait()
    x, t = PLAIN.inputs(1, 1)["x"], torch.full((1,), 0.5)

    def bypassed() -> torch.Tensor:
        if how == "train":  # the flag is the module's, so the first thread's next call is bypassed, too
            model.train()
        with torch.set_grad_enabled(how == "grad"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return model(x, t)

    second = Thread(bypassed)
    second.join()
    if second.error is None:
        assert torch.equal(second.value, twin(x, t))
    else:
        assert "another thread" in str(second.error)
    model.eval()
    gate.opened.set()
    assert equal_steps(first.result(), plain_expected()) == [*range(STEPS)]
    assert record_of(model).strip() == "■■□□□■□□□□"


def test_rule_11_threads_that_take_turns_within_a_run_are_refused_not_mixed() -> None:
    """Thread B starts a run between two steps of A: A has lost its cache, and is told so; B's run is right."""
    model = attach(PLAIN.build(), PLAIN, SCRIPT)
    drive(model, PLAIN, SIGMAS[:3])
    theirs = Thread(lambda: drive(model, PLAIN, SIGMAS[:4], seed=1)).result()
    with pytest.raises(RuntimeError, match=REFUSAL):
        drive(model, PLAIN, SIGMAS[3:])
    assert equal_steps(theirs, plain_expected(seed=1)[:4]) == [0, 1, 2, 3]


def test_rule_11_a_second_thread_cannot_join_a_run() -> None:
    """It calls the model at the very step that comes next, or at the one that is under way."""
    model = attach(PLAIN.build(), PLAIN, SCRIPT)
    for taken, stolen in ((3, 3), (5, 4)):
        outputs = drive(model, PLAIN, SIGMAS[:taken])
        with pytest.raises(RuntimeError, match=REFUSAL):
            Thread(lambda stolen=stolen: drive(model, PLAIN, [SIGMAS[stolen]], seed=1)).result()
        assert equal_steps(outputs + drive(model, PLAIN, SIGMAS[taken:]), plain_expected()) == [*range(STEPS)]


@pytest.mark.parametrize("calls", [3, STEPS], ids=["left alone", "finished"])
def test_rule_11_a_thread_may_start_a_run_after_another_one_is_done(calls: int) -> None:
    model = attach(PLAIN.build(), PLAIN, SCRIPT)
    Thread(lambda: drive(model, PLAIN, SIGMAS[:calls])).result()
    assert equal_steps(drive(model, PLAIN, seed=1), plain_expected(seed=1)) == [*range(STEPS)]
    ours = Thread(lambda: drive(model, PLAIN, seed=0)).result()
    assert equal_steps(ours, plain_expected(seed=0)) == [*range(STEPS)]


@pytest.mark.parametrize("name", ["flux", "flux_true_cfg", "wan22"])
def test_rule_11_a_pipeline_refuses_a_second_thread(name: str) -> None:
    built = PIPELINES[name]()
    cachedit.wrap(built.pipe, "magcache", profile=FLAT)
    expected, other = run(built), run(built, seed=1)
    reached, opened = threading.Event(), threading.Event()

    def callback(pipe: Any, index: int, timestep: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        if index == 4:
            reached.set()
            assert opened.wait(PATIENCE)
        return {}

    first = Thread(lambda: run(built, callback_on_step_end=callback))
    assert reached.wait(PATIENCE)
    with pytest.raises(RuntimeError, match=REFUSAL):
        Thread(lambda: run(built, seed=1)).result()
    opened.set()
    assert torch.equal(first.result(), expected)
    assert torch.equal(Thread(lambda: run(built, seed=1)).result(), other)
    assert torch.equal(run(built), expected)


def test_rule_11_copies_run_side_by_side() -> None:
    """What the refusal advises. Both stand in the middle of their runs at once."""
    built = PIPELINES["flux"]()
    cachedit.wrap(built.pipe, "magcache", profile=FLAT)
    expected = [run(built, seed=seed) for seed in (0, 1)]
    twin = Built(copy.deepcopy(built.pipe), built.kwargs)
    barrier = threading.Barrier(2, timeout=PATIENCE)

    def callback(pipe: Any, index: int, timestep: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        barrier.wait()
        return {}

    threads = [
        Thread(lambda seed=seed, one=one: run(one, seed=seed, callback_on_step_end=callback))
        for seed, one in enumerate((built, twin))
    ]
    assert all(torch.equal(thread.result(), output) for thread, output in zip(threads, expected, strict=True))


# -- ranks --------------------------------------------------------------------------------------------------------

RANK = '''
import json
import sys

import cachedit
import torch
import torch.distributed as dist
from cachedit import Profile
from torch import nn

class Block(nn.Module):
    """Mixes its tokens with the mean over the tokens of all ranks."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.count = 0

    def forward(self, x, t):
        self.count += 1
        mean = x.mean(1, keepdim=True)
        if dist.is_initialized():
            every = [torch.empty_like(mean) for _ in range(dist.get_world_size())]
            dist.all_gather(every, mean)
            mean = torch.stack(every).mean(0)
        return x + torch.tanh(self.linear(x + mean)) * t

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x, timestep):
        for block in self.blocks:
            x = block(x, timestep)
        return x

def main(rank, world, address, name):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if world > 1:
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    profile = Profile.from_ratios([1.0, 1.01, 1.02, 1.01, 1.03, 1.0, 0.98, 1.0, 1.05, 1.0])
    times = [1 - i / 10 for i in range(10)]
    options = {
        "mag_cache": {"threshold": 0.05, "profile": profile},
        "first_block_cache": {"threshold": 0.3, "process_group": dist.group.WORLD if world > 1 else None},
    }[name]
    model = cachedit.wrap(Model().eval(), name, timesteps=times, **options)
    x = torch.stack([torch.ones(4, 8), torch.randn(4, 8)])  # half 0 is static, half 1 volatile
    speed = torch.tensor([0.0, 1.0])[:, None, None].expand(2, 4, 1)
    x, speed = [(t.flatten(0, 1) if world == 1 else t[rank])[None] for t in (x, speed)]
    with torch.no_grad():
        for time in times:
            x = x - 0.1 * speed * model(x, time)
    if world > 1:  # no rank leaves while another is still talking to it
        dist.barrier()
        dist.destroy_process_group()
    run = cachedit.last_run(model)
    return {"strip": run.strip(), "count": [block.count for block in model.blocks], "x": x[0].tolist()}

if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])))
'''


def environment() -> dict[str, str]:
    """That of a process which imports this checkout and what the tests share."""
    tests = Path(__file__).parent
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (tests.parent, tests)))}


def ranks(script: Path, *arguments: str, world: int = 2, patience: float = 240) -> list[dict[str, Any]]:
    """Run the script in ``world`` processes, each told its rank, their number and an address; what each printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, str(script)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(world), address, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(),
        )
        for rank in range(world)
    ]
    try:
        outputs = [process.communicate(timeout=patience) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * world, [
        error.decode()[-2000:] for _, error in outputs
    ]
    return [json.loads(out.decode().splitlines()[-1]) for out, _ in outputs]


@pytest.mark.parametrize("strategy", ["mag_cache", "first_block_cache"])
def test_b38_ranks_decide_alike_and_as_one_process_does(strategy: str, tmp_path: Path) -> None:
    """Half of the tokens on each rank, all_gather inside every block: ranks that disagree would hang."""
    script = tmp_path / "rank.py"
    script.write_text(RANK, encoding="utf-8")
    whole, halves = runpy.run_path(str(script))["main"](0, 1, "", strategy), ranks(script, strategy)
    assert {"■", "□"} == set(whole["strip"])
    assert [half["strip"] for half in halves] == [whole["strip"]] * 2
    computed, total = whole["strip"].count("■"), len(whole["strip"])
    first = total if strategy == "first_block_cache" else computed  # the block that is listened to runs at every step
    assert [half["count"] for half in halves] == [whole["count"]] * 2 == [[first, computed, computed]] * 2
    torch.testing.assert_close(
        torch.tensor(halves[0]["x"] + halves[1]["x"]), torch.tensor(whole["x"]), rtol=1e-5, atol=1e-5
    )
