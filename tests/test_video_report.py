"""Reports on rolling caches: what they are compared with, what is told of the chunks, and frames side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from video_samples import random_pipeline

from cachedit.evaluate.configuration import Configuration, parse_configuration
from cachedit.evaluate.frame_plot import frame_plot
from cachedit.evaluate.report import Report, measure
from cachedit.evaluate.shot import Shot
from cachedit.strategies.recompute_window import RecomputeWindow

PROMPTS = ["a red star moves up and bounces", "a blue circle moves down and bounces"]
ROLLING = "rolling-kv:preset=longlive,rope=sink_shift"
CALL = {"height": 32, "width": 32, "num_frames": 18}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    folder = tmp_path_factory.mktemp("report")
    configurations = [
        parse_configuration(text) for text in (ROLLING, f"{ROLLING},dtype=int8", "recompute-window:preset=longlive")
    ]
    made = measure(random_pipeline(), configurations, PROMPTS, 28, folder=folder, call_options=CALL)
    made.write()
    return made


class TestRows:
    def test_the_baseline_computes_the_window_anew(self, report: Report) -> None:
        baseline = report.comparison.baseline
        assert baseline.strategy == "baseline"
        assert baseline.configuration.startswith("RecomputeWindow(preset='longlive'")
        assert report.comparison.conditions["baseline"] == baseline.configuration
        assert report.comparison.conditions["steps"] == 4  # those of the preset, not the 28 of the call

    def test_nothing_is_told_of_steps_that_there_are_not(self, report: Report) -> None:
        for row in report.comparison.rows:
            assert row.nfe == 6 * 4  # chunks of three frames, four steps each
            assert (row.reused, row.rho, row.strip) == (None, None, "")
            assert "reused" not in row.note

    def test_the_same_as_the_baseline_is_identical_to_it(self, report: Report) -> None:
        same = report.comparison.rows[3]
        assert same.identical == 2
        assert same.rollout["window"] == 12

    def test_eight_bits_hold_less_and_stay_close(self, report: Report) -> None:
        _, full, int8, _ = report.comparison.rows
        assert int8.cache_bytes < 0.45 * full.cache_bytes
        assert torch.equal(full.shots[0].look()[:3], int8.shots[0].look()[:3])  # nothing is kept before the first chunk
        assert not int8.identical

    def test_cost_is_counted_with_the_commits(self, report: Report) -> None:
        baseline, full, *_ = report.comparison.rows
        # 6 chunks x (4 steps + a commit), the last without one; the baseline writes 0, 3, 6, 9, 9, 9 frames anew.
        assert full.macs < baseline.macs

    def test_metrics_are_of_frames_and_of_time(self, report: Report) -> None:
        row = report.comparison.rows[1]
        assert {"psnr", "ssim", "temporal"} <= set(row.quality)


class TestDocuments:
    def test_json(self, report: Report) -> None:
        data = json.loads((report.folder / "report.json").read_text())
        assert data["kind"] == "video"
        rollout = data["rows"][1]["rollout"]
        assert {name: rollout[name] for name in ("chunks", "window", "sink", "left_the_window")} == {
            "chunks": 6, "window": 12, "sink": 3, "left_the_window": 6,
        }  # fmt: skip
        assert all(rollout[name] > 0 for name in ("first_chunk_ms", "last_chunk_ms", "commit_ms"))
        assert data["rows"][1]["prompts"][0]["strip"] is None

    def test_page_has_players_and_the_frames_psnr(self, report: Report) -> None:
        page = (report.folder / "report.html").read_text()
        assert page.count('class="player"') == 2  # prompts
        assert page.count("PSNR of each frame of rolling-kv") == 4  # two caches of two prompts; the third is identical
        assert page.count("6 chunks over a window of 12 latent frames (sink: 3)") == 2
        assert "■" not in page

    def test_markdown_tells_of_the_chunks(self, report: Report) -> None:
        text = (report.folder / "report.md").read_text()
        assert "6 chunks over a window of 12 latent frames (sink: 0)" in text  # the baseline
        assert "6 chunks over a window of 12 latent frames (sink: 3)" in text

    def test_videos_are_kept(self, report: Report) -> None:
        assert {path.name for path in (report.folder / "pictures" / "baseline").iterdir()} == {
            "001-seed0.png", "002-seed1.png",
        }  # fmt: skip
        assert report.comparison.rows[1].shots[0].look().shape == (18, 3, 32, 32)

    def test_a_shot_survives_an_interruption(self, report: Report) -> None:
        shot = report.comparison.rows[1].shots[1]
        again = Shot.from_state(shot.to_state())
        assert again.run == shot.run
        assert again.nfe == shot.nfe == 24


class TestKinds:
    def test_feature_caches_are_compared_with_the_bare_pipeline(self) -> None:
        assert Configuration("fora").reference() is None
        found = parse_configuration("rolling-kv:window=15").reference()
        assert found is not None
        assert isinstance(found.strategy, RecomputeWindow)
        assert found.strategy.plan().window == 15
        assert found.name == "baseline"

    def test_the_two_kinds_do_not_mix(self, tmp_path: Path) -> None:
        configurations = [Configuration("fora"), Configuration("rolling-kv")]
        with pytest.raises(ValueError, match=r"fora would be compared with the bare pipeline.*two reports"):
            measure(random_pipeline(), configurations, PROMPTS, 4, folder=tmp_path, call_options=CALL)


class TestFramePlot:
    def test_it_falls_where_frames_get_worse(self) -> None:
        reference = torch.zeros(3, 3, 8, 8)
        frames = torch.stack([torch.full((3, 8, 8), error) for error in (0.001, 0.01, 0.1)])  # 60, 40, 20 dB
        drawn = frame_plot(frames, reference, "a <cache>")
        assert "PSNR of each frame of a &lt;cache&gt;: 20.0 to 60.0 dB" in drawn
        points = drawn.split('points="')[1].split('"')[0].split()
        heights = [float(point.split(",")[1]) for point in points]
        assert heights[1] - heights[0] == pytest.approx(heights[2] - heights[1], abs=0.11)
        assert heights[0] < heights[1]  # y points down

    def test_identical_frames_are_at_the_top_and_nothing_else_is_no_plot(self) -> None:
        reference = torch.zeros(2, 3, 8, 8)
        assert frame_plot(reference, reference, "same") == ""
        frames = torch.stack([torch.zeros(3, 8, 8), torch.full((3, 8, 8), 0.1)])
        first, last = frame_plot(frames, reference, "a").split('points="')[1].split('"')[0].split()
        assert float(first.split(",")[1]) < float(last.split(",")[1])
