"""Progress on a terminal and in a log, and the prompts that ship with cachedit."""

import io
import re
import sys

import pytest
import torch

from cachedit.evaluate.loading import device_for, load_prompts, shipped_prompts
from cachedit.evaluate.progress import Lines, is_main, progress_bar
from cachedit.samples import prompts


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def lines_of(reports, total):
    """The lines for (seconds, done) reports."""
    shown, clock = [], Clock()
    lines = Lines(shown.append, clock)
    for seconds, done in reports:
        clock.now = 100.0 + seconds
        lines(done, total, "red star")
    return shown


class TestLines:
    def test_a_line_for_every_tenth(self):
        shown = lines_of([(k * 0.1, k) for k in range(201)], 200)
        assert len(shown) == 10
        assert [line.split()[0] for line in shown[:2]] == ["20/200", "40/200"]
        assert shown[-1] == "200/200 (100 %), 0:00:00 left: red star"

    def test_a_line_after_half_a_minute_without_one(self):
        shown = lines_of([(k * 8, k) for k in range(10)], 1000)  # 8 s a step: a line at 32 s and at 64 s
        assert [line.split()[0] for line in shown] == ["4/1000", "8/1000"]
        assert shown[0] == "4/1000 (0 %), 2:12:48 left: red star"  # 996 steps of 8 s

    def test_what_was_done_before_does_not_count_as_fast(self):
        shown = lines_of([(0, 90), (10, 95), (20, 100)], 200)  # resumed at 90, 2 s a step
        assert shown[0] == "90/200 (45 %), time left unknown: red star"
        assert shown[1] == "100/200 (50 %), 0:03:20 left: red star"

    def test_nothing_is_shown_before_anything_is_done(self):
        assert lines_of([(0, 0), (1, 0)], 10) == []
        assert lines_of([(0, 0)], 0) == []


class Terminal(io.StringIO):
    def isatty(self):
        return True


class TestBar:
    def run(self, monkeypatch, stream):
        monkeypatch.setattr(sys, "stderr", stream)
        with progress_bar() as progress:
            for done in range(9):
                progress(done, 8, "red star")
        return stream.getvalue()

    def test_on_a_terminal(self, monkeypatch):
        for name in ("TERM", "NO_COLOR", "COLUMNS"):
            monkeypatch.delenv(name, raising=False)
        written = self.run(monkeypatch, Terminal())
        assert "8/8" in written
        assert len(re.findall(r"\d:\d\d:\d\d", written)) >= 2  # time taken, and time left
        assert "(100 %)" not in written

    def test_in_a_log(self, monkeypatch):
        written = self.run(monkeypatch, io.StringIO())
        assert written.splitlines()[-1] == "8/8 (100 %), 0:00:00 left: red star"

    def test_in_another_process_than_the_main_one(self, monkeypatch):
        monkeypatch.setenv("RANK", "1")
        assert self.run(monkeypatch, Terminal()) == ""


class TestRanks:
    def test_main(self, monkeypatch):
        monkeypatch.delenv("RANK", raising=False)
        assert is_main()
        monkeypatch.setenv("RANK", "0")
        assert is_main()
        monkeypatch.setenv("RANK", "1")
        assert not is_main()

    def test_each_process_takes_the_device_of_its_number(self, monkeypatch):
        monkeypatch.setattr(torch, "empty", lambda *_, **__: None)  # there is no such device here
        monkeypatch.setenv("LOCAL_RANK", "3")
        assert device_for("cuda") == torch.device("cuda", 3)
        assert device_for("cuda:1") == torch.device("cuda", 1)
        assert device_for("cpu") == torch.device("cpu")
        monkeypatch.delenv("LOCAL_RANK")
        assert device_for("cuda") == torch.device("cuda")


class TestPrompts:
    def test_the_shipped_set(self):
        found = shipped_prompts()
        assert len(set(found)) == len(found) == 16
        assert all(20 < len(prompt) < 200 and prompt == prompt.strip() for prompt in found)

    def test_what_is_run(self, tmp_path):
        assert load_prompts(None, None, None) == prompts("image")[:6]
        assert load_prompts(None, None, None, sample=None) == shipped_prompts()[:6]
        assert load_prompts(None, None, 16, sample=None) == shipped_prompts()
        (tmp_path / "own.txt").write_text("\n a \nb\n", encoding="utf-8")
        assert load_prompts(str(tmp_path / "own.txt"), None, None, sample=None) == ["a", "b"]
        assert load_prompts(None, ["c"], None, sample=None) == ["c"]
        with pytest.raises(ValueError, match="Allowed: 1 to 16"):
            load_prompts(None, None, 17, sample=None)
