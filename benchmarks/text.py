"""Text strategies: tokens computed, steps and wall clock, each by itself; and exact match on the sample.

    python benchmarks/text.py [--quick] [--json FILE]

A Llama with random weights and full or block-causal attention decodes S / 2 tokens behind a prompt of S / 2, eight a
step in blocks of 64; diffusers' LLaDA2Pipeline runs by itself and with the exact cache, in blocks of 32 and for two
prompts, one of them padded. ``speedup`` is the time of no cache over that of a strategy, taken in turns in one process
on one thread: CPU time, which is the wall clock of a machine that does nothing else. ``token_bound`` is how many times
fewer tokens were computed, which bounds what a step can gain but for attention; random weights have no exact match. The
sample decodes one token a step, and once more with a threshold: that is a factor of its own, as it makes fewer steps
and not cheaper ones. There ``auto`` reads the profile that ``cachedit probe --sample text`` has made, and is to answer
as often right as no cache, within a point, at twice the speed or more.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from diffusers import BlockRefinementScheduler, LLaDA2Pipeline
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import cachedit
from cachedit.files import write_text
from cachedit.samples import sample_path
from cachedit.text import TextRun

VOCABULARY, MASK, BLOCK, PER_STEP = 512, 511, 64, 8
SIZES, QUICK = (256, 512, 1024, 2048), (256,)
PIPELINE: dict[str, Any] = {
    "use_chat_template": False, "block_length": 32, "num_inference_steps": 16, "temperature": 0.0,
    "sampling_method": "greedy", "threshold": 2.0, "editing_threshold": None, "eos_early_stop": False,
    "mask_token_id": MASK, "output_type": "seq",
}  # fmt: skip


@dataclass(frozen=True)
class Method:
    """A strategy and its options, and how the model attends under it."""

    label: str
    strategy: str
    options: dict[str, Any] = field(default_factory=dict)
    attention: str = "full"


FULL = (
    Method("dKV-Cache decode, R = 8", "dkv-cache"),
    Method("dKV-Cache decode, no refresh", "dkv-cache", {"interval": 1 << 20}),
    Method("dKV-Cache greedy", "dkv-cache", {"variant": "greedy", "interval": 2, "order": "random"}),
    Method("dKV-Cache prefill", "dkv-cache", {"variant": "prefill"}),
    Method("dKV-Cache PD, R = 4", "dkv-cache", {"variant": "pd", "interval": 4}),
    Method("Fast-dLLM prefix", "fast-dllm"),
    Method("Fast-dLLM dual", "fast-dllm", {"cache": "dual"}),
    Method("Sparse-dLLM", "sparse-dllm"),
    Method("Elastic-Cache", "elastic-cache"),
    Method("dLLM-Cache", "dllm-cache"),
    Method("d2Cache", "d2-cache"),
    Method("EntropyCache", "entropy-cache"),
    Method("MAGE", "mage", {"keys": 128}),
)
BLOCKS = (
    Method("block-exact", "block-exact", attention="block"),
    Method("Fast-dLLM v2", "fast-dllm-v2", attention="block"),
)


class BlockCausal(nn.Module):
    """A model that is block-causal by itself when it gets a plain mask, as LLaDA2 is."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.lm, self.config = model, model.config
        self.dtype, self.device = model.dtype, model.device

    def forward(
        self, input_ids: torch.Tensor, attention_mask: Any = None, position_ids: Any = None, **more: Any
    ) -> Any:
        """Logits; a mask of two dimensions becomes a block-causal one of four."""
        if attention_mask is not None and attention_mask.ndim == 2:
            block = torch.arange(input_ids.shape[1]) // 32
            visible = (block[None] <= block[:, None])[None, None] & attention_mask.bool()[:, None, None]
            blind = ~visible.any(-1, keepdim=True)  # padding must see something
            attention_mask = visible | (blind & torch.eye(len(block), dtype=torch.bool))
        return self.lm(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **more)


def tiny() -> Any:
    """Four layers of 128 channels with grouped queries: 0.9 million parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=344, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCABULARY, max_position_embeddings=8192, initializer_range=0.08,
    )  # fmt: skip
    config.is_causal = False
    return LlamaForCausalLM(config).eval()


def timed(repeats: int, first: Callable[[], Any], second: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of two calls, taken in turns, medians."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for call, found in zip((first, second), seconds, strict=True):
            began = time.process_time()
            call()
            found.append(time.process_time() - began)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def row(
    model: str, strategy: str, size: int, plain: float, seconds: float, run: TextRun, **more: Any
) -> dict[str, Any]:
    """What is kept of a comparison."""
    bound = run.token_ratio or 1.0
    found = {
        "model": model,
        "strategy": strategy,
        "S": size,
        "speedup": plain / seconds,
        "token_bound": bound,
        "share_of_bound": plain / seconds / bound,
        "exact_match": None,
        "steps": run.nfe,
        "tokens_per_step": run.tokens_per_step,
        "ms_per_step": 1e3 * seconds / run.nfe,
        **more,
    }
    print(
        f"{model:24s} {strategy:30s} S {size:5d}  {found['speedup']:5.2f}x of {bound:5.2f}x  {run.nfe:4d} steps  "
        f"{run.tokens_per_step:7.1f} tokens and {found['ms_per_step']:7.2f} ms a step",
        flush=True,
    )
    return found


def on_the_tiny_model(sizes: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Every strategy on random weights."""
    model, rows = tiny(), []
    for size in sizes:
        ids = torch.randint(1, VOCABULARY - 8, (1, size // 2), generator=torch.Generator().manual_seed(0))
        for method in (*FULL, *BLOCKS):
            call: dict[str, Any] = {
                "gen_length": size // 2, "block_length": BLOCK, "steps": size // 2 // PER_STEP, "mask_token_id": MASK,
                "attention": method.attention,
            }  # fmt: skip
            order = {"order": method.options["order"]} if "order" in method.options else {}
            plain, seconds = timed(
                repeats,
                lambda call=call, order=order, ids=ids: cachedit.generate(model, ids, "no-cache", **call, **order),
                lambda call=call, method=method, ids=ids: cachedit.generate(
                    model, ids, method.strategy, **call, **method.options
                ),
            )
            rows.append(row(f"tiny, {method.attention}", method.label, size, plain, seconds, cachedit.last_run(model)))
    return rows


def in_the_pipeline(sizes: Sequence[tuple[int, int]], repeats: int) -> list[dict[str, Any]]:
    """diffusers' LLaDA2Pipeline by itself, and with the exact cache in the place of its model."""
    rows = []
    for prompt, length in sizes:
        pipes = [
            LLaDA2Pipeline(model=BlockCausal(tiny()).eval(), scheduler=BlockRefinementScheduler()) for _ in range(2)
        ]
        for pipe in pipes:
            pipe.set_progress_bar_config(disable=True)
        cachedit.wrap(pipes[1], "block-exact")
        ids = torch.randint(1, VOCABULARY - 8, (2, prompt), generator=torch.Generator().manual_seed(0))
        mask = torch.ones_like(ids)
        mask[1, :5] = 0
        call = {"input_ids": ids, "attention_mask": mask, "gen_length": length, **PIPELINE}
        answers: list[torch.Tensor] = []
        plain, seconds = timed(
            repeats, *(lambda pipe=pipe, call=call, to=answers: to.append(pipe(**call).sequences) for pipe in pipes)
        )
        same = all(torch.equal(answer, answers[0]) for answer in answers)
        run = cachedit.last_run(pipes[1])
        rows.append(row("LLaDA2Pipeline, block", "block-exact", prompt + length, plain, seconds, run, identical=same))
    return rows


def on_the_sample(count: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Exact match and speed of every strategy for full attention on ciphers that training has not seen."""
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    from cachedit.samples.ciphers import draw_ciphers
    from cachedit.samples.text_accuracy import exact_match, write

    path = sample_path("text")
    model, tokenizer = AutoModelForMaskedLM.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
    ciphers = draw_ciphers(count, torch.Generator().manual_seed(7000), held=True)
    rows, found = [], {}
    plain_methods = (Method("no cache", "no-cache"), Method("auto", "auto"), *FULL)
    for method in (*plain_methods, Method("no cache, threshold 0.9", "no-cache", {"threshold": 0.9}),
                   Method("dKV-Cache decode, R = 8, threshold 0.9", "dkv-cache", {"threshold": 0.9})):  # fmt: skip
        answers: list[str] = []
        plain, seconds = timed(
            1,
            lambda: write(model, tokenizer, ciphers),
            lambda method=method, answers=answers: answers.extend(
                write(model, tokenizer, ciphers, method.strategy, **method.options)
            ),
        )
        run = cachedit.last_run(model)
        found[method.label] = exact_match(answers, ciphers)
        rows.append(
            row("sample", method.label, run.prompt_length + (run.gen_length or 0), plain, seconds, run,
                exact_match=found[method.label])
        )  # fmt: skip
    return rows, found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the shortest length, one repeat, eight ciphers")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = on_the_tiny_model(QUICK if options.quick else SIZES, 1)
    rows += in_the_pipeline([(100, 156)] if options.quick else [(500, 512), (1024, 1024)], 1)
    sampled, sample = on_the_sample(8 if options.quick else 128)
    result = {
        "conditions": {"torch": torch.__version__, "threads": 1, "machine": platform.processor() or platform.machine()},
        "rows": [*rows, *sampled],
        "sample": sample,
    }
    if options.json:
        write_text(options.json, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
