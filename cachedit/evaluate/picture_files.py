"""Pictures and videos as files: lossless when written, and whatever Pillow or an installed video reader can open."""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cachedit.files import write_bytes

PICTURES = (".png", ".apng", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
VIDEOS = (".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v")
FRAME_MS = 125  # of a written video: a viewer shows 8 frames per second
COUNT = "frames"  # text chunk: equal frames in a row are stored as one that lasts longer


def write(path: Path, pictures: Tensor) -> Path:
    """Write pictures as one PNG in one step; several as an animated one, which browsers play.

    PNG is lossless at 8 bits per channel and needs nothing but Pillow.

    Args:
        path: the file; its folder must exist.
        pictures: ``[N, 3, H, W]`` in [0, 1].
    """
    from PIL.PngImagePlugin import PngInfo

    images = [to_image(picture) for picture in pictures]
    buffer = io.BytesIO()
    if len(images) == 1:
        images[0].save(buffer, "PNG")
    else:
        info = PngInfo()
        info.add_text(COUNT, str(len(images)))
        images[0].save(buffer, "PNG", save_all=True, append_images=images[1:], duration=FRAME_MS, loop=0, pnginfo=info)
    return write_bytes(path, buffer.getvalue())


def read(path: Path) -> Tensor:
    """The pictures or frames of a file as ``[N, 3, H, W]`` in [0, 1].

    Raises:
        OSError: it cannot be read.
        ValueError: it holds no pictures, or is a video for which no reader is installed.
    """
    if path.suffix.lower() in VIDEOS:
        frames = [*_frames(path)]
        if not frames:
            raise ValueError(f"{path} holds no frames; allowed: a video that can be played. Write it again.")
        return _stacked(frames)
    return _stacked(_images(path))


def to_image(picture: Tensor) -> Any:
    """A picture ``[3, H, W]`` in [0, 1] as a PIL image of 8 bits per channel; what is not finite is black or white."""
    from PIL import Image

    return Image.fromarray((picture.nan_to_num().clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy())


def slug(name: str) -> str:
    """A name as a folder: letters, digits, ".", "_", "=" and "-", and never a way out of where it lies."""
    return re.sub(r"[^\w.=-]+", "-", name).strip("-.")[:80] or "unnamed"


def _stacked(frames: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2).float() / 255


def _images(path: Path) -> list[np.ndarray]:
    """All frames of a file that Pillow reads; those that ``write`` had stored as one are told apart again."""
    from PIL import Image, UnidentifiedImageError

    frames, durations = [], []
    try:
        with Image.open(path) as image:
            for place in range(getattr(image, "n_frames", 1)):
                image.seek(place)
                image.load()
                frames.append(np.asarray(image.convert("RGB")))
                durations.append(float(image.info.get("duration") or 0))
            count = int(image.info.get(COUNT, len(frames)))
    except (UnidentifiedImageError, SyntaxError, EOFError) as error:
        raise ValueError(
            f"{path} is no picture that Pillow reads ({error}); allowed: {', '.join(PICTURES)}."
        ) from error
    if count == len(frames):
        return frames
    if len(frames) == 1:
        return frames * count
    repeats = [max(round(duration / FRAME_MS), 1) for duration in durations]
    return [frame for frame, times in zip(frames, repeats, strict=True) for _ in range(times)]


def _frames(path: Path) -> Iterator[np.ndarray]:
    """Frames of a video, by imageio with ffmpeg or else by OpenCV, whichever is installed."""
    if importlib.util.find_spec("imageio") and importlib.util.find_spec("imageio_ffmpeg"):
        import imageio.v3

        yield from imageio.v3.imiter(path, plugin="FFMPEG")
    elif importlib.util.find_spec("cv2"):
        import cv2

        video = cv2.VideoCapture(str(path))
        try:
            while (frame := video.read())[0]:
                yield cv2.cvtColor(frame[1], cv2.COLOR_BGR2RGB)
        finally:
            video.release()
    else:
        raise ValueError(
            f"{path} is a video, and nothing that reads it is installed; allowed: animated PNG, WebP, GIF. "
            "For others: pip install imageio imageio-ffmpeg, or opencv-python-headless"
        )
