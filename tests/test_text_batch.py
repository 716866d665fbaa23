"""Batches: row i gets what the same prompt gets alone, for every strategy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from language_models import MASK, model, prompts

import cachedit
from cachedit.text import TextStrategy

STRATEGIES = {name: cls for name, cls in cachedit.strategies().items() if issubclass(cls, TextStrategy)}  # type: ignore[operator]
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in STRATEGIES}
VARIANTS |= {f"dkv {v}": ("dkv_cache", {"variant": v, "interval": 4}) for v in ("greedy", "prefill", "pd")}
VARIANTS["fast_dllm dual"] = "fast_dllm", {"cache": "dual"}

every_variant = pytest.mark.parametrize("variant", VARIANTS)
every_side = pytest.mark.parametrize("side", ["left", "right"])


def options_of(variant: str, **more: Any) -> tuple[str, dict[str, Any]]:
    """Name and options of a variant, and what it needs of a decoding."""
    name, own = VARIANTS[variant]
    strategy: Any = STRATEGIES[name](**own)
    needs: dict[str, Any] = {"attention": "block"} if strategy.block_causal else {}
    if strategy.needs_foresight:
        needs["order"] = "random"
        more = {k: v for k, v in more.items() if k not in ("threshold", "factor", "entropy_bound")}
    return name, {"gen_length": 21, "block_length": 8, **needs, **own, **more}


def padded(rows: list[torch.Tensor], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of different lengths as a batch, and its mask."""
    longest = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), longest, dtype=torch.long), torch.zeros(len(rows), longest, dtype=torch.long)
    for i, row in enumerate(rows):
        place = slice(longest - len(row), longest) if side == "left" else slice(0, len(row))
        ids[i, place], mask[i, place] = row, 1
    return ids, mask


def seeds(*values: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(value) for value in values]


@every_side
@every_variant
@pytest.mark.parametrize("name", ["llama", "dream"])
def test_a_row_gets_what_it_gets_alone(name: str, variant: str, side: str) -> None:
    cls = STRATEGIES[VARIANTS[variant][0]]
    if name == "dream" and (cls.block_causal or cls.grows or cls.by_layer):
        pytest.skip("Dream has full attention, and layers with other parts")
    strategy, options = options_of(variant, threshold=0.5)
    rows = [prompts(1, length, seed=length)[0] for length in (5, 13, 9)]
    ids, mask = padded(rows, side)
    together = cachedit.generate(model(name), ids, strategy, attention_mask=mask, generator=seeds(0, 1, 2), **options)
    for i, row in enumerate(rows):
        alone = cachedit.generate(model(name), row, strategy, generator=seeds(i), **options)
        assert torch.equal(together[i, ids.shape[1] :], alone[0, len(row) :])
        assert not bool((alone == MASK).any())


@every_variant
def test_drawn_tokens_are_each_row_s_own(variant: str) -> None:
    strategy, options = options_of(variant, temperature=0.7)
    prompt = prompts(1, 7)
    several = cachedit.generate(
        model("llama"), prompt, strategy, num_return_sequences=3, generator=seeds(5, 6, 5), **options
    )
    assert several.shape == (3, 28)
    assert torch.equal(several[0], several[2])
    assert not torch.equal(several[0], several[1])
    alone = cachedit.generate(model("llama"), prompt, strategy, generator=seeds(6), **options)
    assert torch.equal(alone[0], several[1])


@every_variant
def test_a_row_ends_where_it_decides_so_and_others_go_on(variant: str) -> None:
    strategy, options = options_of(variant)
    ids = prompts(3, 7)
    plain = cachedit.generate(model("llama"), ids, strategy, generator=seeds(0, 1, 2), **options)
    end = int(plain[1, 7 + 9])  # a token that row 1 decides in its second block
    ended = cachedit.generate(
        model("llama"), ids, strategy, generator=seeds(0, 1, 2), eos_token_id=end, pad_token_id=0, **options
    )
    for row, whole in zip(ended.tolist(), plain.tolist(), strict=True):
        answer = whole[7:]
        stop = answer.index(end) + 1 if end in answer else len(answer)
        assert row[7:][:stop] == answer[:stop]
        assert all(token == 0 for token in row[7:][stop:]) or row == whole
    stop = plain[1, 7:].tolist().index(end)
    assert ended[1, 7 + stop + 1 :].eq(0).all()
    run = cachedit.last_run(model("llama"))
    assert run.status == "finished"
    assert run.tokens_committed < 63


@pytest.mark.parametrize("length", [1, 7, 8, 9, 31])
@every_variant
def test_lengths_that_blocks_do_not_divide(variant: str, length: int) -> None:
    strategy, options = options_of(variant)
    out = cachedit.generate(model("llama"), prompts(2, 5), strategy, **{**options, "gen_length": length})
    assert out.shape == (2, 5 + length)
    assert not bool((out == MASK).any())
    assert cachedit.last_run(model("llama")).tokens_committed == 2 * length
