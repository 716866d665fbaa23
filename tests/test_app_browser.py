"""The app as people use it: served by ``python app.py``, in a real browser."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from browser import chromium, shots

from cachedit import Profile

pytest.importorskip("gradio", reason="gradio is not installed: pip install 'cachedit[app]'")

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 120_000  # milliseconds: the machine may be busy
TWO_PROMPTS = (
    "a large red star on a dark blue background at the top left\n"
    "a small green triangle on a white background at the bottom right"
)


@dataclass
class Visit:
    """A page of the app, and what went on in it."""

    page: Any
    url: str
    folder: Path
    outside: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def watch(self, page: Any) -> Any:
        """Note requests that leave the machine, and errors."""
        page.set_default_timeout(PATIENCE)
        page.on("request", lambda request: self._request(request.url))
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.goto(self.url)
        page.get_by_role("button", name="Generate").wait_for()
        page.locator("#image-options").get_by_label("threshold").wait_for()
        return page

    def _request(self, url: str) -> None:
        if not re.match(r"(data|blob):|http://127\.0\.0\.1[:/]", url):
            self.outside.append(url)


@pytest.fixture(scope="module")
def visit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Visit]:
    folder = tmp_path_factory.mktemp("app")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, str(ROOT / "app.py"), "--port", str(port), "--out", "out"]
    with (
        chromium() as browser,
        (folder / "app.log").open("w") as log,
        subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=log, text=True) as server,
    ):
        try:
            assert server.stdout is not None
            printed = next((line for line in server.stdout if "127.0.0.1" in line), None)
            assert printed is not None, (folder / "app.log").read_text()
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            found = Visit(page, f"http://127.0.0.1:{port}", folder)
            found.watch(page)
            yield found
        finally:
            server.kill()


@pytest.fixture
def page(visit: Visit) -> Any:
    """The page as the test before left it."""
    return visit.page


def choose(page: Any, strategy: str, tab: str = "image") -> None:
    field = page.locator(f"#{tab}-strategy input")
    field.fill(strategy)
    field.press("Enter")


def set_steps(page: Any, steps: int) -> None:
    field = page.get_by_role("tabpanel").locator("visible=true").get_by_label("number input for Steps")
    field.fill(str(steps))
    field.press("Tab")


def run(page: Any, tab: str) -> str:
    """Start what the tab does, and return how it ended."""
    start(page, tab)
    return ended(page, tab)


def start(page: Any, tab: str) -> None:
    """Start what the tab does, and mark what the status says now as old."""
    page.locator(f"#{tab}-status .ce-status").evaluate("one => one.classList.add('old')")
    page.click(f"#{tab}-start")


def ended(page: Any, tab: str) -> str:
    """Wait for the end of a run, and return what the status says."""
    over = page.locator(f"#{tab}-status .ce-status:not(.old):is(.ce-said, .ce-error)")
    over.wait_for()
    return over.inner_text()


def open_tab(page: Any, name: str) -> None:
    page.get_by_role("tab", name=name).click()


class TestImage:
    def test_every_control_has_a_name(self, page: Any) -> None:
        unnamed = page.evaluate(
            """() => [...document.querySelectorAll('input, textarea, select, button')]
                .filter(one => one.offsetParent && !one.labels?.length && !one.getAttribute('aria-label')
                    && !one.getAttribute('aria-labelledby') && !one.innerText.trim() && !one.title)
                .map(one => one.outerHTML.slice(0, 200))"""
        )
        assert unnamed == []
        assert page.evaluate("document.documentElement.lang") == "en"
        assert page.title() == "cachedit"

    def test_a_picture_beside_its_baseline(self, page: Any, visit: Visit) -> None:
        set_steps(page, 8)
        assert run(page, "image").startswith("Done in")
        result = page.locator("#image-result")
        assert result.get_by_role("img", name="baseline", exact=True).count() == 1
        assert result.get_by_role("img", name="difference of the two").count() == 1
        strip = result.get_by_role("img", name=re.compile("^8 steps; computed: 1"))
        assert strip.locator("i").count() == 8
        marks = result.locator("code").inner_text()
        assert marks.count("■") == strip.locator(".computed").count() < 8
        assert result.get_by_role("row", name="baseline").get_by_role("cell").nth(1).inner_text() == "1.00x"
        assert result.get_by_role("row", name="mag_cache").count() == 1
        shots(page, "image", visit.folder / "shots")

    def test_the_slider_moves_by_the_keyboard(self, page: Any) -> None:
        slider = page.locator("#image-result").get_by_role("slider", name="Share of the picture")
        slider.focus()
        slider.press("ArrowRight")
        assert page.locator(".ce-compare").evaluate("one => one.style.getPropertyValue('--at')") == "51%"

    def test_another_strategy_brings_its_own_options(self, page: Any) -> None:
        choose(page, "first_block_cache")
        options = page.locator("#image-options")
        options.get_by_text("Run the first block").wait_for()
        assert options.get_by_label("retention_ratio").count() == 0
        threshold = options.get_by_label("threshold")
        threshold.fill("0.5")
        threshold.press("Tab")
        assert run(page, "image").startswith("Done in")
        assert "FirstBlockCache(threshold=0.5," in page.inner_text("#image-result")

    def test_a_mistake_is_told_in_words(self, page: Any) -> None:
        page.get_by_label("Profile").fill("no-such-profile")
        choose(page, "mag_cache")
        told = run(page, "image")
        assert told.startswith("no profile is called 'no-such-profile'. Allowed: a file")
        assert "Traceback" not in page.content()
        page.get_by_label("Profile").fill("")
        assert run(page, "image").startswith("Done in")

    def test_cancel(self, page: Any) -> None:
        set_steps(page, 200)
        start(page, "image")
        page.locator("#image-status").get_by_text(re.compile(r"step \d+ of 200")).wait_for()
        page.locator("#image-status progress").wait_for()
        page.click("#image-cancel")
        assert ended(page, "image") == "Cancelled."
        set_steps(page, 6)
        assert run(page, "image").startswith("Done in")

    def test_two_visitors_do_not_disturb_each_other(self, page: Any, visit: Visit) -> None:
        other = visit.watch(page.context.browser.new_context().new_page())
        set_steps(page, 28)
        set_steps(other, 10)
        choose(other, "fora")
        start(page, "image")
        start(other, "image")
        assert [ended(one, "image")[:7] for one in (page, other)] == ["Done in"] * 2
        assert "MagCache(" in page.inner_text("#image-result")
        assert len(page.locator("#image-result code").inner_text()) == 28
        assert "FORA(" in other.inner_text("#image-result")
        assert other.locator("#image-result code").inner_text() == "■□□■□□■□□■"
        other.close()


class TestVideo:
    def test_a_video_appears_chunk_by_chunk(self, page: Any, visit: Visit) -> None:
        open_tab(page, "Video")
        frames = page.get_by_role("tabpanel").locator("visible=true").get_by_label("number input for Frames")
        frames.fill("36")
        frames.press("Tab")
        start(page, "video")
        result = page.locator("#video-result")
        result.get_by_role("img", name=re.compile("the newest frame, number")).wait_for()
        assert ended(page, "video").startswith("Done in")
        film = result.get_by_role("img", name="the video, 36 frames")
        assert film.evaluate("one => one.naturalWidth") == 32
        stills = result.get_by_role("list", name="Last frame of every chunk").get_by_role("listitem")
        assert stills.count() == 12
        assert "12 latent frames, 3 of them sink" in result.inner_text()
        assert result.get_by_role("region", name="Chunks").get_by_role("row").count() == 9
        shots(page, "video", visit.folder / "shots")

    def test_the_prompt_changes_while_it_runs(self, page: Any, visit: Visit) -> None:
        frames = page.get_by_role("tabpanel").locator("visible=true").get_by_label("number input for Frames")
        frames.fill("480")
        frames.press("Tab")
        start(page, "video")
        result = page.locator("#video-result")
        result.get_by_role("img", name="chunk 3", exact=True).wait_for()
        page.fill("#video-prompt textarea", "a blue circle moves up and bounces")
        page.click("#video-change")
        page.locator("#video-told").get_by_text("From the next chunk on: a blue circle").wait_for()
        result.locator("q", has_text="a blue circle moves up").wait_for()
        assert result.locator("q").first.inner_text().startswith("a red star")
        shots(page, "video-prompt", visit.folder / "shots")
        page.click("#video-cancel")
        assert ended(page, "video") == "Cancelled."

    def test_without_a_run_there_is_nothing_to_change(self, page: Any) -> None:
        page.click("#video-change")
        page.locator("#video-told").get_by_text("nothing is under way").wait_for()

    def test_a_window_that_is_too_small_is_told_in_words(self, page: Any) -> None:
        window = page.locator("#video-options").get_by_label("window")
        window.fill("2")
        window.press("Tab")
        assert "got a window of 2 frames with a sink of 3" in run(page, "video")
        window.fill("")
        window.press("Tab")


class TestText:
    def test_an_answer_appears_token_by_token(self, page: Any, visit: Visit) -> None:
        open_tab(page, "Text")
        assert run(page, "text").startswith("Done in")
        result = page.locator("#text-result")
        answer = result.get_by_role("group", name="Answer").inner_text()
        assert "".join(answer.split()) == "fyyfhpfyifbsgdymjtqigwniljgjktwjymjdxjj"  # the prompt moved by five letters
        assert "Step 48: 16 of 102 tokens computed, 0 not yet decided." in result.inner_text()
        assert "Both answers are the same." in result.inner_text()
        assert result.get_by_role("row").count() == 3  # the header, the baseline, the cache
        shots(page, "text", visit.folder / "shots")

    def test_another_strategy_computes_other_tokens(self, page: Any) -> None:
        page.locator("#text-strategy input").click()
        page.get_by_role("option", name="dkv_cache").click()
        page.locator("#text-options").get_by_label("interval").wait_for()
        assert run(page, "text").startswith("Done in")
        assert "DkvCache(" in page.locator("#text-result").inner_text()

    def test_auto_is_what_the_probe_of_the_sample_has_found(self, page: Any) -> None:
        page.locator("#text-strategy input").click()
        page.get_by_role("option", name="auto", exact=True).click()
        page.locator("#text-summary").get_by_text("The strategy for a language model").wait_for()
        assert page.locator("#text-options").get_by_label("target_speedup").count() == 0  # of auto for pictures
        assert run(page, "text").startswith("Done in")
        assert "FastDLLM(cache='dual')" in page.locator("#text-result").inner_text()

    def test_a_long_answer_is_cancelled(self, page: Any) -> None:
        open_tab(page, "Text")
        length = page.locator("#text-length").get_by_role("spinbutton")
        length.fill("2048")
        length.press("Tab")
        start(page, "text")
        page.locator("#text-status").get_by_text(re.compile(r"step \d+, \d+ of 2048 tokens")).wait_for()
        page.click("#text-cancel")
        assert ended(page, "text") == "Cancelled."

    def test_an_empty_prompt_is_told_in_words(self, page: Any) -> None:
        page.fill("#text-prompt textarea", "")
        assert "prompt" in run(page, "text")


class TestCalibrateAndAuto:
    def test_a_profile_with_its_plot_and_its_file(self, page: Any, visit: Visit, tmp_path: Path) -> None:
        open_tab(page, "Calibrate")
        set_steps(page, 6)
        page.fill("#calibrate-prompts textarea", TWO_PROMPTS)
        page.get_by_label("Name of the profile").fill("mine")
        assert run(page, "calibrate").startswith("Done in")
        result = page.locator("#calibrate-result")
        plot = result.get_by_role("img", name="Quality over computed steps")
        assert plot.evaluate("one => one.naturalWidth") > 300
        assert result.get_by_role("region", name="The measured frontier").get_by_role("row").count() > 1
        with page.expect_download() as download:
            page.click("#calibrate-download")
        download.value.save_as(tmp_path / "mine.json")
        assert "frontier" in Profile.load(tmp_path / "mine.json").arrays
        assert page.input_value("#profile :is(input, textarea)").endswith("mine.json")
        shots(page, "calibrate", visit.folder / "shots")

    def test_auto_with_a_target(self, page: Any) -> None:
        open_tab(page, "Image")
        set_steps(page, 8)
        choose(page, "auto")
        target = page.locator("#image-options").get_by_label("number input for target_speedup")
        target.fill("1.4")
        target.press("Tab")
        assert run(page, "image").startswith("Done in")
        told = page.inner_text("#image-result")
        assert "Auto(target_speedup=1.4," in told
        assert re.search(r"Expected: \d\.\d+x, \d computed steps", told)

    def test_one_prompt_is_too_few_for_a_frontier(self, page: Any) -> None:
        open_tab(page, "Calibrate")
        page.fill("#calibrate-prompts textarea", "a red star")
        assert run(page, "calibrate").startswith("got 1 prompt; allowed: 2 or more")


class TestReport:
    def test_a_report_and_its_file(self, page: Any, visit: Visit, tmp_path: Path) -> None:
        open_tab(page, "Report")
        page.fill("#report-strategies textarea", "fora\nfirst_block_cache:threshold=0.3")
        page.fill("#report-prompts textarea", "a <b>red</b> star on a white background")
        set_steps(page, 6)
        assert run(page, "report").startswith("Done in")
        frame = page.frame_locator("#report-result iframe")
        assert "first_block_cache" in frame.locator("body").inner_text()
        assert "a <b>red</b> star" in frame.locator("body").inner_text()
        with page.expect_download() as download:
            page.click("#report-download")
        download.value.save_as(tmp_path / "report.zip")
        names = zipfile.ZipFile(tmp_path / "report.zip").namelist()
        assert {"report.html", "report.json", "report.md"} <= set(names)
        shots(page, "report", visit.folder / "shots")


def test_nothing_left_the_machine_and_nothing_failed(visit: Visit) -> None:
    assert visit.outside == []
    assert visit.errors == []
    assert "Traceback" not in (visit.folder / "app.log").read_text()


def test_everything_was_written_into_the_folder(visit: Visit) -> None:
    assert {path.name for path in visit.folder.iterdir()} <= {"out", "app.log", "shots"}
