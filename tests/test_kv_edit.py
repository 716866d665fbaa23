"""KV-Edit on the stock pipelines of Flux and QwenImage."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxImg2ImgPipeline
from PIL import Image

import cachedit
from cachedit import UnsupportedModelError
from cachedit.conditions.picture import foreground
from zoo.built import TEXT, Built
from zoo.draw import Draw
from zoo.image_pipelines import flux, flux_parts, qwenimage

TOKENS = 16
INSIDE = [5, 6, 9, 10]
OUTSIDE = [row for row in range(TOKENS) if row not in INSIDE]
EXACT = 1e-5  # of float32 through five layers and a few steps
MASK = torch.zeros(4, 4)
MASK[1:3, 1:3] = 1


def source(family: str, seed: int = 0) -> dict[str, Any]:
    """The prompt of the original; with seed 0 that of the call."""
    words = {"source_prompt_embeds": Draw(seed, 1)(TEXT, 16)}
    if family == "flux":
        return {**words, "source_pooled_prompt_embeds": Draw(seed + 1000, 1)(16)}
    return {**words, "source_prompt_embeds_mask": torch.ones(1, TEXT, dtype=torch.long)}


@pytest.fixture(params=["flux", "qwenimage"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def built(family: str) -> Built:
    built = {"flux": flux, "qwenimage": qwenimage}[family]()
    built.pipe.set_progress_bar_config(disable=True)
    for name in [name for name in built.kwargs if name.startswith("negative") or name == "true_cfg_scale"]:
        del built.kwargs[name]
    return built


def picture(built: Built) -> torch.Tensor:
    """Latents of an image, four tokens a side."""
    return Draw(7, 1)(built.pipe.transformer.config.in_channels // 4, 8, 8)


def packed(built: Built) -> torch.Tensor:
    x = picture(built)
    return built.pipe._pack_latents(x, 1, x.shape[1], 8, 8)


def edited(built: Built, family: str, seed: int = 0, steps: int = 10, **more: Any) -> torch.Tensor:
    arguments = {
        **built.kwargs,
        **source(family, seed),
        "image": picture(built),
        "mask_image": MASK,
        "num_inference_steps": steps,
        "generator": torch.Generator().manual_seed(3),
        **more,
    }
    return built.pipe(**arguments)[0]


def far(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def test_c1_an_edit_to_its_own_prompt_gives_the_image_and_any_other_keeps_the_background(
    built: Built, family: str
) -> None:
    x0 = packed(built)
    cachedit.wrap(built.pipe, "kv-edit", source_guidance=None, skip=2)
    same = edited(built, family)
    assert far(same, x0) < EXACT
    other = edited(built, family, seed=50)
    assert torch.equal(other[:, OUTSIDE], x0[:, OUTSIDE])
    assert far(other[:, INSIDE], x0[:, INSIDE]) > 0.05
    run = cachedit.last_run(built.pipe)
    assert (run.steps, run.status, run.reused_steps) == (8, "finished", tuple(range(8)))
    # the original whole and the foreground of the edit; the bank is one step's
    assert {call.tokens for call in run.calls} == {TOKENS + len(INSIDE)}
    layers = {"flux": 5, "qwenimage": 4}[family]
    assert run.cache_bytes_peak == layers * 2 * len(OUTSIDE) * 32 * 4


def test_a_bias_makes_the_foreground_look_at_the_background_more(built: Built, family: str) -> None:
    x0 = packed(built)
    cachedit.wrap(built.pipe, "kv-edit", source_guidance=None, bias=1.0)
    found = edited(built, family)
    assert far(found, x0) > 0.01
    assert torch.equal(found[:, OUTSIDE], x0[:, OUTSIDE])


def test_inversion_keeps_the_background_and_the_keys_of_all_steps(built: Built, family: str) -> None:
    x0 = packed(built)
    cachedit.wrap(built.pipe, "kv-edit", mode="inversion", skip=4, source_guidance=None)
    found = edited(built, family, seed=50)
    assert torch.equal(found[:, OUTSIDE], x0[:, OUTSIDE])
    assert far(found[:, INSIDE], x0[:, INSIDE]) > 0.05
    run = cachedit.last_run(built.pipe)
    assert [call.tokens for call in run.calls] == [6 * TOKENS + 4, *[4] * 5]
    layers = {"flux": 5, "qwenimage": 4}[family]
    assert run.cache_bytes_peak == 6 * layers * 2 * len(OUTSIDE) * 32 * 4


def test_what_is_kept_in_eight_bits_is_a_third_and_the_background_is_bit_for_bit(built: Built, family: str) -> None:
    x0 = packed(built)
    cachedit.wrap(built.pipe, "kv-edit", mode="inversion", source_guidance=None)
    wide, bytes_wide = edited(built, family), cachedit.last_run(built.pipe).cache_bytes_peak
    cachedit.wrap(built.pipe, "kv-edit", mode="inversion", source_guidance=None, dtype="int8")
    found = edited(built, family)
    assert cachedit.last_run(built.pipe).cache_bytes_peak * 64 == bytes_wide * (16 + 4)  # heads of 16 channels
    assert torch.equal(found[:, OUTSIDE], x0[:, OUTSIDE])
    assert 0 < far(found, wide) < 0.02


def test_more_steps_bring_an_inversion_and_its_way_back_together(built: Built, family: str) -> None:
    """Up and down differ by the step size alone, so four times the steps leave about a quarter of the error."""
    x0 = packed(built)
    cachedit.wrap(built.pipe, "kv-edit", mode="inversion", skip=0, source_guidance=None)
    errors = [far(edited(built, family, steps=steps), x0) for steps in (10, 40)]
    assert errors[1] < errors[0] / 2.5


def test_an_inversion_evaluates_the_lower_level_of_every_interval(
    built: Built, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told the level below while it climbs, and the one above on the way down."""
    told: list[tuple[int, float]] = []
    cachedit.wrap(built.pipe, "kv-edit", mode="inversion", skip=0)
    forward = type(built.pipe.transformer).forward

    def listening(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        told.append((hidden_states.shape[1], float(kwargs["timestep"][0])))
        return forward(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(type(built.pipe.transformer).__base__, "forward", listening)
    edited(built, family, steps=3)
    levels = [float(sigma) for sigma in built.pipe.scheduler.sigmas]
    assert [size for size, _ in told] == [TOKENS] * 3 + [4] * 3
    assert [t for _, t in told] == pytest.approx([levels[3], levels[2], levels[1], *levels[:3]])


def test_a_restart_begins_from_noise(built: Built, family: str) -> None:
    found = []
    for restart in (False, True):
        cachedit.wrap(built.pipe, "kv-edit", mode="inversion", restart=restart)
        found.append(edited(built, family))
    assert far(found[1][:, INSIDE], found[0][:, INSIDE]) > 0.05
    assert torch.equal(found[1][:, OUTSIDE], found[0][:, OUTSIDE])


def test_two_prompts_are_two_edits_of_one_image(built: Built, family: str) -> None:
    cachedit.wrap(built.pipe, "kv-edit")
    both = {name: torch.cat([x, x.flip(1)]) if torch.is_tensor(x) else x for name, x in built.kwargs.items()}
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    found = edited(
        built, family, seed=50, generator=generators, **{k: both[k] for k in both if torch.is_tensor(both[k])}
    )
    assert far(found[:1], edited(built, family, seed=50)) < EXACT
    assert far(found[1:, INSIDE], found[:1, INSIDE]) > 0.01


def test_guidance_by_a_negative_prompt_works_where_it_is_linear() -> None:
    """The original's velocity cancels between the branches, so an edit to its own prompts gives the image."""
    built = flux()
    built.pipe.set_progress_bar_config(disable=True)
    cachedit.wrap(built.pipe, "kv-edit", source_guidance=None)
    own = {"negative_prompt_embeds": Draw(0, 1)(TEXT, 16), "negative_pooled_prompt_embeds": Draw(1000, 1)(16)}
    assert far(edited(built, "flux", true_cfg_scale=3.0, **own), packed(built)) < EXACT
    assert [call.tokens for call in cachedit.last_run(built.pipe).calls][:2] == [TOKENS + 4, 4]
    with pytest.raises(ValueError, match="rescales what guidance gives"):
        edited(_wrapped(qwenimage()), "qwenimage")


def _wrapped(built: Built) -> Built:
    cachedit.wrap(built.pipe, "kv-edit")
    return built


def test_an_image_of_pixels_is_encoded_and_comes_back_as_one() -> None:
    built = _wrapped(flux())
    image = Image.fromarray(np.arange(16 * 16 * 3, dtype=np.uint8).reshape(16, 16, 3))
    with torch.no_grad():
        pixels = built.pipe.image_processor.preprocess(image, height=16, width=16)
        latents = (built.pipe.vae.encode(pixels).latent_dist.mode() - 0.1) * 1.5  # shift and scale of the zoo's vae
    found = edited(built, "flux", image=image, output_type="latent")
    assert torch.equal(found[:, OUTSIDE], built.pipe._pack_latents(latents, 1, 1, 8, 8)[:, OUTSIDE])
    assert edited(built, "flux", image=image, output_type="pil")[0].size == (16, 16)


def test_a_token_is_foreground_if_one_of_its_pixels_is() -> None:
    mask = np.zeros((16, 16), np.uint8)
    mask[4, 7] = 255
    for given in (mask, mask[None], torch.from_numpy(mask), Image.fromarray(mask), mask / 255.0, mask > 0):
        assert foreground(given, (4, 4)).tolist() == [5]
    with pytest.raises(ValueError, match="covers nothing"):
        foreground(np.zeros((16, 16)), (4, 4))
    with pytest.raises(ValueError, match=r"shape \(2, 16, 16\); allowed: \[H, W\]"):
        foreground(np.ones((2, 16, 16)), (4, 4))


def test_what_does_not_fit_is_refused_before_the_first_step(built: Built, family: str) -> None:
    pipe: Any = built.pipe
    cachedit.wrap(pipe, "kv-edit")
    with pytest.raises(ValueError, match="an edit needs image, mask_image, source_prompt"):
        pipe(**built.kwargs)
    with pytest.raises(ValueError, match="num_inference_steps=4 with skip=4; allowed: 5 or more"):
        edited(built, family, steps=4)
    with pytest.raises(ValueError, match="got latents, which an edit takes from image"):
        edited(built, family, latents=packed(built))
    with pytest.raises(ValueError, match="allowed: 'inversion_free', 'inversion'"):
        cachedit.wrap(pipe, "kv-edit", mode="ddim")
    with pytest.raises(ValueError, match="dtype='int4'; allowed: None, 'int8', 'fp8'"):
        cachedit.wrap(pipe, "kv-edit", dtype="int4")
    with pytest.raises(ValueError, match="restart=True; allowed: with mode"):
        cachedit.wrap(pipe, "kv-edit", restart=True)
    with pytest.raises(UnsupportedModelError, match="takes an image itself"):
        cachedit.wrap(FluxImg2ImgPipeline(**flux_parts()), "kv-edit")
    assert cachedit.last_run(pipe) is None


def test_unwrapped_it_makes_images_from_text_again(built: Built, family: str) -> None:
    stock = built.pipe(**built.kwargs, num_inference_steps=3, generator=torch.Generator().manual_seed(0))[0]
    cachedit.wrap(built.pipe, "kv-edit")
    edited(built, family)
    cachedit.unwrap(built.pipe)
    again = built.pipe(**built.kwargs, num_inference_steps=3, generator=torch.Generator().manual_seed(0))[0]
    assert torch.equal(again, stock)
