"""Other releases of diffusers and transformers: what they may have moved is an error that says so."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SIGMAS, Scripted, attach, drive, record_of
from language_models import llama, prompts
from test_video_stream import asked, pipe
from torch import nn

import cachedit
from cachedit.borrowed import TESTED, borrowed
from cachedit.feature import parts
from cachedit.feature.ranks import shared_group
from cachedit.video.decoder import StreamingDecoder
from zoo.models import CASES
from zoo.video_pipelines import video_vae

__all__ = ["pipe"]
PLAIN, WAN = CASES["plain"], CASES["wan"]
SAYS = r"cachedit needs {}, and {} [0-9.]+ has no such thing\. Allowed: {} .*Install one of these"


@pytest.fixture(autouse=True)
def _nothing_remembered() -> Iterator[None]:
    borrowed.cache_clear()
    yield
    borrowed.cache_clear()


def lost(patch: pytest.MonkeyPatch, module: str, name: str) -> str:
    """Take it out of the library; what the error must say."""
    patch.delattr(importlib.import_module(module), name)
    library = module.partition(".")[0]
    return SAYS.format(re.escape(f"{module}.{name}"), library, library)


def test_a_video_that_lacks_the_attention_dispatch_is_refused_and_nothing_is_left(
    pipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = [block.attn1.processor for block in pipe.transformer.blocks]
    message = lost(monkeypatch, "diffusers.models.attention_dispatch", "dispatch_attention_fn")
    with pytest.raises(ImportError, match=message):
        cachedit.wrap(pipe, "rolling-kv", window=6)(**asked(num_frames=5))
    assert [block.attn1.processor for block in pipe.transformer.blocks] == stock


def test_a_video_that_lacks_its_output_type_is_refused_before_its_first_step(
    pipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    pipe.transformer.register_forward_pre_hook(lambda *_: ran.append(1))
    cachedit.wrap(pipe, "rolling-kv", window=6)
    with pytest.raises(
        ImportError, match=lost(monkeypatch, "diffusers.pipelines.wan.pipeline_output", "WanPipelineOutput")
    ):
        pipe(**asked(num_frames=5))
    assert not ran


def test_a_decoder_that_cannot_put_patches_back_is_refused_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    vae = video_vae()
    vae.register_to_config(patch_size=2)
    message = lost(monkeypatch, "diffusers.models.autoencoders.autoencoder_kl_wan", "unpatchify")
    with pytest.raises(ImportError, match=message):
        StreamingDecoder(vae)


def test_an_autoencoder_that_counts_its_caches_otherwise_is_refused() -> None:
    vae = video_vae()
    del vae._cached_conv_counts
    with pytest.raises(cachedit.UnsupportedModelError, match="cannot decode a stream. Allowed: AutoencoderKLWan"):
        StreamingDecoder(vae)


def test_a_text_cache_that_cannot_listen_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target = llama()
    message = lost(monkeypatch, "transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS")
    with pytest.raises(ImportError, match=message):
        cachedit.generate(target, prompts(1, 7), "elastic-cache", gen_length=8, block_length=8)


def test_a_module_that_is_gone_is_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers.models.attention_dispatch", None)
    with pytest.raises(ImportError, match=r"needs diffusers\.models\.attention_dispatch\.dispatch_attention_fn, and"):
        borrowed("diffusers.models.attention_dispatch", "dispatch_attention_fn")


@pytest.mark.parametrize("config", [None, object(), type("Config", (), {"context_parallel_config": object()})()])
def test_without_the_private_attributes_of_parallelism_a_model_is_on_one_rank(config: Any) -> None:
    model = nn.Module()
    if config is not None:
        model._parallel_config = config
    assert shared_group(model) is None


def test_hooks_that_are_kept_elsewhere_are_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "HOOKS", "_renamed_hook")
    expected = drive(WAN.build(), WAN, SIGMAS)
    model = attach(WAN.build(), WAN, Scripted(compute=(0, 5)))
    outputs = drive(model, WAN, SIGMAS)
    assert record_of(model).computed_steps == [0, 5]
    assert all(torch.equal(outputs[step], expected[step]) for step in (0, 5))


def test_a_denoiser_without_a_cache_context_tells_its_branches_apart_by_their_order() -> None:
    """PlainDenoiser is no model of diffusers, so it has none."""
    model = attach(PLAIN.build(), PLAIN, Scripted(compute=(0,)))
    assert not hasattr(model, "cache_context")
    for sigma in SIGMAS[:3]:
        for seed in (0, 1):
            PLAIN.call(model, sigma, seed=seed)
    assert record_of(model).strip() == "■□□"
    assert len(record_of(model).steps) == 6


@pytest.mark.parametrize("library", TESTED)
def test_the_oldest_release_that_errors_name_is_the_oldest_that_may_be_installed(library: str) -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(rf'"{library}>=([0-9.]+)"', text)
    assert found is not None
    assert TESTED[library].split(" ")[0] == found[1]
