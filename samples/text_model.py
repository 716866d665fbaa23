"""The sample text model with random weights, and its tokenizer: what its training starts from."""

from collections.abc import Sequence

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import EuroBertConfig, EuroBertForMaskedLM, PreTrainedTokenizerFast

from .ciphers import LENGTH, LETTERS, Cipher

ANSWER_TOKENS = LENGTH  # one for every character
BLOCK_TOKENS = 16
_SPECIAL = ("<pad>", "<bos>", "<eos>", "<mask>", "<answer>", "<unk>")
_PLAIN = f"{LETTERS} =;"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with a token for every character; a line break is read as ";" and written for it.

    A prompt gets ``<bos>`` before and ``<answer>`` after it.
    """
    vocabulary = {token: number for number, token in enumerate([*_SPECIAL, *_PLAIN])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.add_special_tokens([*_SPECIAL])
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Strip(), normalizers.Replace(Regex(r"\s*[;\n]\s*"), ";")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <answer>",
        special_tokens=[(token, vocabulary[token]) for token in ("<bos>", "<answer>")],
    )
    tokenizer.decoder = decoders.Sequence([decoders.Replace(";", "\n"), decoders.Fuse()])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        mask_token="<mask>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> EuroBertForMaskedLM:
    """A bidirectional Llama, as transformers calls EuroBERT: every token sees every other one."""
    config = EuroBertConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.05,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        mask_token_id=tokenizer.mask_token_id,
    )
    return EuroBertForMaskedLM(config)


def encode(tokenizer: PreTrainedTokenizerFast, ciphers: Sequence[Cipher]) -> tuple[torch.Tensor, int]:
    """Prompts and answers of ciphers.

    Returns:
        Tokens ``[N, prompt + 48]``, and the length of the prompts.
    """
    prompts = tokenizer([cipher.prompt for cipher in ciphers]).input_ids
    answers = tokenizer([cipher.answer for cipher in ciphers], add_special_tokens=False).input_ids
    return torch.tensor([prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]), len(prompts[0])
