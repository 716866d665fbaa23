"""Metrics of other packages: the documented example, found through a real entry point, and what is refused."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from cachedit.evaluate.panel import PSNR, SSIM, TEMPORAL, Metric, MetricUnavailable, Panel, installed, load

DOCS = Path(__file__).parents[1] / "docs" / "report.md"


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, module: str, text: str, points: str) -> None:
    """Put a package with entry points on the path, as pip would."""
    (folder / f"{module}.py").write_text(text, encoding="utf-8")
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[cachedit.metrics]\n{points}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))


def test_the_documented_example_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n# colourfulness.py\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    install(tmp_path, monkeypatch, "colourfulness", blocks[0], "colourfulness = colourfulness:metric")
    assert "colourfulness" in installed()
    (metric,) = load(["colourfulness", "colourfulness"])
    grey, half = torch.full((1, 3, 4, 4), 0.5), torch.zeros(2, 3, 4, 4)
    half[:, 0, :, :2] = 1  # red beside black: red - green is 1 or 0, the other pair 0.5 or 0
    panel = Panel([PSNR, metric])
    assert panel.judge(grey, None, "grey") == {"colourfulness": 0}
    expected = math.sqrt(0.25 + 0.0625) + 0.3 * math.sqrt(0.25 + 0.0625)
    assert panel.judge(half, half, "red") == {"psnr": math.inf, "colourfulness": pytest.approx(expected)}


BROKEN = """
from cachedit.evaluate.panel import Metric, MetricUnavailable

def unavailable(): raise MetricUnavailable("needs weights, put them there")
def crashing(): raise ImportError("no module")
def number(): return 3
def psnr(): return Metric("psnr", "PSNR", lambda a, b, prompt: 1.0)
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("unavailable", "the metric 'unavailable' cannot be had: needs weights, put them there"),
        ("crashing", "the metric 'crashing' cannot be loaded: ImportError: no module"),
        ("number", "the entry point 'number' gave 3; allowed: a function that returns"),
        ("psnr", "an identifier other than"),
        ("nosuch", "no package brings a metric called 'nosuch'. Allowed: crashing, number, psnr, unavailable"),
    ],
)
def test_what_is_no_metric_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str) -> None:
    names = ("unavailable", "crashing", "number", "psnr")
    points = "\n".join(f"{one} = broken_metrics:{one}" for one in names)
    install(tmp_path, monkeypatch, "broken_metrics", BROKEN, points)
    with pytest.raises(ValueError, match=re.escape(message)):
        load([name])


def test_a_metric_that_cannot_be_had_is_asked_once_and_told() -> None:
    asked = []

    def score(pictures: torch.Tensor, reference: torch.Tensor | None, prompt: str) -> float:
        asked.append(prompt)
        raise MetricUnavailable("not here")

    panel = Panel([Metric("mine", "mine", score)])
    pictures = torch.rand(1, 3, 4, 4)
    assert [panel.judge(pictures, pictures, prompt) for prompt in "ab"] == [{}, {}]
    assert (asked, panel.unavailable) == (["a"], {"mine": "not here"})


def test_frames_are_judged_in_parts_and_neighbours_together() -> None:
    """Twenty frames: each part has its own mean, and the change over its border must not be lost."""
    sizes = []

    def score(pictures: torch.Tensor, reference: torch.Tensor | None, prompt: str) -> torch.Tensor:
        sizes.append(len(pictures))
        return pictures.mean((1, 2, 3))

    frames = torch.arange(20.0).reshape(20, 1, 1, 1).expand(20, 3, 12, 12) / 20
    other = frames.clone()
    other[8:] += 0.04  # one jump, between the first part and the second
    panel = Panel([Metric("level", "level", score), SSIM, TEMPORAL])
    found = panel.judge(other, frames, "", video=True)
    assert sizes == [8, 8, 4]
    assert found["level"] == pytest.approx(9.5 / 20 + 0.04 * 12 / 20)
    assert found["temporal"] == pytest.approx(0.04 / 19)
    assert "temporal" not in panel.judge(other, frames, "", video=False)
    assert panel.judge(frames, None, "", video=True) == {}
