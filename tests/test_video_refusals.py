"""What cannot be rolled out is said before anything is computed; and checkpoints, which fit or are refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from conftest import dissect
from diffusers import WanPipeline
from safetensors.torch import save_file
from test_video_stream import ROLLING, asked
from test_video_stream import pipe as pipe
from video_models import TEXT, draw, tiny

import cachedit
from cachedit import UnsupportedModelError
from cachedit.video import PRESETS, RollingKVCache, StreamingDecoder, load_causal_checkpoint
from zoo.models import CASES


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"preset": "wan"}, "self-forcing, causvid, longlive, krea, rolling-forcing"),
        ({"window": 2}, "window - sink of 3 or more"),
        ({"window": 5, "sink": 3}, "window - sink of 3 or more"),
        ({"window": 3, "sink": 3}, "a window that is larger"),
        ({"chunk": 30}, "a larger window or a smaller chunk"),
        ({"chunk": 0}, "1 latent frame or more"),
        ({"preset": "krea", "window": 5}, "a window of 6 or more"),
        ({"preset": "rolling-forcing", "window": 12}, "15 or more"),
        ({"sigmas": (0.5, 0.75)}, "falling noise levels"),
        ({"sigmas": ()}, "falling noise levels"),
        ({"rope": "learned"}, "absolute, sink_shift, relative"),
        ({"dtype": "int4"}, "'int8' or 'fp8'"),
        ({"context_sigma": 1.5}, "from 0 to below 1"),
    ],
)
def test_options_that_cannot_be(pipe: Any, options: dict[str, Any], said: str) -> None:
    before = dissect(pipe)
    with pytest.raises(ValueError, match=said):
        cachedit.wrap(pipe, "rolling-kv", **options)
    assert dissect(pipe) == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"height": 24}, "a multiple of 16.* The nearest is (16|32) x 16"),
        ({"num_frames": 0}, "1 or more"),
        ({"num_frames": 9, "seconds": 1.0}, "one of the two"),
        ({"seconds": -1.0}, "above 0"),
        ({"num_inference_steps": 50}, "allowed: 4, the steps of preset 'self-forcing'"),
        ({"output_type": "gif"}, "np, pt, pil, latent"),
        ({"latents": torch.zeros(1, 4, 3, 8, 8)}, r"allowed: \[1, 4, frames, 2, 2\]"),
        ({"prompt": "a star", "prompt_embeds": None}, "no text encoder"),
        ({"guidance_scale": 2.0}, "negative_prompt_embeds"),
        ({"prompt": "a star"}, "one of the two"),
        ({"generator": [torch.Generator()] * 2}, "2 generators for 1 samples"),
        ({"strength": 0.5}, "with video="),
    ],
)
def test_arguments_that_cannot_be(pipe: Any, arguments: dict[str, Any], said: str) -> None:
    video = cachedit.wrap(pipe, "rolling-kv", **ROLLING)
    pipe.transformer.register_forward_pre_hook(lambda *_: pytest.fail("computed something"))
    with pytest.raises(ValueError, match=said):
        video.stream(**asked(**arguments))
    with pytest.raises(TypeError, match="unexpected keyword"):
        video.stream(**asked(), frame_rate=3)


def test_objects_that_cannot_be(pipe: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="CausalNetwork drives a transformer by hand"):
        cachedit.wrap(pipe.transformer, "rolling-kv")
    with pytest.raises(UnsupportedModelError, match="Allowed: WanTransformer3DModel"):
        cachedit.video.CausalNetwork(CASES["flux"].build())
    two = WanPipeline(**{**pipe.components, "transformer_2": tiny(dtype=torch.float32)})
    with pytest.raises(UnsupportedModelError, match="two denoisers"):
        cachedit.wrap(two, "rolling-kv")
    with pytest.raises(TypeError, match="reads no profile"):
        cachedit.wrap(pipe, "rolling-kv", profile="flux-dev")


def test_a_state_of_another_wrap_is_refused(pipe: Any) -> None:
    state = cachedit.wrap(pipe, "rolling-kv", **ROLLING).stream(**asked()).state_dict()
    with pytest.raises(ValueError, match="Wrap the pipeline as it was"):
        cachedit.wrap(pipe, "rolling-kv", window=6).stream(state=state)
    with pytest.raises(ValueError, match="state alone"):
        cachedit.wrap(pipe, "rolling-kv", **ROLLING).stream(state=state, num_frames=9)


def test_losing_the_first_frame_without_a_sink_is_warned_of_once(pipe: Any) -> None:
    stream = cachedit.wrap(pipe, "rolling-kv", window=6).stream(**asked())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next(stream), next(stream)
    with pytest.warns(UserWarning, match="Wrap with sink=1 or more"):
        next(stream)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next(stream)
        for _ in range(4):
            list(cachedit.wrap(pipe, "rolling-kv", window=6, sink=1).stream(**asked(num_frames=37)))


def test_two_threads_are_refused(pipe: Any) -> None:
    stream = cachedit.wrap(pipe, "rolling-kv", **ROLLING).stream(**asked())
    other = stream.fork()
    nested: list[BaseException] = []

    def inside(*_: Any) -> None:
        if not nested:
            with pytest.raises(RuntimeError, match="two threads") as caught:
                next(other)
            nested.append(caught.value)

    hook = pipe.transformer.register_forward_pre_hook(inside)
    next(stream)
    hook.remove()
    assert nested
    assert torch.equal(next(other).latents, next(pipe.stream(**asked())).latents)


def test_published_noise_levels() -> None:
    """5s / (1 + 4s) of 1, .75, .5 and .25; what is used as it is lies within half a step of the shifted table."""
    assert PRESETS["self-forcing"].sigmas == pytest.approx((1.0, 0.9375, 5 / 6, 0.625))
    assert PRESETS["self-forcing"].timesteps == pytest.approx((1000, 937.5, 2500 / 3, 625))
    assert PRESETS["krea"].timesteps == (1000, 937, 833, 625)
    assert PRESETS["krea"].sigmas == pytest.approx((1.0, 0.937, 0.833, 0.625), abs=1e-3)
    assert PRESETS["causvid"].sigmas == pytest.approx((1.0, 0.757, 0.522), abs=2e-3)
    assert (PRESETS["longlive"].window, PRESETS["longlive"].sink) == (12, 3)


def test_an_autoencoder_that_cannot_stream() -> None:
    vae = type("Whole", (), {"config": type("C", (), {"scale_factor_temporal": 4})()})()
    with pytest.raises(UnsupportedModelError, match="scale_factor_temporal 1"):
        StreamingDecoder(vae)


def test_pins_need_room_and_frames_that_are_there() -> None:
    cache = RollingKVCache(1, 1, 24, (1, 1), window=4)
    with pytest.raises(ValueError, match="pins="):
        cache.pin([0])


class TestCheckpoints:
    """Three tensors in the original's names suffice to see the prefixes; the converter is diffusers'."""

    RENAMED = (
        ("condition_embedder.time_embedder.linear_1", "time_embedding.0"),
        ("condition_embedder.time_embedder.linear_2", "time_embedding.2"),
        ("condition_embedder.text_embedder.linear_1", "text_embedding.0"),
        ("condition_embedder.text_embedder.linear_2", "text_embedding.2"),
        ("condition_embedder.time_proj", "time_projection.1"),
        ("attn1", "self_attn"), ("attn2", "cross_attn"), (".to_out.0.", ".o."), (".to_q.", ".q."), (".to_k.", ".k."),
        (".to_v.", ".v."), ("ffn.net.0.proj", "ffn.0"), ("ffn.net.2", "ffn.2"), ("proj_out", "head.head"),
    )  # fmt: skip

    def original(self, model: Any) -> dict[str, torch.Tensor]:
        """The weights under the names that the original code gives them."""
        found = {}
        for name, x in model.state_dict().items():
            for ours, theirs in self.RENAMED:
                name = name.replace(ours, theirs)
            if name == "scale_shift_table":
                name = "head.modulation"
            name = name.replace("scale_shift_table", "modulation").replace("norm2", "norm*").replace("norm3", "norm2")
            found[name.replace("norm*", "norm3")] = x.clone()
        return found

    @pytest.mark.parametrize("container", ["generator_ema", "generator", None])
    @pytest.mark.parametrize("prefix", ["model.", "model._fsdp_wrapped_module.", ""])
    def test_published_layouts(self, tmp_path: Any, container: str | None, prefix: str) -> None:
        donor, target = tiny(dtype=torch.float32), tiny(dtype=torch.float32)
        for parameter in target.parameters():
            parameter.zero_()
        weights = {prefix + name: x for name, x in self.original(donor).items()}
        torch.save({container: weights, "step": 3} if container else weights, tmp_path / "model.pt")
        assert load_causal_checkpoint(target, tmp_path / "model.pt") is target
        assert all(torch.equal(x, target.state_dict()[name]) for name, x in donor.state_dict().items())

    def test_safetensors(self, tmp_path: Any) -> None:
        donor = tiny(dtype=torch.float32)
        weights = {f"model.{name}": x.bfloat16() for name, x in self.original(donor).items()}
        save_file(weights, tmp_path / "krea.safetensors")
        target = load_causal_checkpoint(tiny(dtype=torch.float32), tmp_path / "krea.safetensors")
        assert target.dtype == torch.float32

    def test_diffusers_names_too(self, tmp_path: Any) -> None:
        torch.save(tiny(dtype=torch.float32).state_dict(), tmp_path / "own.pt")
        load_causal_checkpoint(tiny(dtype=torch.float32), tmp_path / "own.pt")

    def test_what_does_not_fit_changes_nothing(self, tmp_path: Any) -> None:
        weights = self.original(tiny(dtype=torch.float32))
        target = tiny(dtype=torch.float32, ffn_dim=32)
        before = {name: x.clone() for name, x in target.state_dict().items()}
        weights.pop("blocks.0.self_attn.q.weight")
        weights["blocks.9.extra"] = torch.zeros(1)
        torch.save(weights, tmp_path / "wrong.pt")
        with pytest.raises(ValueError, match="1 missing: blocks.0.attn1.to_q.weight; 1 unknown: .*of another shape"):
            load_causal_checkpoint(target, tmp_path / "wrong.pt")
        assert all(torch.equal(x, before[name]) for name, x in target.state_dict().items())

    def test_files_that_are_no_checkpoint(self, tmp_path: Any) -> None:
        model = tiny(dtype=torch.float32)
        with pytest.raises(FileNotFoundError, match=".safetensors or .pt"):
            load_causal_checkpoint(model, tmp_path / "none.pt")
        (tmp_path / "text.pt").write_text("weights")
        with pytest.raises(ValueError, match="cannot be read as weights"):
            load_causal_checkpoint(model, tmp_path / "text.pt")
        torch.save({"generator": {"step": 3}}, tmp_path / "empty.pt")
        with pytest.raises(ValueError, match="holds no weights but step"):
            load_causal_checkpoint(model, tmp_path / "empty.pt")

    def test_nothing_in_a_file_is_run(self, tmp_path: Any) -> None:
        torch.save({"generator": torch.nn.Linear(2, 2)}, tmp_path / "code.pt")
        with pytest.raises(ValueError, match="cannot be read as weights"):
            load_causal_checkpoint(tiny(dtype=torch.float32), tmp_path / "code.pt")


def test_the_frames_do_not_depend_on_the_numbers_of_frames_that_rope_has_in_its_table() -> None:
    """A table of as few rows as a chunk: the ring takes its angles from the frame's number."""
    from cachedit.video import Branch, CausalNetwork

    found = []
    for rows in (4, 64):
        model = tiny(dtype=torch.float32, rope_max_seq_len=rows)
        network = CausalNetwork(model)
        branch = Branch(draw(1, 7, TEXT, dtype=torch.float32), network.cache((1, 4, 1, 4, 4), window=6))
        with network.attached():
            for index in range(6):
                last = network(branch, draw(1, 4, 3, 4, 4, seed=index, dtype=torch.float32), 0.0, commit=1)
        found.append(last)
    assert torch.equal(*found)
