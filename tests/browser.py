"""Debian's Chromium under playwright, for pages that are looked at as people see them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WIDTHS = (1280, 390)


@contextmanager
def chromium() -> Iterator[Any]:
    """The browser; the test is skipped where it, or playwright, is absent."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    found = shutil.which("chromium")
    if found is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, headless=True, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


def shots(page: Any, name: str, folder: Path) -> list[Path]:
    """Pictures of the whole page at both widths, in CACHEDIT_ARTEFACTS if that is set, else in ``folder``."""
    target = Path(os.environ.get("CACHEDIT_ARTEFACTS") or folder)
    target.mkdir(parents=True, exist_ok=True)
    before, files = page.viewport_size, []
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{name} is wider than {width} pixels"
        # A frame is painted only where it is seen, so the window is made as long as the page.
        page.set_viewport_size({"width": width, "height": page.evaluate("document.documentElement.scrollHeight")})
        files.append(target / f"{name}-{width}.png")
        page.screenshot(path=str(files[-1]))
    page.set_viewport_size(before)
    return files
