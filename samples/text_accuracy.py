"""How good a text model is at ciphers, and whether it bears a cache."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import EuroBertForMaskedLM, PreTrainedTokenizerFast

from cachedit.registry import Strategy
from cachedit.text import generate

from .ciphers import Cipher, exact
from .text_model import ANSWER_TOKENS, BLOCK_TOKENS, encode


def write(
    model: EuroBertForMaskedLM,
    tokenizer: PreTrainedTokenizerFast,
    ciphers: Sequence[Cipher],
    strategy: str | Strategy = "no-cache",
    **options: Any,
) -> list[str]:
    """The model's answers: block by block, the surest token of every step.

    Args:
        model: the text model.
        tokenizer: of the model.
        ciphers: what is asked.
        strategy: for ``cachedit.generate``.
        options: likewise.
    """
    tokens, prompt = encode(tokenizer, ciphers)
    options = {"gen_length": ANSWER_TOKENS, "block_length": BLOCK_TOKENS} | options
    written = generate(model, tokens[:, :prompt], strategy, **options)
    return list(tokenizer.batch_decode(written[:, prompt:], skip_special_tokens=True))


def exact_match(answers: Sequence[str], ciphers: Sequence[Cipher]) -> float:
    """Share of answers that are right in every line."""
    return sum(map(exact, answers, ciphers)) / len(ciphers)


@torch.no_grad()
def stale_agreement(
    model: EuroBertForMaskedLM,
    tokenizer: PreTrainedTokenizerFast,
    ciphers: Sequence[Cipher],
    generator: torch.Generator,
) -> float:
    """How often old keys and values of the prompt lead to the same token as fresh ones.

    Half of every answer is masked. The keys and values of the prompt are those of a pass over the prompt and a wholly
    masked answer: as a cache has them that is never renewed.

    Args:
        model: the text model.
        tokenizer: of the model.
        ciphers: with their answers.
        generator: of the masks.

    Returns:
        Share of the masked tokens for which the likeliest token is the same.
    """
    tokens, prompt = encode(tokenizer, ciphers)
    masked = torch.zeros_like(tokens, dtype=torch.bool)  # [N, S]
    masked[:, prompt:] = torch.rand(len(tokens), ANSWER_TOKENS, generator=generator) < 0.5
    empty = tokens.clone()
    empty[:, prompt:] = tokenizer.mask_token_id
    half = tokens.masked_fill(masked, tokenizer.mask_token_id)
    fresh = model(half).logits.argmax(-1)
    with _frozen_prompt(model, prompt, empty):
        stale = model(half).logits.argmax(-1)
    return (fresh == stale)[masked].float().mean().item()


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
