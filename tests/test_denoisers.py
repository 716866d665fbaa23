"""Every transformer and UNet of the installed diffusers runs under a strategy, or is refused with a reason."""

from __future__ import annotations

from pathlib import Path

import diffusers
import pytest
import torch
from trials.support import Verdict, cases, page, supported, verdicts

import cachedit
from zoo.rows import DENOISERS, TRANSFORMERS

ROOT = Path(__file__).parents[1]
CASES = cases()
UNSEEN = [
    "Cosmos3OmniTransformer", "MiniMaxMusic3RVQDepthDecoder", "MotionAdapter", "RFD4ProteinaTransformer",
    "T5FilmDecoder",
]  # fmt: skip
"""Classes without a tiny model: all are refused, whatever their sizes."""
SEEN: dict[str, dict[str, Verdict]] = {}


@pytest.mark.parametrize("name", CASES)
def test_a_denoiser_is_cached_exactly_or_refused_with_a_reason(name: str) -> None:
    SEEN[name] = verdicts(CASES[name])
    for strategy, verdict in SEEN[name].items():
        if verdict.refusal:
            assert name in verdict.refusal, strategy
            assert len(verdict.refusal) > 60, strategy
        else:
            assert "□" in verdict.strip, f"{strategy} is a silent no-op"
            assert not verdict.wrong, strategy
            assert verdict.error <= 2e-6, strategy
            assert verdict.saved > 0.2, strategy


@pytest.mark.parametrize("name", [name for name in UNSEEN if name in DENOISERS])
def test_a_class_without_a_tiny_model_is_refused(name: str) -> None:
    with torch.device("meta"):
        model = DENOISERS[name]()
    with pytest.raises(cachedit.UnsupportedModelError, match=name) as refused:
        cachedit.wrap(model, "taylorseer")
    assert len(str(refused.value)) > 60


def test_no_class_is_left_out() -> None:
    assert {*CASES, *UNSEEN} >= {*DENOISERS}


@pytest.mark.skipif(diffusers.__version__ != "0.42.1", reason="the page is of another diffusers")
def test_the_page_of_the_documentation_says_what_was_found() -> None:
    """By the tests above, which run first."""
    if len(SEEN) < len(CASES):
        pytest.skip("not all of them ran")
    assert (ROOT / "docs" / "support.md").read_text() == page(SEEN), "run python benchmarks/support.py"


@pytest.mark.skipif(len(TRANSFORMERS) < 75, reason="an older diffusers has fewer")
def test_most_transformers_and_the_unets_of_stable_diffusion_are_supported() -> None:
    if len(SEEN) < len(CASES):
        pytest.skip("not all of them ran")
    assert sum(supported(SEEN[name]) for name in SEEN if name in TRANSFORMERS) >= 69
    motion = ("UNetMotionModel", "UNetSpatioTemporalConditionModel", "UNet3DConditionModel", "I2VGenXLUNet")
    assert all(supported(SEEN[name]) for name in ("UNet2DConditionModel", *motion))
