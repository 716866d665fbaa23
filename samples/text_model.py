"""The sample text model with random weights, and its tokenizer: what its training starts from."""

from collections.abc import Sequence

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import EuroBertConfig, EuroBertForMaskedLM, PreTrainedTokenizerFast

from .ledgers import LABELS, Ledger

ANSWER_TOKENS = 96  # ten lines of nine tokens, and the end
BLOCK_TOKENS = 16
_SPECIAL = ("<pad>", "<bos>", "<eos>", "<mask>", "<answer>", "<unk>")
_PLAIN = "0123456789+-=;" + LABELS


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with a token for every character; a line break is read as ";" and written for it.

    A prompt gets ``<bos>`` before and ``<answer>`` after it; shorter prompts of a batch are padded on the left.
    """
    vocabulary = {token: number for number, token in enumerate([*_SPECIAL, *_PLAIN])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Lowercase(),
            normalizers.Strip(),
            normalizers.Replace("\n", ";"),
            normalizers.Replace(Regex(r"\s+"), ""),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <answer>",
        special_tokens=[(token, vocabulary[token]) for token in ("<bos>", "<answer>")],
    )
    spaced = [decoders.Replace(sign, f" {sign} ") for sign in "+-="]
    labelled = [decoders.Replace(label, f"{label} ") for label in LABELS]
    joined = [decoders.Replace(";", "\n"), decoders.Fuse(), decoders.Replace("  ", " ")]
    tokenizer.decoder = decoders.Sequence([*spaced, *labelled, *joined])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        mask_token="<mask>",
        unk_token="<unk>",
        additional_special_tokens=["<answer>"],
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> EuroBertForMaskedLM:
    """A bidirectional Llama, as transformers calls EuroBERT: every token sees every other one."""
    config = EuroBertConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.05,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        mask_token_id=tokenizer.mask_token_id,
    )
    return EuroBertForMaskedLM(config)


def encode(tokenizer: PreTrainedTokenizerFast, ledgers: Sequence[Ledger]) -> tuple[torch.Tensor, int]:
    """Prompts and answers of ledgers with equally many lines.

    Returns:
        Tokens ``[N, prompt + 96]``, the answers filled up with the end token, and the length of the prompts.
    """
    prompts = tokenizer([ledger.prompt for ledger in ledgers]).input_ids
    answers = tokenizer([ledger.answer for ledger in ledgers], add_special_tokens=False).input_ids
    end = [tokenizer.eos_token_id]
    filled = [answer + end * (ANSWER_TOKENS - len(answer)) for answer in answers]
    return torch.tensor([prompt + answer for prompt, answer in zip(prompts, filled, strict=True)]), len(prompts[0])
