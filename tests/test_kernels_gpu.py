"""The kernels on a GPU against their references: what the interpreter cannot show. Skipped without one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from language_models import llama, prompts
from video_models import CHANNELS, TEXT, draw, far, tiny

import cachedit
from cachedit.kernels import KVCache, cached_attention, capture, forecast, rope_scatter_kv, subset_attention
from cachedit.text.caching import CachedModel
from cachedit.video import Branch, CausalNetwork

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def near(ours: Any, exact: Any, dtype: torch.dtype) -> None:
    """Within two units in the last place of ``dtype``, in the root mean square; exact where nothing is seen."""
    ours, exact = ours.double().cpu(), exact.double().cpu()
    assert ours.isfinite().equal(exact.isfinite())
    seen = exact.isfinite()
    error = (ours - exact)[seen].square().mean().sqrt()
    assert error <= 2 * torch.finfo(dtype).eps * exact[seen].square().mean().sqrt() + 1e-12


def on_cpu(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.cpu().double() if x.is_floating_point() else x.cpu()
    return x


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 37, 100), (1, 1024, 3072)], ids=str)
def test_residuals(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, *history = (normal(*shape, seed=seed, dtype=dtype) for seed in range(4))
    for weights in (normal(3), normal(3, shape[-1])):
        near(forecast(x, history, weights), forecast(on_cpu(x), list(map(on_cpu, history)), on_cpu(weights)), dtype)
    residual, found = capture(*history)
    assert residual.equal(history[1] - history[0])
    _, exact = capture(torch.zeros_like(residual).cpu().double(), on_cpu(residual), on_cpu(history[2]))
    near(found.norm, exact.norm, torch.float32)
    near(found.product, exact.product, torch.bfloat16)  # of opposite terms
    near(found.change, exact.change, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(4, 4, 64), (28, 4, 128), (4, 2, 80)], ids=str)
@pytest.mark.parametrize("tokens", [1, 33, 200])
def test_attention(dtype: torch.dtype, heads: tuple[int, int, int], tokens: int) -> None:
    count, kv_count, dim = heads
    q, k, v = (normal(2, tokens, n, dim, seed=n + dim, dtype=dtype) for n in (count, kv_count, kv_count))
    rows = KVCache(*(normal(2, 500, kv_count, dim, seed=seed, dtype=dtype) for seed in (7, 8)))
    exact = KVCache(*(x.cpu().double() for x in rows[:2]))
    angles, slots = normal(tokens, dim // 2), torch.randperm(500)[:tokens].cuda()
    turned = rope_scatter_kv(q, k, v, angles.cos(), angles.sin(), slots, rows)
    wanted = rope_scatter_kv(
        on_cpu(q), on_cpu(k), on_cpu(v), on_cpu(angles).cos(), on_cpu(angles).sin(), slots.cpu(), exact
    )
    near(turned, wanted, dtype)
    near(rows.k, exact.k, dtype)
    options = {"lengths": torch.tensor([0, 400]).cuda(), "positions": torch.arange(tokens).cuda() + 300, "block": 32}
    for given in ({}, options):
        here = {name: on_cpu(x) for name, x in given.items()}
        out, lse = subset_attention(turned, rows, **given)
        sure, sure_lse = subset_attention(on_cpu(turned), KVCache(on_cpu(rows.k), on_cpu(rows.v)), **here)
        near(out, sure, dtype if dtype != torch.float32 else torch.bfloat16)
        near(lse, sure_lse, torch.bfloat16)
        near(cached_attention(q, k, v, angles.cos(), angles.sin(), slots, rows, **given), sure, torch.bfloat16)
    assert lse[0].eq(-math.inf).all()


def test_a_captured_graph_is_replayed_with_other_weights() -> None:
    x, history, weights = normal(4, 64), [normal(4, 64, seed=1), normal(4, 64, seed=2)], normal(2)
    forecast(x, history, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = forecast(x, history, weights)
    weights.copy_(torch.tensor([2.0, -1.0]))
    graph.replay()
    torch.testing.assert_close(found, x + 2 * history[0] - history[1])


@pytest.mark.parametrize("quant", [None, "int8"])
def test_the_ring_gives_what_it_gives_on_the_cpu(quant: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that evict, open and committed; a code of int8 may round to the other side."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    frames, text = draw(1, CHANNELS, 8, 8, 8, dtype=torch.float32), draw(1, 5, TEXT, seed=1, dtype=torch.float32)

    def rolled(device: str) -> torch.Tensor:
        with torch.no_grad(), CausalNetwork(tiny(dtype=torch.float32).to(device)).attached() as network:
            branch, found = Branch(text.to(device), network.cache(frames.shape, window=5, sink=1, quant=quant)), []
            for start in range(0, 8, 2):
                chunk = frames[:, :, start : start + 2].to(device)
                found += [network(branch, chunk, time, commit=commit) for time, commit in ((400.0, 0), (0.0, 1))]
            return torch.cat(found, 2).cpu()

    assert far(rolled("cuda"), rolled("cpu")) < (1e-4 if quant is None else 2e-3)


@pytest.mark.parametrize("mask", [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]], ids=["all", "padded"])
def test_slots_of_text_give_what_they_give_on_the_cpu(mask: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    logits: dict[str, list[torch.Tensor]] = {"cuda": [], "cpu": []}
    step = CachedModel.step

    def noted(self: CachedModel, *arguments: Any) -> Any:
        found = step(self, *arguments)
        logits[found.logits.device.type].append(found.logits.cpu())
        return found

    monkeypatch.setattr(CachedModel, "step", noted)
    for device in logits:
        options: dict[str, Any] = {"attention_mask": torch.tensor([mask], device=device), "cache": "dual"}
        ids = prompts(1, 5).to(device)
        cachedit.generate(llama(torch.float32).to(device), ids, "fast_dllm", gen_length=16, block_length=8, **options)
    assert len(logits["cuda"]) == 16
    for ours, wanted in zip(*logits.values(), strict=True):
        assert far(ours, wanted) < 1e-4
