"""The app's tab for videos: chunks as they come, other prompts between them, and the end of a rollout."""

from __future__ import annotations

import base64
import io
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from video_samples import random_pipeline

import cachedit
from cachedit.samples import sample_path

pytest.importorskip("gradio", reason="gradio is not installed: pip install 'cachedit[app]'")

from desks import serving

from cachedit.app import reel, video
from cachedit.app.desk import Desk
from cachedit.app.job import Cancelled, Job
from cachedit.app.options import options_of
from cachedit.app.reel import Reel
from cachedit.app.settings import Settings
from cachedit.app.video import FOR_SAMPLE, Rolling, roll
from cachedit.evaluate.picture_files import FRAME_MS
from cachedit.video.strategy import VideoStrategy

SIZE = {"height": 32, "width": 32}
OPTIONS = FOR_SAMPLE["rolling_kv"]
RED, BLUE = "a red star moves up and bounces", "a blue star moves up and bounces"


@pytest.fixture
def loaded() -> list[Any]:
    """The pipelines that were loaded."""
    return []


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded: list[Any]) -> Desk:
    return serving(random_pipeline, tmp_path / "out", loaded, monkeypatch)


def rolling(frames: int, **options: Any) -> Rolling:
    return Rolling("m", "rolling_kv", OPTIONS | options, RED, frames, 3, SIZE)


def outcome(job: Job) -> Reel:
    for _ in job.updates():
        pass
    return job.result


class TestRoll:
    def test_it_makes_what_a_call_makes_and_tells_of_every_chunk(self, desk: Desk) -> None:
        job = Job(lambda job: roll(job, desk, rolling(18)))
        parts = [status.part for status in job.updates() if status.part is not None]
        made = job.result
        assert (made.frames, made.whole) == (18, True)
        assert [len(part.chunks) for part in parts] == sorted({len(part.chunks) for part in parts})
        assert not any(part.whole for part in parts)
        pipe = cachedit.wrap(random_pipeline(), "rolling-kv", **OPTIONS)
        expected = pipe(
            RED, num_frames=18, height=32, width=32, generator=torch.Generator().manual_seed(3), output_type="pt"
        ).frames[0]
        torch.testing.assert_close(torch.cat(made.chunks), expected.float(), rtol=0, atol=1e-6)
        assert (made.run.status, len(made.run.chunks)) == ("finished", 6)

    def test_another_prompt_holds_from_the_next_chunk_on(self, desk: Desk) -> None:
        job = desk.begin("me", lambda job: roll(job, desk, rolling(30)))
        asked = False
        for status in job.updates():
            if status.part is not None and not asked:
                asked = True
                desk.send("me", (BLUE, "keep"))
        words = [chunk.prompt for chunk in job.result.run.chunks]
        assert words[0] == RED
        assert words[-1] == BLUE
        assert words == sorted(words, reverse=True)  # "a red" to "a blue", once
        with pytest.raises(ValueError, match="nothing is under way"):
            desk.send("me", (BLUE, "keep"))

    def test_cancel_ends_it_and_leaves_the_pipeline_bare(self, desk: Desk, loaded: list[Any]) -> None:
        job = Job(lambda job: roll(job, desk, rolling(3000)))
        for status in job.updates():
            if status.part is not None:
                job.cancel()
        with pytest.raises(Cancelled):
            job.result  # noqa: B018
        assert type(loaded[0]).__name__ == "WanPipeline"
        assert not hasattr(loaded[0], "stream")
        assert outcome(Job(lambda job: roll(job, desk, rolling(6)))).frames == 6
        assert len(loaded) == 1

    def test_an_impossible_option_is_told_before_the_first_chunk(self, desk: Desk) -> None:
        job = Job(lambda job: roll(job, desk, rolling(6, window=2)))
        assert all(status.part is None for status in job.updates())
        with pytest.raises(ValueError, match="window"):
            job.result  # noqa: B018

    def test_a_model_that_is_no_video_model_is_refused(self, tmp_path: Path) -> None:
        desk = Desk(Settings(folder=tmp_path / "out"))
        image = Rolling(str(sample_path("image")), "rolling_kv", {}, RED, 6, 0, {})
        with pytest.raises(Exception, match="CogView4Pipeline cannot be rolled out"):
            outcome(Job(lambda job: roll(job, desk, image)))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Reel:
    folder = tmp_path_factory.mktemp("out")
    desk = Desk(Settings(folder=folder))
    desk.shelf._load = lambda _: random_pipeline()
    job = desk.begin("me", lambda job: roll(job, desk, rolling(30)))
    for _ in job.updates():
        pass
    return job.result


class TestReel:
    def test_while_it_grows_the_newest_frame_and_a_still_of_every_chunk(self, made: Reel) -> None:
        part = Reel(made.chunks[:4], made.run)
        text = reel.shown(part)
        assert re.findall(r'alt="(.*?)"', text) == [
            "the newest frame, number 12",
            *(f"chunk {k}" for k in (1, 2, 3, 4)),
        ]
        assert text.count("<q>") == 1  # the prompt, where it begins
        assert _pictures(text)[0].n_frames == 1

    def test_the_whole_is_a_film_with_its_numbers(self, made: Reel) -> None:
        text = reel.shown(made)
        film = _pictures(text)[0]
        assert (film.n_frames, film.size, film.info["duration"]) == (30, (32, 32), FRAME_MS)
        assert "12 latent frames, 3 of them sink" in text
        assert "18 latent frames" in text  # that left the window
        assert text.count('<th scope="row">') == 8  # the first four chunks and the last four
        assert "http" not in text

    def test_large_frames_are_made_smaller(self, made: Reel) -> None:
        large = Reel((torch.rand(3, 3, 400, 600),), made.run, whole=True)
        assert _pictures(reel.shown(large))[0].size == (256, 170)

    def test_no_prompt_becomes_markup(self, made: Reel) -> None:
        made.run.chunks[1].prompt = "<b>bold</b>"
        assert "<b>" not in reel.shown(made)


def test_wishes_are_taken_once_and_in_order() -> None:
    got, sent = [], threading.Event()

    def work(job: Job) -> None:
        sent.wait(5)
        got.extend(job.mail())
        got.append("end")
        got.extend(job.mail())

    job = Job(work)
    for wish in ("a", "b"):
        job.send(wish)
    sent.set()
    for _ in job.updates():
        pass
    assert got == ["a", "b", "end"]


def test_every_option_of_rolling_caches_is_explained() -> None:
    assert video._strategies() == ["magic_world", "recompute_window", "rolling_kv"]
    assert all(option.text for name in video._strategies() for option in options_of(VideoStrategy.of_kind()[name]))


def test_the_sample_is_loaded_where_no_model_is_named(tmp_path: Path) -> None:
    desk = Desk(Settings(folder=tmp_path / "out"))
    made = outcome(Job(lambda job: roll(job, desk, Rolling("", "rolling_kv", OPTIONS, RED, 3, 0, SIZE))))
    assert made.chunks[0].shape == (3, 3, 32, 32)


def _pictures(text: str) -> list[Image.Image]:
    found = re.findall(r'src="data:image/\w+;base64,(.*?)"', text)
    return [Image.open(io.BytesIO(base64.b64decode(data))) for data in found]
