"""Text caches on the kernels of attention, in Triton's interpreter, against the same on plain torch."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from language_models import MODELS, prompts, stepwise
from torch.nn import functional

from cachedit.kernels.slot_attention import Seen, slot_attention
from cachedit.text.kernel_attention import _asked
from cachedit.text.slots import Pass

pytest.importorskip("triton")
from kernel_builds import dispatched

ROUNDING = 2e-6  # of the largest logit, in fp32
LENGTHS: dict[str, Any] = {"gen_length": 8, "block_length": 4}


def decoded(
    model: Any, prompt: torch.Tensor, strategy: str, kernels: bool, **options: Any
) -> tuple[list[torch.Tensor], Counter[str]]:
    """Logits of every step, the tokens at the end, and what was launched."""
    with dispatched() if kernels else nullcontext(Counter[str]()) as launched:
        return stepwise(model, prompt, strategy, **LENGTHS, **options), launched


def compared(model: Any, prompt: torch.Tensor, strategy: str, **options: Any) -> Counter[str]:
    """What was launched, once everything is found equal."""
    wanted, _ = decoded(model, prompt, strategy, False, **options)
    ours, launched = decoded(model, prompt, strategy, True, **options)
    assert ours[-1].equal(wanted[-1])
    for a, b in zip(ours[:-1], wanted[:-1], strict=True):
        assert (a - b).abs().max() <= ROUNDING * b.abs().max()
    return launched


@pytest.mark.parametrize("name", MODELS)
def test_every_layout(name: str) -> None:
    """Eight steps over three layers; a layout that rotates here also writes by our kernel.

    LLaDA2's own attention asks nobody, so it stays what it is.
    """
    launched = compared(MODELS[name](torch.float32), prompts(1, 5), "fast_dllm", cache="dual")
    assert launched["read"] == (0 if name == "llada2" else 24)
    assert launched["write"] == (24 if name in ("llada", "dream") else 0)


@pytest.mark.parametrize(("name", "threshold"), [("llama", 0.3), ("causal_llama", 0.3), ("dream", 0.03)])
def test_prompts_of_different_lengths(name: str, threshold: float) -> None:
    """A mask that is the same for all tokens of a row is a list of slots; rows that start a block alone are copies."""
    prompt, mask = prompts(2, 5), torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    launched = compared(
        MODELS[name](torch.float32), prompt, "fast_dllm", cache="dual", attention_mask=mask, threshold=threshold
    )
    assert launched["read"] > 0


def test_blocks_that_see_no_later_one() -> None:
    """Two of the eight steps start a block, and compute what came before with it: tokens that see different slots."""
    launched = compared(MODELS["llama"](torch.float32), prompts(1, 4), "block_exact", attention="block")
    assert launched["read"] == 18


@pytest.mark.parametrize("strategy", ["elastic_cache", "dllm_cache", "no_cache"])
def test_strategies_that_steer_the_layers(strategy: str) -> None:
    compared(MODELS["llama"](torch.float32), prompts(1, 5), strategy)


def test_the_model_gets_its_attention_back() -> None:
    model: Any = MODELS["llama"](torch.float32)
    decoded(model, prompts(1, 5), "fast_dllm", True)
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    _, launched = decoded(model, prompts(1, 5), "fast_dllm", True)
    assert not launched  # an attention that was chosen by hand is kept


def test_what_a_mask_lets_through() -> None:
    assert Seen.of(None) == (None, None)
    leading = torch.tensor([[True, True, False], [True, False, False]])
    slots, lengths = Seen.of(leading[:, None, None].expand(2, 1, 4, 3)) or pytest.fail("the same for all")
    assert slots is None
    assert lengths is not None
    assert lengths.tolist() == [2, 1]
    slots, lengths = Seen.of(leading.flip(1)[:, None, None]) or pytest.fail("the same for all")
    assert slots is not None
    assert lengths is not None
    assert [row[:count] for row, count in zip(slots.tolist(), lengths.tolist(), strict=True)] == [[1, 2], [2]]
    assert Seen.of(torch.tensor([[[[True, False], [True, True]]]])) is None
    ids = torch.zeros(1, 1, dtype=torch.long)
    assert Pass(ids, ids, None, None, 3, leading[:1, None, None]).seen == (None, torch.tensor([2]))


@pytest.mark.parametrize("queries", [64, 65])
def test_few_queries(queries: int) -> None:
    """Four query heads share a key head: up to 64 tokens are 256 of its queries."""
    q, k = torch.randn(1, 4, queries, 16), torch.randn(1, 1, 7, 16)
    plain = functional.scaled_dot_product_attention(q, k, k, scale=0.5, enable_gqa=True)
    with dispatched() as launched:
        found = slot_attention(q, k, k, Seen, lambda: plain, 0.5)
    assert launched["read"] == (queries == 64)
    torch.testing.assert_close(found, plain, rtol=3e-6, atol=3e-6)


def test_what_only_the_stock_attention_knows() -> None:
    assert not _asked({"dropout": 0.0, "is_causal": False, "sliding_window": None, "position_ids": torch.ones(1)})
    assert _asked({"sliding_window": 128})
    assert _asked({"softcap": 30.0})
    assert _asked({"s_aux": torch.zeros(2)})
