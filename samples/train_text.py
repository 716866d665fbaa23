"""Trains the sample text model ``samples/text`` from nothing, on one CPU core in a few minutes.

Run from the repository root; training resumes from its checkpoint::

    python -m cachedit.samples.train_text train --minutes 8
    python -m cachedit.samples.train_text export
    python -m cachedit.samples.train_text evaluate

The model is a stock transformers ``EuroBertForMaskedLM`` that learns to fill in masked answers, as LLaDA does (Nie et
al., 2025, https://arxiv.org/abs/2502.09992). Every token sees every other one, so nothing keeps the keys and values of
a prompt from depending on the answer, and a model may learn to work the answers out in the rows of the prompt: one that
does is lost with a cache of the prompt. In half of the training steps the prompt does not see the answer, and so the
model learns to do without.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer, EuroBertForMaskedLM, PreTrainedTokenizerFast

from . import sample_path
from .ciphers import draw_ciphers
from .exporting import finish
from .text_accuracy import exact_match, stale_agreement, write
from .text_model import ANSWER_TOKENS, BLOCK_TOKENS, build_model, build_tokenizer, encode
from .training import Budget, Trainer, read_checkpoint

BLIND = 0.5  # share of the steps in which the prompt does not see the answer
DEFAULT_MINUTES = 8.0


class Masking:
    """Batches of ciphers with masked answers, and the loss on them.

    Args:
        model: to be trained.
        tokenizer: of the model.
        batch: ciphers per step.
    """

    def __init__(self, model: EuroBertForMaskedLM, tokenizer: PreTrainedTokenizerFast, batch: int) -> None:
        self.model, self.tokenizer, self.batch = model, tokenizer, batch

    def loss(self, generator: torch.Generator) -> torch.Tensor:
        """Mean cross entropy of the masked tokens of a new batch."""
        tokens, prompt = encode(self.tokenizer, draw_ciphers(self.batch, generator))
        masked = torch.zeros_like(tokens, dtype=torch.bool)  # [batch, S]
        masked[:, prompt:] = draw_masks(self.batch, generator)
        visible = None
        if torch.rand((), generator=generator) < BLIND:
            visible = torch.ones(1, 1, tokens.shape[1], tokens.shape[1], dtype=torch.bool)
            visible[..., :prompt, prompt:] = False
        with torch.autocast("cpu", torch.bfloat16):
            shown = tokens.masked_fill(masked, self.tokenizer.mask_token_id)
            states = self.model.model(shown, attention_mask=visible).last_hidden_state[masked]
            logits = self.model.lm_head(states)
        return torch.nn.functional.cross_entropy(logits.float(), tokens[masked])


def draw_masks(count: int, generator: torch.Generator) -> torch.Tensor:
    """Which answer tokens are masked, ``[count, 48]``: at least one of each row.

    Half of the rows are masked at random. The others are as a decoder meets them that goes block by block: all before a
    block is visible, all after it masked.
    """
    noise = torch.rand(count, ANSWER_TOKENS, generator=generator)
    place = torch.arange(ANSWER_TOKENS)
    end = torch.randint(1, ANSWER_TOKENS + 1, (count, 1), generator=generator)
    in_blocks = torch.rand(count, 1, generator=generator) < 0.5
    noise = torch.where(in_blocks & (place < end - BLOCK_TOKENS), 2.0, noise)
    noise = torch.where(in_blocks & (place >= end), -1.0, noise)
    masked = noise < torch.rand(count, 1, generator=generator)
    return masked | (noise == torch.where(noise >= 0, noise, 3.0).amin(1, keepdim=True))


def train(folder: Path, budget: Budget, seed: int, batch: int) -> None:
    """Trains until the budget is spent; the checkpoint is ``text.pt``.

    Args:
        folder: the training folder.
        budget: how long.
        seed: of the weights, the ciphers and the masks.
        batch: ciphers per step.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    torch.manual_seed(seed)
    model = build_model(tokenizer)
    model.set_attn_implementation("eager")  # for so few tokens faster than the fused kernel and its backward pass
    Trainer(
        {"model": model},
        Masking(model, tokenizer, batch).loss,
        folder / "text.pt",
        budget,
        peak=1.5e-3,
        average=0.99,
        decay_from=0.6,
        seed=seed,
        every=50,
    ).run()


def export(folder: Path, output: Path) -> None:
    """Writes the averaged weights, in half precision, and the tokenizer.

    Args:
        folder: the training folder.
        output: for ``AutoModelForMaskedLM.from_pretrained`` and ``AutoTokenizer.from_pretrained``.

    Raises:
        FileNotFoundError: nothing was trained.
    """
    averaged = read_checkpoint(folder / "text.pt", "train", "train_text")["averaged"]
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    weights = {key.removeprefix("model."): value.half() for key, value in averaged.items()}
    # The configuration says float32, and so the weights are loaded.
    model.save_pretrained(output, state_dict=weights)
    tokenizer.save_pretrained(output)
    finish(output, output / "tokenizer_config.json")


def load(path: Path) -> tuple[EuroBertForMaskedLM, PreTrainedTokenizerFast]:
    """Loads an exported model and its tokenizer."""
    return AutoModelForMaskedLM.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)


def evaluate(path: Path, count: int, seed: int = 0) -> None:
    """Prints exact match on training and on held-out ciphers, and whether the model bears a cached prompt."""
    model, tokenizer = load(path)
    generator = torch.Generator().manual_seed(seed)
    for label, held in (("trained", False), ("held out", True)):
        ciphers = draw_ciphers(count, generator, held=held)
        found = {
            "exact_match": exact_match(write(model, tokenizer, ciphers), ciphers),
            "stale_agreement": stale_agreement(model, tokenizer, ciphers, generator),
        }
        rounded = {name: round(value, 4) for name, value in found.items()}
        print(json.dumps({"ciphers": label, "count": count} | rounded), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one stage; see the module's text."""
    parser = argparse.ArgumentParser(prog="python -m cachedit.samples.train_text", description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=("train", "export", "evaluate"))
    parser.add_argument("--folder", type=Path, default=Path("build/train"), help="checkpoint (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=sample_path("text"), help="the model (default: %(default)s)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, help="train for this many steps in all")
    length.add_argument(
        "--minutes", type=float, help=f"train for this many minutes in all (default: {DEFAULT_MINUTES})"
    )
    parser.add_argument("--batch", type=int, default=16, help="ciphers per step (default: %(default)s)")
    parser.add_argument("--count", type=int, default=256, help="ciphers to evaluate per row (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if options.stage == "train":
        minutes = options.minutes if options.steps is None else None
        budget = Budget(options.steps, DEFAULT_MINUTES if options.steps is None and minutes is None else minutes)
        train(options.folder, budget, options.seed, options.batch)
    elif options.stage == "export":
        export(options.folder, options.output)
    else:
        evaluate(options.output, options.count, options.seed)


if __name__ == "__main__":
    main()
