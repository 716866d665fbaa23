"""The forecast and the capture: references against the formula, kernels against the references."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import STEPS, Line, drive
from kernel_numbers import close, normal, several
from torch.utils._python_dispatch import TorchDispatchMode

import cachedit
from cachedit.kernels import capture, forecast
from zoo.models import CASES

ROOT = Path(__file__).parents[1]
SHAPES = [(1,), (1, 1, 1), (2, 5, 64), (3, 7, 37), (1, 9, 1100), (2, 3, 4, 6)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


# -- the forecast ---------------------------------------------------------------------------------------------------


def test_forecast_by_hand() -> None:
    history = [torch.tensor([1.0, 1.0]), torch.tensor([10.0, 20.0])]
    x = torch.tensor([1.0, 2.0])
    assert forecast(x, history, torch.tensor([2.0, -1.0])).tolist() == [-7, -16]
    assert forecast(None, history, torch.tensor([2.0, -1.0])).tolist() == [-8, -18]
    assert forecast(x, history, torch.tensor([[0.0, 1.0], [1.0, 0.0]])).tolist() == [11, 3]
    assert forecast(x, history).tolist() == [11, 22]
    assert forecast(None, history) is history[-1]
    assert x.tolist() == [1, 2]
    assert history[1].tolist() == [10, 20]


def test_forecast_is_rounded_once() -> None:
    # bf16 has no odd numbers beyond 256: rounded after every term, 256 + 1 + 1 stays 256.
    x, one = torch.tensor([256.0], dtype=torch.bfloat16), torch.tensor([1.0], dtype=torch.bfloat16)
    assert forecast(x, [one, one], torch.ones(2)).item() == 258


def test_every_sample_may_have_its_own_weights() -> None:
    x, history = torch.zeros(2, 3, 4), [torch.ones(2, 3, 4)]
    found = forecast(x, history, torch.tensor([[[[2.0]], [[3.0]]]]))
    assert found[0].eq(2).all()
    assert found[1].eq(3).all()


@pytest.mark.parametrize("seed", range(20))
def test_forecast_of_random_shapes_is_the_sum(seed: int) -> None:
    draw = random.Random(seed)
    shape = tuple(draw.randint(1, 9) for _ in range(draw.randint(1, 4)))
    count, dtype = draw.randint(1, 9), draw.choice([*DTYPES, torch.float64])
    x, history = normal(*shape, dtype=dtype), several(shape, count, dtype)
    weights = normal(count, *draw.choice([(), shape[-1:], (1,) * len(shape)]), seed=99)
    terms = [w.double() * r.double() for w, r in zip(weights, history, strict=True)]
    wanted = x.double() + torch.stack(terms).sum(0)
    close(forecast(x, history, weights), wanted.to(dtype))
    close(forecast(None, history, weights), (wanted - x.double()).to(dtype))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("count", "dtype"),
    [*((count, torch.float32) for count in (1, 2, 3, 4, 8)), (3, torch.bfloat16), (2, torch.float16)],
    ids=str,
)
def test_forecast_kernel(interpreter: Any, shape: tuple[int, ...], count: int, dtype: torch.dtype) -> None:
    file = interpreter("forecast")
    x, history = normal(*shape, dtype=dtype), several(shape, count, dtype)
    for weights in (normal(count, seed=99), normal(count, shape[-1], seed=99)):
        close(file._launch(x, history, weights), file._reference(x, history, weights))
        close(file._launch(None, history, weights), file._reference(None, history, weights))
        assert file._launch(x, history, torch.zeros_like(weights)).equal(x)


def test_forecast_kernel_on_other_layouts(interpreter: Any) -> None:
    file = interpreter("forecast")
    dense = normal(2, 6, 4, 5)
    layouts = [
        dense, dense.to(memory_format=torch.channels_last), dense.transpose(1, 3).contiguous().transpose(1, 3),
        normal(2, 6, 4, 10)[..., ::2], normal(2, 12, 4, 5)[:, 3:9], normal(6, 4, 5).expand(2, 6, 4, 5),
    ]  # fmt: skip
    for x in layouts:
        for other in layouts:
            for weights in (torch.tensor([0.5, -2.0]), normal(2, 5)):
                close(file._launch(x, [other, x], weights), file._reference(x, [other, x], weights))


@pytest.mark.parametrize("case", ["long history", "weights of samples", "fp64", "empty", "mixed dtypes"])
def test_forecast_launch_of_anything_else(interpreter: Any, case: str) -> None:
    file, shape = interpreter("forecast"), (2, 3, 8)
    x, history, weights = normal(*shape), several(shape, 2), normal(2)
    if case == "long history":
        history, weights = several(shape, 9), normal(9)
    elif case == "weights of samples":
        weights = normal(2, 2, 1, 1)
    elif case == "fp64":
        x, history = x.double(), [r.double() for r in history]
    elif case == "empty":
        x, history = x[:0], [r[:0] for r in history]
    else:
        history = [history[0].bfloat16(), history[1].half()]
    close(file._launch(x, history, weights), file._reference(x, history, weights))


def test_forecast_says_what_does_not_fit() -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"got residuals of shape \[3\]; allowed: \[2, 3\]"):
        forecast(x, [torch.zeros(3)], torch.ones(1))
    with pytest.raises(ValueError, match="got 1 residuals and 2 weights"):
        forecast(x, [x], torch.ones(2))
    with pytest.raises(RuntimeError, match="no backward pass.*torch.no_grad"):
        forecast(x, [x.clone().requires_grad_()], torch.ones(1))
    with torch.no_grad():
        assert not forecast(x, [x.clone().requires_grad_()], torch.ones(1)).requires_grad


# -- the capture ----------------------------------------------------------------------------------------------------


def test_capture_by_hand() -> None:
    entering, leaving = torch.tensor([[1.0, -1.0]]), torch.tensor([[4.0, 3.0]])
    residual, found = capture(entering, leaving, torch.tensor([[6.0, 8.0]]))
    assert residual.tolist() == [[3, 4]]
    assert {name: value.tolist() for name, value in found._asdict().items()} == {
        "norm": [5], "previous_norm": [10], "product": [50], "leaving": [7], "change": [7], "previous": [14],
    }  # fmt: skip
    residual, found = capture(entering, leaving)
    assert residual.tolist() == [[3, 4]]
    assert [value.item() for value in found] == [5, 0, 0, 7, 0, 0]


def test_statistics_are_of_the_residual_that_is_kept() -> None:
    # 256 - 0.5 is 255.5 in fp32 and 256 in bf16
    entering, leaving = torch.tensor([0.5], dtype=torch.bfloat16), torch.tensor([256.0], dtype=torch.bfloat16)
    residual, found = capture(entering, leaving, torch.zeros(1, dtype=torch.bfloat16))
    assert residual.item() == found.norm.item() == found.change.item() == 256


def test_the_kernel_s_statistics_are_of_the_residual_that_is_kept(interpreter: Any) -> None:
    entering, leaving = torch.full((1, 1), 0.5).bfloat16(), torch.full((1, 1), 256.0).bfloat16()
    residual, sums = interpreter("capture")._launch(entering, leaving, torch.zeros_like(leaving))
    assert residual.item() in (255, 256)  # the interpreter cuts off what a GPU rounds
    assert sums[0, [0, 4]].tolist() == [residual.item()] * 2


def test_capture_makes_the_sums_that_are_asked_for() -> None:
    entering, leaving, previous = several((2, 3, 5), 3, torch.float32)
    _, every = capture(entering, leaving, previous)
    for name in every._fields:
        _, found = capture(entering, leaving, previous, [name])
        assert getattr(found, name).equal(getattr(every, name))
        assert all(x.isnan().all() for other, x in found._asdict().items() if other != name)
    with pytest.raises(ValueError, match=r"capture got sums \['norms'\]; allowed: norm, previous_norm, product"):
        capture(entering, leaving, previous, ["norms"])


@pytest.mark.parametrize("seed", range(20))
def test_capture_of_random_shapes_is_its_sums(seed: int) -> None:
    draw = random.Random(seed)
    shape = tuple(draw.randint(1, 9) for _ in range(draw.randint(1, 4)))
    dtype = draw.choice([*DTYPES, torch.float64])
    entering, leaving, previous = several(shape, 3, dtype)
    residual, found = capture(entering, leaving, previous)
    assert residual.equal(leaving - entering)
    now, before, left = residual.double(), previous.double(), leaving.double()
    wanted = (
        now.square().sum(-1).sqrt(), before.square().sum(-1).sqrt(), (now * before).sum(-1), left.abs().sum(-1),
        (now - before).abs().sum(-1), before.abs().sum(-1),
    )  # fmt: skip
    for ours, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("first", [True, False])
def test_capture_kernel(interpreter: Any, shape: tuple[int, ...], dtype: torch.dtype, first: bool) -> None:
    file = interpreter("capture")
    entering, leaving, previous = several(shape, 3, dtype)
    ours = file._launch(entering, leaving, None if first else previous)
    wanted = file._reference(entering, leaving, None if first else previous)
    close(ours[0], wanted[0])
    assert ours[1].shape == wanted[1].shape
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    assert (ours[1] - wanted[1]).norm() <= tolerance * wanted[1].norm()
    assert file._launch(entering, leaving, previous)[1].equal(file._launch(entering, leaving, previous)[1])


@pytest.mark.parametrize("case", ["strided", "mixed dtypes", "fp64", "empty"])
def test_capture_launch_of_anything_else(interpreter: Any, case: str) -> None:
    file = interpreter("capture")
    entering, leaving, previous = several((2, 6, 10), 3)
    if case == "strided":
        entering, leaving, previous = (
            entering[..., ::2],
            leaving[:, :, :5],
            previous.mT.contiguous().mT[..., 5:],
        )
    elif case == "mixed dtypes":
        entering, previous = entering.half(), previous.bfloat16()
    elif case == "fp64":
        entering, leaving, previous = entering.double(), leaving.double(), previous.double()
    else:
        entering, leaving, previous = entering[:, :0], leaving[:, :0], previous[:, :0]
    for ours, wanted in zip(
        file._launch(entering, leaving, previous), file._reference(entering, leaving, previous), strict=True
    ):
        close(ours, wanted)


def test_capture_says_what_does_not_fit() -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"capture got tensors of shape \[3\]; allowed: \[2, 3\]"):
        capture(torch.zeros(3), x)
    with pytest.raises(RuntimeError, match="no backward pass"):
        capture(x, x, x.clone().requires_grad_())


def test_not_finite_shows_in_the_norm() -> None:
    for bad in (math.nan, math.inf):
        leaving = torch.tensor([[1.0, 2.0], [bad, 0.0]])
        assert capture(torch.zeros(2, 2), leaving)[1].norm.isfinite().tolist() == [True, False]


# -- as operations of torch -----------------------------------------------------------------------------------------


def test_registration() -> None:
    x, history = normal(2, 5, 8), several((2, 5, 8), 2)
    turned = x.transpose(0, 1)
    operations = torch.ops.cachedit
    for arguments in (
        (x, history, torch.ones(2)), (None, history, torch.ones(2, 8)), (turned, [turned, turned], torch.ones(2)),
    ):  # fmt: skip
        torch.library.opcheck(operations.forecast.default, arguments)
    for arguments in ((x, *history), (x, history[0], None), (turned, turned, turned)):
        torch.library.opcheck(operations.capture.default, arguments)


def test_compiled_in_one_graph_for_all_weights() -> None:
    def model(x: torch.Tensor, history: list[torch.Tensor], weights: torch.Tensor) -> Any:
        left = forecast(x, history, weights) * 2
        return left, capture(x, left, history[0])

    graphs = 0

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    x, history = normal(2, 5, 8), several((2, 5, 8), 2)
    for seed in range(3):
        weights = normal(2, seed=seed)
        left, (residual, found) = compiled(x, history, weights)
        assert left.equal(forecast(x, history, weights) * 2)
        assert residual.equal(left - x)
        assert found.norm.equal(capture(x, left, history[0])[1].norm)
    assert graphs == 1
    torch._dynamo.reset()


def test_without_triton() -> None:
    code = """
        import sys
        sys.modules["triton"] = None
        import torch, cachedit
        from cachedit.kernels import KVCache, cached_attention, capture, forecast
        x = torch.ones(1, 2, 1, 4)
        assert forecast(x, [x, x], torch.ones(2)).eq(3).all()
        assert capture(x, x)[1].leaving.eq(4).all()
        cache, slots = KVCache.empty(1, 2, 1, 4, x.dtype), torch.tensor([1, 0])
        assert cached_attention(x, x, x, None, None, slots, cache).eq(1).all()
        print("ok")
    """
    code = "\n".join(line.strip() for line in code.splitlines())
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd="/")
    assert done.stdout.strip() == "ok", done.stderr


@pytest.mark.parametrize(
    ("strategy", "operation"), [(Line(compute=(0, 1)), "forecast"), ("first_block_cache", "capture")], ids=str
)
def test_the_core_runs_on_them(strategy: Any, operation: str) -> None:
    case, seen = CASES["flux"], set[str]()

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.add(str(func))
            return func(*args, **(kwargs or {}))

    model = cachedit.wrap(case.build(), strategy, num_inference_steps=STEPS)
    with torch.no_grad(), Seen():
        drive(model, case)
    assert f"cachedit.{operation}.default" in seen
