"""The ring against the stock model under a dense mask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from video_models import CHANNELS, SIZE, TEXT, chunks, draw, far, float64_throughout, seen, tiny, whole

from cachedit.video import Branch, CausalNetwork, RollingKVCache
from cachedit.video.places import Places

FRAMES, CHUNK, TIME = 15, 3, 400.0
FIVE = [CHUNK] * 5
EXACT = 1e-12  # float64


@pytest.fixture(autouse=True, scope="module")
def _float64() -> Iterator[None]:
    with float64_throughout(), torch.no_grad():
        yield


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny()


X = draw(2, CHANNELS, FRAMES, SIZE, SIZE)
PROMPT = draw(2, 7, TEXT, seed=1)
TIMES = torch.full((2,), TIME, dtype=torch.float64)


def ring(model: Any, window: int, **options: Any) -> RollingKVCache:
    """A ring for two samples, filled with what must never be read."""
    cache = CausalNetwork(model).cache(X.shape, window=window, **options)
    for buffer in cache._rows.buffers:
        if buffer is not None and buffer.is_floating_point():
            buffer.fill_(torch.nan)
    return cache


def oracle(model: Any, blocks: list[int], window: int | None = None, sink: int = 0) -> torch.Tensor:
    return whole(model, X[:, :, : sum(blocks)], TIMES, PROMPT, seen(blocks, window, sink))


def rolled(model: Any, cache: RollingKVCache, blocks: list[int] = FIVE) -> torch.Tensor:
    return chunks(model, cache, X, TIME, PROMPT, blocks)


def at_once(model: Any, cache: RollingKVCache, blocks: list[int], commit: int) -> torch.Tensor:
    with CausalNetwork(model).attached() as network:
        return network(Branch(PROMPT, cache), X[:, :, : sum(blocks)], TIME, blocks, commit)


def test_slots_by_hand() -> None:
    places = Places(sink=2, ring=3)
    assert [places.slot(frame) for frame in range(9)] == [0, 1, 2, 3, 4, 2, 3, 4, 2]
    assert places.live(2) == [0, 1]
    assert places.live(5) == [0, 1, 2, 3, 4]
    assert places.live(8) == [0, 1, 5, 6, 7]
    assert places.runs([0, 1, 6, 7]) == [(0, 2), (3, 5)]


def test_t1_chunk_by_chunk_is_the_whole_under_the_mask(model: Any) -> None:
    assert far(rolled(model, ring(model, FRAMES)), oracle(model, FIVE)) < EXACT
    assert far(oracle(model, FIVE), whole(model, X, TIMES, PROMPT, None)) > 0.01  # the mask matters


def test_t1_several_blocks_in_one_pass(model: Any) -> None:
    assert far(at_once(model, ring(model, FRAMES), FIVE, 5), oracle(model, FIVE)) < EXACT


def test_t1_blocks_that_evict_within_one_pass(model: Any) -> None:
    blocks = [1, 4, 4, 4]
    cache = ring(model, 8, sink=1)
    assert far(at_once(model, cache, blocks, 4), oracle(model, blocks, 8, 1)) < EXACT
    assert cache.live() == [0, 6, 7, 8, 9, 10, 11, 12]


@pytest.mark.parametrize("rope", ["absolute", "relative"])
def test_open_blocks_need_no_slots(model: Any, rope: str) -> None:
    """A look-ahead longer than the ring: open blocks are attended to as they are."""
    cache = ring(model, 6, rope=rope)
    blocks = [3, 3, 3, 3]
    assert far(at_once(model, cache, blocks, 1), oracle(model, blocks, 6)) < EXACT
    assert cache.done == 3


def test_t2_a_window_that_holds_everything_evicts_nothing(model: Any) -> None:
    assert far(rolled(model, ring(model, FRAMES + 9, sink=3)), oracle(model, FIVE)) < EXACT


@pytest.mark.parametrize(("window", "sink"), [(6, 0), (9, 3), (7, 1), (8, 2)])
def test_t3_eviction_is_the_banded_mask(model: Any, window: int, sink: int) -> None:
    assert far(rolled(model, ring(model, window, sink=sink)), oracle(model, FIVE, window, sink)) < EXACT


def test_t3_in_float32() -> None:
    single = tiny(dtype=torch.float32)
    x, text = X.float().to(torch.float32), PROMPT.to(torch.float32)
    cache = CausalNetwork(single).cache(x.shape, window=7, sink=1)
    ours = chunks(single, cache, x, TIME, text, FIVE)
    assert far(ours, whole(single, x, TIMES.to(torch.float32), text, seen(FIVE, 7, 1))) < 2e-5


def test_t4_relative_positions_are_absolute_ones_without_a_sink(model: Any) -> None:
    assert far(rolled(model, ring(model, 6, rope="relative")), rolled(model, ring(model, 6))) < EXACT


def test_t4_a_shifted_sink_is_relative(model: Any) -> None:
    shifted = rolled(model, ring(model, 8, sink=2, rope="sink_shift"))
    assert far(shifted, rolled(model, ring(model, 8, sink=2, rope="relative"))) < EXACT
    assert far(shifted, rolled(model, ring(model, 8, sink=2))) > 1e-3  # and another function than absolute


def test_t4_an_offset_changes_nothing(model: Any) -> None:
    far_away = rolled(model, ring(model, 6, offset=50_000))
    assert far(far_away, rolled(model, ring(model, 6))) < 1e-10  # angles of 5e4 radians hold 12 digits


def test_t6_noisy_passes_leave_no_trace_in_what_is_committed(model: Any) -> None:
    def kept(passes: int) -> list[torch.Tensor]:
        cache = ring(model, 9, sink=3)
        branch = Branch(PROMPT, cache)
        with CausalNetwork(model).attached() as network:
            for start in range(0, 12, CHUNK):
                for index in range(passes):
                    network(branch, X[:, :, :CHUNK] * index, 700.0)
                network(branch, X[:, :, start : start + CHUNK], 0.0, commit=1)
        return [x for layer in range(3) for x in cache.frames(layer, cache.live())]

    assert all(torch.equal(a, b) for a, b in zip(kept(4), kept(0), strict=True))
