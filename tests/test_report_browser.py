"""A report in a real browser: it loads nothing, complains about nothing, fits and works by keyboard."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_report import row

from cachedit.evaluate.comparison import Comparison, Row, Shot
from cachedit.evaluate.page import render

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
WIDTHS = (390, 1280)
SAMPLE = Path(__file__).parents[1] / "docs" / "report-sample" / "report.html"
HOSTILE = "<img src=https://example.com/x onerror=alert(1)><script>alert(2)</script> & \"quoted\" 'text'"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        yield found
        found.close()


@pytest.fixture
def artefacts(tmp_path: Path) -> Path:
    """Where screenshots go: the folder that the environment names, or one of the test."""
    folder = Path(os.environ.get("CACHEDIT_ARTEFACTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def comparison(frames: int) -> Comparison:
    """Two caches on two prompts; a picture, or a video whose frames get brighter."""
    levels = torch.linspace(0.2, 0.8, frames).reshape(-1, 1, 1, 1).expand(-1, 3, 40, 60)
    rows = [Row("baseline", 1.0, 1.0, 3)]
    rows += [
        row(name, ["■□□", "■■□"], 0, speedup) for name, speedup in ((HOSTILE, 1.8), ("auto:target_speedup=2", 2.1))
    ]
    rows[0].shots = [Shot(HOSTILE, place) for place in range(2)]
    for found in rows:
        for shot in found.shots:
            shot.pictures, shot.video = levels * (1 if found is rows[0] else 0.9), frames > 1
    return Comparison({"command": f"cachedit report {HOSTILE}", "model": HOSTILE, "long": "x" * 300}, rows)


def opened(browser: Any, tmp_path: Path, found: Comparison, width: int) -> tuple[Any, list[str], list[str]]:
    """A comparison as a page, opened."""
    file = tmp_path / "report.html"
    file.write_text(render(found, HOSTILE), encoding="utf-8")
    return visited(browser, file, width)


def visited(browser: Any, file: Path, width: int) -> tuple[Any, list[str], list[str]]:
    """The page of a file, what it said on the console, and what it asked the net for."""
    page = browser.new_page(viewport={"width": width, "height": 900})
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: said.append(dialog.message))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(file.as_uri())
    return page, said, [url for url in asked if not url.startswith(("data:", file.as_uri()))]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("frames", [1, 5])
def test_page_is_quiet_and_fits(browser: Any, tmp_path: Path, artefacts: Path, frames: int, width: int) -> None:
    page, said, asked = opened(browser, tmp_path, comparison(frames), width)
    page.screenshot(path=artefacts / f"report-{frames}-{width}.png", full_page=True)
    assert said == []
    assert asked == []
    assert page.title() == HOSTILE
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("h3").first.inner_text().startswith(HOSTILE)
    broken = "[...document.images].filter(image => !image.complete || !image.naturalWidth).length"
    assert page.evaluate(broken) == 0
    assert page.evaluate("[...document.images].filter(image => !image.alt).length") == 0
    page.close()


def test_frames_are_stepped_through_by_keyboard_in_all_films_at_once(browser: Any, tmp_path: Path) -> None:
    page, said, _ = opened(browser, tmp_path, comparison(5), 1280)
    places = "[...document.querySelector('section').querySelectorAll('.film')].map(f => f.style.backgroundPosition)"
    slider = page.locator("section").first.get_by_role("slider")
    slider.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    # Five frames lie in three columns and two rows; the fourth begins the second row.
    assert page.evaluate(places) == ["0% 100%"] * 6
    assert page.locator("output").first.inner_text() == "4 of 5"
    button = page.locator("section").first.get_by_role("button")
    button.press("Enter")
    playwright.expect(page.locator("output").first).not_to_have_text("4 of 5")
    button.press("Enter")
    assert button.inner_text() == "Play"
    assert page.locator("output").nth(1).inner_text() == "1 of 5"  # the other prompt has its own
    assert said == []
    page.close()


def test_without_scripts_there_are_no_controls_that_do_nothing(browser: Any, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(render(comparison(5)), encoding="utf-8")
    page = browser.new_page(java_script_enabled=False)
    page.goto(file.as_uri())
    assert page.locator(".film").first.is_visible()
    assert not page.locator(".player").first.is_visible()
    page.close()


def test_table_is_scrolled_by_keyboard(browser: Any, tmp_path: Path) -> None:
    page, _, _ = opened(browser, tmp_path, comparison(1), 390)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Result"
    # The page's policy forbids what wait_for_function does.
    once = "document.activeElement.addEventListener('scroll', done, {once: true})"
    page.evaluate(f"() => {{ window.scrolled = new Promise(done => {once}); }}")
    page.keyboard.press("ArrowRight")
    page.evaluate("window.scrolled")
    assert page.evaluate("document.activeElement.scrollLeft") > 0
    page.close()


@pytest.mark.parametrize("width", WIDTHS)
def test_the_report_in_the_documents_opens(browser: Any, artefacts: Path, width: int) -> None:
    page, said, asked = visited(browser, SAMPLE, width)
    page.screenshot(path=artefacts / f"report-sample-{width}.png", full_page=True)
    assert (said, asked) == ([], [])
    assert page.locator("img").count() == 3 * 3 * 3
    assert page.locator("circle.point").count() == 3
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.close()
