"""How good a text model is at ledgers, and whether it bears a cache."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import nn
from transformers import EuroBertForMaskedLM, PreTrainedTokenizerFast

from .ledgers import Ledger, exact
from .text_model import ANSWER_TOKENS, BLOCK_TOKENS, encode


@torch.no_grad()
def write(model: EuroBertForMaskedLM, tokenizer: PreTrainedTokenizerFast, ledgers: Sequence[Ledger]) -> list[str]:
    """The model's answers without a cache: block by block, the surest token of every step.

    Args:
        model: the text model.
        tokenizer: of the model.
        ledgers: what is asked.

    Returns:
        Texts, in the order of the ledgers.
    """
    answers: dict[Ledger, str] = {}
    for group, tokens, prompt in _batches(tokenizer, ledgers):
        tokens[:, prompt:] = tokenizer.mask_token_id
        for step in range(ANSWER_TOKENS):
            logits = model(tokens).logits[:, prompt:]
            sureness, best = logits.softmax(-1).max(-1)  # [N, 96]
            block = torch.arange(ANSWER_TOKENS) // BLOCK_TOKENS == step // BLOCK_TOKENS
            open_ = (tokens[:, prompt:] == tokenizer.mask_token_id) & block
            place = sureness.masked_fill(~open_, -1).argmax(1, keepdim=True)
            tokens[:, prompt:].scatter_(1, place, best.gather(1, place))
        texts = tokenizer.batch_decode(tokens[:, prompt:], skip_special_tokens=True)
        answers |= dict(zip(group, texts, strict=True))
    return [answers[ledger] for ledger in ledgers]


def exact_match(answers: Sequence[str], ledgers: Sequence[Ledger]) -> float:
    """Share of answers that are right in every line."""
    return sum(map(exact, answers, ledgers)) / len(ledgers)


@torch.no_grad()
def stale_agreement(
    model: EuroBertForMaskedLM,
    tokenizer: PreTrainedTokenizerFast,
    ledgers: Sequence[Ledger],
    generator: torch.Generator,
) -> float:
    """How often old keys and values of the prompt lead to the same token as fresh ones.

    Half of every answer is masked. The keys and values of the prompt are those of a pass over the prompt and a wholly
    masked answer: as a cache has them that is never renewed.

    Args:
        model: the text model.
        tokenizer: of the model.
        ledgers: with their answers.
        generator: of the masks.

    Returns:
        Share of the masked tokens for which the likeliest token is the same.
    """
    agreeing = asked = 0
    for _, tokens, prompt in _batches(tokenizer, ledgers):
        masked = torch.zeros_like(tokens, dtype=torch.bool)  # [N, S]
        masked[:, prompt:] = torch.rand(len(tokens), ANSWER_TOKENS, generator=generator) < 0.5
        empty = tokens.clone()
        empty[:, prompt:] = tokenizer.mask_token_id
        half = tokens.masked_fill(masked, tokenizer.mask_token_id)
        fresh = model(half).logits.argmax(-1)
        with _frozen_prompt(model, prompt, empty):
            stale = model(half).logits.argmax(-1)
        agreeing += int((fresh == stale)[masked].sum())
        asked += int(masked.sum())
    return agreeing / asked


@contextmanager
def _frozen_prompt(model: EuroBertForMaskedLM, prompt: int, tokens: torch.Tensor) -> Iterator[None]:
    """Within it, the rows of the prompt have the keys and values that they have in a pass over other tokens."""
    kept: dict[nn.Module, torch.Tensor] = {}

    def keep(module: nn.Module, _: Any, output: torch.Tensor) -> None:
        kept[module] = output[:, :prompt]

    def freeze(module: nn.Module, _: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.cat([kept[module], output[:, prompt:]], 1)

    parts = [part for layer in model.model.layers for part in (layer.self_attn.k_proj, layer.self_attn.v_proj)]
    hooks = [part.register_forward_hook(keep) for part in parts]
    model(tokens)
    for hook in hooks:
        hook.remove()
    hooks = [part.register_forward_hook(freeze) for part in parts]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _batches(
    tokenizer: PreTrainedTokenizerFast, ledgers: Sequence[Ledger]
) -> Iterator[tuple[list[Ledger], torch.Tensor, int]]:
    """Ledgers with equally many lines, their tokens [N, S], and the length of the prompts."""
    for _, found in groupby(sorted(ledgers, key=_lines), key=_lines):
        group = list(found)
        yield group, *encode(tokenizer, group)


def _lines(ledger: Ledger) -> int:
    return len(ledger.changes)
