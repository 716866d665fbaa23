"""The kernels as a GPU would get them: 128-bit accesses, no spills, shared memory that every card has.

They are compiled for arguments on the meta device, at the sizes of real models.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kernel_builds import Build, builds, file

from cachedit.kernels import KVCache

ARCHITECTURES = [80, 90, 100]
NOTHING = (None, None, None, 0, None, 1, None, None)  # options of a reading
SHARED = 99 * 1024  # bytes that a block may use on the consumer cards of these generations, less than on the others
FLUX = (1, 4608, 3072)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def floats(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.float32)


def integers(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.int32)


def cache(slots: int, heads: int, dim: int, dtype: torch.dtype = torch.bfloat16) -> KVCache:
    scales = [floats(1, slots, heads)] * 2 if dtype == torch.int8 else []
    return KVCache(*[meta(1, slots, heads, dim, dtype=dtype)] * 2, *scales)


def sound(build: Build) -> None:
    assert build.local == 0, "registers are spilled"
    assert build.shared <= SHARED
    assert not re.search(r"\b(atom|red)\.", build.ptx), "the order of atomic additions is not fixed"


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("weights", [(1,), (2,), (3,), (3, "C"), (8,)], ids=str)
def test_forecast(arch: int, weights: tuple[Any, ...]) -> None:
    x, count = meta(*FLUX), weights[0]
    (build,) = builds(arch, file("forecast")._launch, x, [x] * count, floats(count, *FLUX[-1:] * (len(weights) - 1)))
    sound(build)
    assert build.wide("ld") >= 2 * (1 + count)  # a thread has two vectors of every tensor
    assert build.wide("st") == 2
    assert build.registers <= 64


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_forecast_of_more_than_two_to_the_31_elements(arch: int) -> None:
    x = meta(6, 75600, 5120)
    (build,) = builds(arch, file("forecast")._launch, x, [x], floats(1))
    sound(build)
    assert build.wide("ld") >= 4


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("first", [True, False])
def test_capture(arch: int, first: bool) -> None:
    x = meta(*FLUX)
    (build,) = builds(arch, file("capture")._launch, x, x, None if first else x)
    sound(build)
    assert build.wide("ld") == (2 if first else 3)
    assert build.wide("st") == 1
    assert build.registers <= 80


# tokens, slots, heads, key heads
LLADA, DREAM, WAN_14B, WAN = (32, 1024, 32, 32), (32, 1024, 28, 4), (4680, 32760, 40, 40), (4680, 32760, 12, 12)
Layer = tuple[int, int, int, int]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("layer", "interleaved", "kept"),
    [
        (LLADA, False, torch.bfloat16), (DREAM, False, torch.int8), (WAN_14B, True, torch.int8),
        (WAN, True, torch.bfloat16),
    ],
    ids=str,
)  # fmt: skip
def test_write(arch: int, layer: Layer, interleaved: bool, kept: torch.dtype) -> None:
    tokens, slots, heads, kv_heads = layer
    q, k, angles = meta(1, tokens, heads, 128), meta(1, tokens, kv_heads, 128), floats(1, tokens, 64)
    where, norms = integers(1, tokens), (meta(heads * 128), meta(kv_heads * 128))
    given = (q, k, k, angles, angles, where, *cache(slots, kv_heads, 128, kept), *norms, 1e-6, interleaved)
    (build,) = builds(arch, file("rope_scatter_kv")._launch, *given)
    sound(build)
    assert build.wide("ld") >= 3
    assert build.wide("st") >= 1
    assert build.registers <= 96


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("layer", "kept", "every"),
    [(LLADA, torch.bfloat16, False), (DREAM, torch.int8, True), (WAN, torch.int8, True), (WAN, torch.bfloat16, False)],
    ids=str,
)
def test_read(arch: int, layer: Layer, kept: torch.dtype, every: bool) -> None:
    tokens, slots, heads, kv_heads = layer
    q, fresh = meta(1, tokens, heads, 128), meta(1, tokens, kv_heads, 128)
    view: tuple[Any, ...] = NOTHING
    if every:
        view = integers(1, slots // 2), integers(1), integers(1, tokens), 32, floats(21), 1560, fresh, fresh
    kept_before = cache(slots, kv_heads, 128, kept)
    made = builds(arch, file("subset_kernel").launch, q, *kept_before, *view, 0.1, device=(132, arch // 10))
    assert len(made) == (1 if tokens > 1000 else 2)  # many queries need no parts, so nothing is put together
    for build in made:
        sound(build)
    assert made[0].wide("ld") + made[0].wide("cp") >= 3
    assert made[0].wide("st") >= 1


@pytest.mark.parametrize("arch", [80, 100])
@pytest.mark.parametrize(
    ("dim", "dtype"), [(64, torch.float16), (80, torch.bfloat16), (256, torch.bfloat16), (128, torch.float32)], ids=str
)
def test_read_of_other_heads(arch: int, dim: int, dtype: torch.dtype) -> None:
    given = meta(1, 64, 16, dim, dtype=dtype), *cache(2048, 16, dim, dtype), *NOTHING, 0.1
    for build in builds(arch, file("subset_kernel").launch, *given, device=(1, arch // 10)):
        sound(build)
        assert build.wide("ld") + build.wide("cp") >= 1
