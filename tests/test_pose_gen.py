"""Images that share the background of an anchor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import FluxKontextPipeline

import cachedit
from cachedit.conditions import KVBank
from cachedit.conditions.passes import Pass, attended
from cachedit.kernels import KVCache, subset_attention
from zoo.built import Built
from zoo.draw import Draw
from zoo.image_pipelines import flux, flux_kwargs, flux_parts, qwenimage

TOKENS, LAYERS, STEPS = 16, {"flux": 5, "qwenimage": 4}, 6
SUBJECT = [5, 6, 9, 10]
BACKGROUND = [row for row in range(TOKENS) if row not in SUBJECT]
MASK = torch.zeros(4, 4)
MASK[1:3, 1:3] = 1


@pytest.fixture(params=["flux", "qwenimage"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def built(family: str) -> Built:
    built = {"flux": flux, "qwenimage": qwenimage}[family]()
    built.pipe.set_progress_bar_config(disable=True)
    return built


def made(built: Built, seed: int = 0, **more: Any) -> torch.Tensor:
    arguments = {**built.kwargs, "num_inference_steps": STEPS, **more}
    return built.pipe(**arguments, generator=torch.Generator().manual_seed(seed))[0]


def banked(k: torch.Tensor, v: torch.Tensor, layer: int = 0) -> KVBank:
    bank = KVBank()
    bank.write(layer, k, v)
    return bank


def test_what_is_anchored_reads_the_text_and_the_anchor_and_the_rest_reads_its_own_image() -> None:
    """Queries of zero weigh all they see alike, so every token reads a mean."""
    v = torch.tensor([1.0, 3.0, 5.0, 7.0]).view(1, 4, 1, 1)  # one text token, three image tokens
    anchor = torch.tensor([2.0, 6.0]).view(1, 2, 1, 1)
    zeros = torch.zeros(1, 4, 1, 1)
    now = Pass(anchor=banked(anchor, anchor), anchored=torch.tensor([0, 2]), text=1)
    found = attended(now, 0, zeros, zeros, v, None, None).flatten()
    assert found.tolist() == [4.0, 3.0, 4.0, 3.0]  # (1 + 3 + 5 + 7) / 4, and (1 + 2 + 6) / 3
    assert attended(now, 1, zeros, zeros, v, None, None).flatten().tolist() == [4.0] * 4  # a layer it lacks
    hidden = torch.tensor([False, True, True, True]).view(1, 1, 1, 4)  # padding of the text
    assert attended(now, 0, zeros, zeros, v, hidden, None).flatten().tolist() == [5.0, 4.0, 5.0, 4.0]


def test_it_is_two_attentions_merged_by_their_log_sum_exp() -> None:
    q, k, v = (Draw(seed, 2)(6, 2, 8) for seed in (1, 2, 3))
    keys, values = (Draw(seed, 2)(5, 2, 8) for seed in (4, 5))
    now = Pass(anchor=banked(keys, values), anchored=torch.arange(4), text=2)
    parts = [subset_attention(q[:, 2:], KVCache(*pair)) for pair in ((k[:, :2], v[:, :2]), (keys, values))]
    weights = torch.stack([lse for _, lse in parts]).softmax(0)[..., None]
    merged = sum(weight * out for weight, (out, _) in zip(weights, parts, strict=True))
    torch.testing.assert_close(attended(now, 0, q, k, v, None, None)[:, 2:], merged, rtol=1e-5, atol=1e-6)


def test_the_anchor_is_what_the_pipeline_makes_and_shares_with_itself_without_a_change(
    built: Built, family: str
) -> None:
    stock = made(built)
    cachedit.wrap(built.pipe, "pose-gen")
    assert torch.equal(made(built), stock)
    run = cachedit.last_run(built.pipe)
    branches = len(run.calls) // STEPS
    sizes = 2 * branches * min(6, LAYERS[family]), 2 * TOKENS * 32 * 4  # layers of two steps, and bytes of one
    assert (run.reused_steps, run.cache_bytes_peak) == ((), sizes[0] * sizes[1])
    again = made(built)
    torch.testing.assert_close(again, stock, rtol=0, atol=1e-5)
    assert cachedit.last_run(built.pipe).reused_steps == (0, 1)


def test_another_image_takes_its_background_from_the_anchor(built: Built) -> None:
    alone = made(built, seed=1)
    cachedit.wrap(built.pipe, "pose-gen", steps=STEPS, layers=3)
    anchor, shared = made(built), made(built, seed=1)
    assert not torch.equal(shared, alone)
    nearer = (shared - anchor).norm() / (alone - anchor).norm()
    assert nearer < 1
    everything = made(built, seed=1, subject_mask=torch.ones(4, 4))
    assert torch.equal(everything, alone)  # where all is subject, nothing is shared
    assert cachedit.last_run(built.pipe).reused_steps == ()
    assert not torch.equal(made(built, seed=1, subject_mask=MASK), shared)
    cachedit.unwrap(built.pipe)
    assert torch.equal(made(built, seed=1), alone)


def test_what_the_anchor_or_the_image_calls_its_subject_is_not_shared(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[list[int]] = []
    cachedit.wrap(built.pipe, "pose-gen", steps=1)
    made(built, subject_mask=MASK)
    forward = type(built.pipe.transformer).__base__.forward

    def listening(self: Any, *args: Any, **kwargs: Any) -> Any:
        now = built.pipe.transformer.transformer_blocks[0].attn.processor.current.now
        if now.anchored is not None:
            rows.append(now.anchored.tolist())
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(built.pipe.transformer).__base__, "forward", listening)
    corner = torch.zeros(4, 4)
    corner[0, 0] = 1
    made(built, seed=1)
    assert rows
    assert all(found == BACKGROUND for found in rows)
    rows.clear()
    made(built, seed=1, subject_mask=corner)
    assert all(found == BACKGROUND[1:] for found in rows)


def test_a_mask_is_laid_over_the_image_and_not_over_its_reference() -> None:
    """Kontext appends a reference of as many tokens, which is shared with the background."""
    pipe: Any = FluxKontextPipeline(**flux_parts())
    pipe.set_progress_bar_config(disable=True)
    cachedit.wrap(pipe, "pose-gen", steps=1)
    rows: list[list[int]] = []

    def listening(module: Any, _: Any) -> None:
        if module.processor.current.now.anchored is not None:
            rows.append(module.processor.current.now.anchored.tolist())

    pipe.transformer.transformer_blocks[0].attn.register_forward_pre_hook(listening)
    for _ in range(2):
        pipe(
            **flux_kwargs(), image=Draw(7, 1)(1, 8, 8), max_area=256, num_inference_steps=2, subject_mask=MASK,
            generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
    assert rows == [[*BACKGROUND, *range(TOKENS, 2 * TOKENS)]]


def test_a_new_anchor_takes_the_place_of_the_old_and_a_failed_one_leaves_none(built: Built) -> None:
    alone = made(built, seed=1)
    cachedit.wrap(built.pipe, "pose-gen")
    made(built)
    assert torch.equal(made(built, seed=1, anchor=True), alone)
    torch.testing.assert_close(made(built, seed=1), alone, rtol=0, atol=1e-5)
    with pytest.raises(ZeroDivisionError):
        made(built, anchor=True, callback_on_step_end=lambda *_: 1 / 0)
    assert torch.equal(made(built, seed=1), alone)


def test_what_does_not_fit_to_the_anchor_is_refused(built: Built) -> None:
    cachedit.wrap(built.pipe, "pose-gen", steps=3)
    made(built)
    with pytest.raises(ValueError, match=r"recorded for \(16, 1.0\); this pass needs one for \(8, 1.0\)"):
        made(built, height=built.kwargs["height"] // 2)
    with pytest.raises(ValueError, match=r"recorded for \(16, .*Record it anew"):
        made(built, num_inference_steps=4)
    with pytest.raises(ValueError, match=r"a mask of shape \(2, 4, 4\)"):
        made(built, subject_mask=torch.ones(2, 4, 4))
    for options in ({"steps": 0}, {"layers": 0}, {"dtype": "int4"}):
        with pytest.raises(ValueError, match="allowed"):
            cachedit.wrap(built.pipe, "pose-gen", **options)
