"""The ring on the kernels of attention, in Triton's interpreter, against the ring on plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from video_models import CHANNELS, TEXT, draw, far, tiny

from cachedit.kernels import KVCache
from cachedit.kernels.row_attention import Projected, Reading, attend, keep
from cachedit.kernels.spans import load
from cachedit.kernels.subset_attention import few
from cachedit.video import Branch, CausalNetwork
from cachedit.video.processors import _projected

pytest.importorskip("triton")
from kernel_builds import dispatched

ROUNDING = 2e-6  # fp32, through two layers
X = draw(1, CHANNELS, 6, 4, 4, dtype=torch.float32)
PROMPT = draw(1, 5, TEXT, seed=1, dtype=torch.float32)


def causal() -> Any:
    """A model whose norms have weights of their own."""
    model = tiny(dtype=torch.float32, num_layers=2)
    for number, block in enumerate(model.blocks):
        for seed, norm in enumerate((block.attn1.norm_q, block.attn1.norm_k)):
            norm.weight.copy_(1 + draw(len(norm.weight), seed=2 * number + seed, dtype=torch.float32) / 4)
    return model


def rolled(model: Any, **options: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Six frames two at a time, each chunk once open and once committed; and what is kept of the last two."""
    with torch.no_grad(), CausalNetwork(model).attached() as network:
        branch, found = Branch(PROMPT, network.cache(X.shape, **options)), []
        for start in range(0, 6, 2):
            chunk = X[:, :, start : start + 2]
            found += [network(branch, chunk, time, commit=commit) for time, commit in ((400.0, 0), (0.0, 1))]
        return torch.cat(found, 2), [*branch.cache.frames(1, [4, 5])]


SETTINGS = {
    "plain": {"window": 6},
    "sink": {"window": 5, "sink": 1},
    "sink_shift": {"window": 5, "sink": 1, "rope": "sink_shift"},
    "relative": {"window": 5, "sink": 1, "rope": "relative"},
    "int8": {"window": 5, "sink": 1, "quant": "int8"},
    "fp8": {"window": 5, "sink": 1, "quant": "fp8"},
}
# six passes over two layers; a chunk that is read in place takes one of each
LAUNCHES = {
    "plain": (12, 12),
    "sink": (12, 12),
    "sink_shift": (12, 12),
    "relative": (12 + 6, 0),  # the norms of every pass, and what is committed; read by torch, which rotates
    "int8": (12 + 6, 8),  # as it is attended to, and as it is kept; the first chunk has nothing to read
    "fp8": (12, 0),  # which the kernels neither write nor read
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_kernels_give_what_plain_torch_gives(setting: str) -> None:
    model, options = causal(), SETTINGS[setting]
    wanted, kept = rolled(model, **options)
    with dispatched() as launched:
        found, ours = rolled(model, **options)
    # a code of int8 may round to the other side, which is one step of 1 / 127 of a row
    allowed = 2e-3 if "quant" in options else ROUNDING
    assert far(found, wanted) < allowed
    assert all(far(a, b) < (1 / 100 if "quant" in options else ROUNDING) for a, b in zip(ours, kept, strict=True))
    assert (launched["write"], launched["read"]) == LAUNCHES[setting]


def test_several_blocks_in_one_pass() -> None:
    model = causal()

    def found() -> torch.Tensor:
        with torch.no_grad(), CausalNetwork(model).attached() as network:
            branch = Branch(PROMPT, network.cache(X.shape, window=4))
            network(branch, X[:, :, :2], 0.0, commit=1)
            return network(branch, X[:, :, 2:], 400.0, [2, 1, 1], commit=1)

    wanted = found()
    with dispatched():
        assert far(found(), wanted) < ROUNDING


def test_rows_by_hand() -> None:
    """A quarter turn, written to two runs, and read from both: of equal keys the values are averaged."""
    cache = KVCache.empty(1, 6, 1, 2, torch.float32)
    ones = torch.ones(1, 3, 1, 2)
    values = torch.tensor([3.0, 6.0, 9.0]).view(1, 3, 1, 1).expand(1, 3, 1, 2)
    given = Projected(ones, ones, values, turn=torch.full((3, 1, 1), 1j, dtype=torch.complex64))
    queries = keep(given, cache, [(4, 6), (0, 1)])
    assert queries[0, 0, 0].tolist() == [-1, 1]
    assert cache.k[0, :, 0, 0].tolist() == [-1, 0, 0, 0, -1, -1]
    assert cache.v[0, :, 0, 0].tolist() == [9, 0, 0, 0, 3, 6]
    given_to = []
    reading = Reading(queries, cache, [(0, 1), (4, 6)], (ones[:, :1] * -1, values[:, :1]))
    attend(reading, lambda q, k, v: given_to.append((k, v)) or q)
    assert given_to[0][1][0, :, 0, 0].tolist() == [9, 3, 6, 3]
    with dispatched() as launched:
        found = attend(Reading(queries, cache, [(0, 1), (4, 6)]), lambda *_: pytest.fail("not torch's"))
        assert attend(reading, lambda q, k, v: q, kernel=False) is queries
    torch.testing.assert_close(found, torch.full_like(found, 6.0))
    assert launched["read"] == 1


def test_many_queries_are_left_to_torch_but_for_int8() -> None:
    q = torch.zeros(1, 128, 4, 16)
    assert few(q, KVCache.empty(1, 8, 2, 16))  # 256 queries of a key head
    assert not few(torch.zeros(1, 129, 4, 16), KVCache.empty(1, 8, 2, 16))
    assert few(torch.zeros(1, 256, 2, 16), KVCache.empty(1, 8, 2, 16))
    q = torch.zeros(1, 300, 1, 16)
    for dtype, reads in ((torch.float32, 0), (torch.int8, 1)):
        with dispatched() as launched:
            attend(Reading(q, KVCache.empty(1, 8, 1, 16, dtype), [(0, 4)]), lambda q, k, v: q)
        assert launched["read"] == reads


def test_int8_is_turned_back_where_there_is_no_kernel() -> None:
    cache = KVCache.empty(1, 2, 1, 4, torch.int8)
    rows = torch.tensor([[1.0, -0.5, 0.25, 0.0], [127.0, 1.0, 2.0, 0.0]]).view(1, 2, 1, 4)
    keep(Projected(rows, rows, rows), cache, [(0, 2)])
    assert cache.k[0, :, 0].tolist() == [[127, -64, 32, 0], [127, 1, 2, 0]]
    assert load(cache, (1, 2), torch.float32)[0].equal(rows[:, 1:])


@pytest.mark.parametrize("change", ["nothing", "a hook", "another forward", "no weight", "other eps"])
def test_norms_that_are_more_than_their_weight_are_called(change: str) -> None:
    attn = causal().blocks[0].attn1
    if change == "a hook":
        attn.norm_k.register_forward_hook(lambda *_: None)
    elif change == "another forward":
        attn.norm_k.forward = attn.norm_k.forward
    elif change == "no weight":
        attn.norm_k = nn.RMSNorm(48, eps=attn.norm_q.eps, elementwise_affine=False)
    elif change == "other eps":
        attn.norm_k.eps = 1e-3
    x = draw(1, 3, 48, dtype=torch.float32)
    with torch.no_grad(), dispatched():
        given = _projected(attn, x)
        wanted = attn.norm_k(attn.to_k(x)).unflatten(2, (2, -1))
        assert given.normed().k.equal(wanted)
    assert (given.k_norm is None) == (change != "nothing")
