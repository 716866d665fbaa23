"""The reported bugs that text and video caches can have as well; the ids are those of the field study."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from conftest import dissect
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline
from language_models import llama, model, prompts
from video_models import TEXT, draw, tiny

import cachedit
from cachedit.text import TextStrategy
from cachedit.text.caching import CachedModel
from zoo.video_pipelines import video_vae

ANSWER: dict[str, Any] = {"gen_length": 16, "block_length": 8}
TEXT_STRATEGIES = [name for name, cls in cachedit.strategies().items() if issubclass(cls, TextStrategy)]  # type: ignore[operator]
FULL = [name for name in TEXT_STRATEGIES if not cachedit.strategies()[name].block_causal]  # type: ignore[attr-defined]


def held() -> int:
    """Living tensors that could be a kept feature: more axes than a weight."""
    gc.collect()
    return sum(type(o) is torch.Tensor and o.ndim > 2 for o in gc.get_objects())


def generators(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def answered(target: Any, strategy: str, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    needs = {"order": "random"} if cachedit.strategies()[strategy].needs_foresight else {}  # type: ignore[attr-defined]
    return cachedit.generate(
        target, ids, strategy, generator=generators(*range(len(ids))), **ANSWER, **needs, **options
    )


# -- text ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", FULL)
def test_b01_prompts_of_any_size_in_any_order_are_as_on_a_fresh_model(strategy: str) -> None:
    sizes = [(1, 7), (1, 20), (3, 12), (1, 7)]
    target = llama()
    answers = [answered(target, strategy, prompts(*size)) for size in sizes]
    assert all(
        torch.equal(answer, answered(llama(), strategy, prompts(*size)))
        for answer, size in zip(answers, sizes, strict=True)
    )
    assert torch.equal(answers[0], answers[-1])


@pytest.mark.parametrize("end", ["finished", "aborted"])
def test_b48_no_key_or_value_outlives_its_answer(end: str) -> None:
    target = llama()
    before, during = held(), []
    step = CachedModel.step

    def watched(self: CachedModel, *args: Any) -> Any:
        done = step(self, *args)
        during.append(held())
        if end == "aborted" and len(during) == 9:  # the first step of the second block
            raise KeyboardInterrupt
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CachedModel, "step", watched)
        if end == "aborted":
            with pytest.raises(KeyboardInterrupt):
                answered(target, "fast_dllm", prompts(1, 7))
        else:
            answered(target, "fast_dllm", prompts(1, 7))
    assert min(during) > before
    assert held() == before


@pytest.mark.parametrize("temperature", [0.0, 0.7], ids=["greedy", "drawn"])
@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("rows", [2, 3])
def test_b62_a_row_of_a_batch_is_the_answer_to_its_prompt_alone(rows: int, cache: str, temperature: float) -> None:
    ids, options = prompts(rows, 9), {**ANSWER, "cache": cache, "temperature": temperature}
    together = cachedit.generate(model("llama"), ids, "fast_dllm", generator=generators(*range(rows)), **options)
    for i in range(rows):
        alone = cachedit.generate(model("llama"), ids[i], "fast_dllm", generator=generators(i), **options)
        assert torch.equal(together[i], alone[0])
    assert len({tuple(row.tolist()) for row in together[:, 9:]}) == rows


# -- video --------------------------------------------------------------------------------------------------------


def pipeline() -> Any:
    transformer = tiny(dtype=torch.float32, rope_max_seq_len=32)
    parts = {"tokenizer": None, "text_encoder": None, "scheduler": FlowMatchEulerDiscreteScheduler()}
    made = WanPipeline(**parts, vae=video_vae(), transformer=transformer)
    made.set_progress_bar_config(disable=True)
    return made


def filmed(pipe: Any, side: int = 16, frames: int = 5, samples: slice = slice(1), **options: Any) -> torch.Tensor:
    call = {"height": side, "width": side, "num_frames": frames, "guidance_scale": 1.0, "output_type": "latent"}
    texts, drawn = draw(2, 7, TEXT, seed=1, dtype=torch.float32), generators(0, 1)
    return pipe(prompt_embeds=texts[samples], generator=drawn[samples], **call, **options).frames


def wrapped() -> Any:
    return cachedit.wrap(pipeline(), "rolling-kv", window=6, sink=3)


def test_b01_videos_of_any_size_in_any_order_are_as_on_a_fresh_wrap() -> None:
    sizes: list[dict[str, Any]] = [{}, {"side": 32, "frames": 9}, {"frames": 9, "samples": slice(2)}, {}]
    pipe = wrapped()
    films = [filmed(pipe, **size) for size in sizes]
    assert all(torch.equal(film, filmed(wrapped(), **size)) for film, size in zip(films, sizes, strict=True))
    assert torch.equal(films[0], films[-1])


@pytest.mark.parametrize("end", ["finished", "aborted", "unwrapped", "deleted"])
def test_b48_no_key_or_value_outlives_its_video(end: str) -> None:
    before = held()
    pipe = wrapped()
    still = held()
    during: list[int] = []

    def callback(pipe: Any, index: int, timestep: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        during.append(held())
        if end == "aborted" and len(during) == 3:
            raise KeyboardInterrupt
        return {}

    if end == "aborted":
        with pytest.raises(KeyboardInterrupt):
            filmed(pipe, callback_on_step_end=callback)
    else:
        filmed(pipe, callback_on_step_end=callback)
    assert min(during) > still
    if end == "unwrapped":
        cachedit.unwrap(pipe)
    if end == "deleted":
        del pipe
    assert held() == (before if end == "deleted" else still)


def test_b56_the_second_wrap_of_a_video_pipeline_replaces_the_first() -> None:
    pipe, counts = pipeline(), []
    filmed(pipe, num_inference_steps=2)  # pipelines create attributes at their first call
    before = dissect(pipe), [block.attn1.processor for block in pipe.transformer.blocks]
    for times in (1, 2):
        for _ in range(times):
            cachedit.wrap(pipe, "rolling-kv", window=6, sink=3)
        ran: list[int] = []
        handle = pipe.transformer.blocks[0].register_forward_pre_hook(lambda *_, ran=ran: ran.append(1))
        filmed(pipe)
        handle.remove()
        counts.append(len(ran))
    assert counts[0] == counts[1] > 0
    cachedit.unwrap(pipe)
    assert (dissect(pipe), [block.attn1.processor for block in pipe.transformer.blocks]) == before


def test_b62_a_sample_of_a_batch_is_the_video_of_its_prompt_alone() -> None:
    pipe = wrapped()
    together = filmed(pipe, frames=9, samples=slice(2))
    for i in range(2):
        alone = filmed(pipe, frames=9, samples=slice(i, i + 1))
        torch.testing.assert_close(together[i : i + 1], alone, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(together[0], together[1], atol=0.1)
