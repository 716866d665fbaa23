"""Pictures and videos as files, and two folders of them compared by name."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cachedit.cli import main
from cachedit.evaluate.folders import compare_folders
from cachedit.evaluate.picture_files import read, slug, write


@pytest.fixture(autouse=True)
def _no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where those of LPIPS cannot be had; nobody looks for them on the net."""
    monkeypatch.setenv("CACHEDIT_LPIPS_WEIGHTS", "nowhere.pth")


def levels(*values: int, side: int = 12) -> torch.Tensor:
    """Frames of one grey level each."""
    return torch.tensor(values).reshape(-1, 1, 1, 1).expand(-1, 3, side, side) / 255


def noise(seed: int, count: int = 1, side: int = 12) -> torch.Tensor:
    return torch.randint(0, 256, (count, 3, side, side), generator=torch.Generator().manual_seed(seed)) / 255


def fill(folder: Path, **files: torch.Tensor) -> Path:
    folder.mkdir(parents=True)
    for name, pictures in files.items():
        write(folder / f"{name}.png", pictures)
    return folder


class TestFiles:
    @pytest.mark.parametrize("count", [1, 2, 5])
    def test_what_is_written_is_read_to_the_last_bit(self, tmp_path, count):
        pictures = noise(1, count)
        assert torch.equal(read(write(tmp_path / "a.png", pictures)), pictures)

    @pytest.mark.parametrize("frames", [(7, 7, 7), (1, 1, 2, 3, 3, 3), (1, 2, 2), (0, 0)])
    def test_equal_frames_in_a_row_are_not_lost(self, tmp_path, frames):
        """Pillow stores them as one that lasts longer."""
        assert torch.equal(read(write(tmp_path / "a.png", levels(*frames))), levels(*frames))

    def test_out_of_range_and_not_finite(self, tmp_path):
        pictures = torch.tensor([-1.0, 2.0, math.nan, 0.5]).reshape(1, 1, 2, 2).expand(1, 3, 2, 2)
        found = read(write(tmp_path / "a.png", pictures))[0, 0].flatten() * 255
        assert found.round().tolist() == [0, 255, 0, 128]

    def test_other_formats(self, tmp_path):
        frames = [Image.fromarray(np.full((12, 12, 3), level, np.uint8)) for level in (0, 255, 128)]
        for name in ("a.webp", "a.gif"):
            frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:], duration=100)
            assert read(tmp_path / name).shape == (3, 3, 12, 12)
        Image.new("L", (5, 4), 51).save(tmp_path / "grey.png")
        assert torch.allclose(read(tmp_path / "grey.png"), torch.full((1, 3, 4, 5), 0.2))

    def test_what_is_no_picture(self, tmp_path):
        (tmp_path / "a.png").write_text("no picture", encoding="utf-8")
        with pytest.raises(ValueError, match="a.png is no picture that Pillow reads"):
            read(tmp_path / "a.png")

    def test_videos_without_a_reader_say_what_to_install(self, tmp_path, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(ValueError, match=r"a.mp4 is a video.*pip install imageio imageio-ffmpeg"):
            read(tmp_path / "a.mp4")

    @pytest.mark.parametrize(
        ("name", "folder"),
        [
            ("magcache:threshold=0.1", "magcache-threshold=0.1"),
            ("../../x", "x"),
            ("..", "unnamed"),
            ("a/b\\c", "a-b-c"),
        ],
    )
    def test_names_of_folders(self, name, folder):
        assert slug(name) == folder


class TestFolders:
    def test_numbers_that_can_be_checked_by_hand(self, tmp_path):
        a = fill(tmp_path / "a", one=levels(100), two=levels(100))
        b = fill(tmp_path / "b", one=levels(151), two=levels(100))
        found = compare_folders(a, b)
        row = found.cached[0]
        assert [shot.prompt for shot in row.shots] == ["one", "two"]
        assert row.shots[0].psnr == pytest.approx(20 * math.log10(5))  # 51 of 255 is a fifth
        assert row.shots[1].psnr == math.inf
        assert row.psnr == pytest.approx(20 * math.log10(5))
        assert (row.identical, row.latency_s, row.speedup) == (1, None, None)
        assert found.worst_first() == [0, 1]
        assert found.conditions["num_files"] == 2

    def test_endings_do_not_count_and_folders_inside_do(self, tmp_path):
        a, b = fill(tmp_path / "a" / "x", one=noise(1)).parent, tmp_path / "b" / "x"
        b.mkdir(parents=True)
        Image.open(a / "x" / "one.png").save(b / "one.bmp")
        (b / "notes.txt").write_text("not a picture", encoding="utf-8")
        row = compare_folders(a, b.parent).cached[0]
        assert [shot.prompt for shot in row.shots] == ["x/one"]
        assert row.note == "changed nothing: every picture equals its counterpart to the last bit"

    def test_videos_are_compared_frame_by_frame(self, tmp_path):
        a = fill(tmp_path / "a", film=levels(0, 0, 51))
        b = fill(tmp_path / "b", film=levels(0, 51, 51))
        quality = compare_folders(a, b).cached[0].quality
        assert quality["psnr"] == pytest.approx(20 * math.log10(5))  # of the one frame that differs
        assert quality["temporal"] == pytest.approx(0.2)

    @pytest.mark.parametrize(
        ("files", "words"),
        [
            ({"one": levels(1), "three": levels(1)}, ["only in a: two", "only in b: three", "Allowed: two files"]),
            ({"one": levels(1), "two": levels(1, side=14)}, ["two (12x12 and 14x14)", "1 of 2 differ in size"]),
            ({"one": levels(1, 2), "two": levels(1)}, ["one (12x12 and 12x12, 2 frames)"]),
        ],
    )
    def test_odd_ones_are_listed_and_end_with_2(self, tmp_path, monkeypatch, capsys, files, words):
        monkeypatch.chdir(tmp_path)
        fill(Path("a"), one=levels(1), two=levels(1))
        fill(Path("b"), **files)
        assert main(["compare", "a", "b", "--page", "page.html"]) == 2
        error = capsys.readouterr().err
        assert all(word in error for word in words), error
        assert not Path("page.html").exists()

    def test_what_is_no_folder_of_pictures(self, tmp_path):
        empty, full = tmp_path / "empty", fill(tmp_path / "full", one=levels(1))
        with pytest.raises(ValueError, match="empty is no folder"):
            compare_folders(full, empty)
        empty.mkdir()
        with pytest.raises(ValueError, match="empty holds no pictures or videos; allowed: .png"):
            compare_folders(full, empty)
        Image.new("RGB", (12, 12)).save(full / "one.jpg")
        with pytest.raises(ValueError, match="holds one.jpg and one.png; allowed: one file of a name"):
            compare_folders(full, full)

    def test_command(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        fill(Path("a"), one=noise(1, side=16), two=levels(1, side=16))
        fill(Path("b"), one=noise(2, side=16), two=levels(1, side=16))
        assert main(["compare", "a", "b", "--page", "page.html", "-o", "out.json"]) == 0
        printed = capsys.readouterr().out
        assert "two: identical to the baseline" in printed
        assert printed.index("one: PSNR") < printed.index("two: identical")
        assert "cachedit compare a b" in Path("page.html").read_text(encoding="utf-8")
        data = json.loads(Path("out.json").read_text(encoding="utf-8"))
        assert [row["strategy"] for row in data["rows"]] == ["a", "b"]
        assert data["rows"][1]["identical_prompts"] == 1
