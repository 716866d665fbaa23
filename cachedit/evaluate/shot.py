"""One prompt under one configuration: what was drawn, how long it took, and how far it is from the bare pipeline."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from cachedit.evaluate.panel import STANDARD
from cachedit.evaluate.rollouts import passes
from cachedit.run import Run, Step

if TYPE_CHECKING:
    from cachedit.video.record import VideoRun


@dataclass
class Shot:
    """One prompt under one configuration.

    Attributes:
        prompt, seed: what was drawn, and from which noise.
        latencies: seconds of every measured call.
        processor: CPU seconds of this process in every measured call, which other processes do not lengthen.
        pictures: ``[N, 3, H, W]`` in [0, 1]; N > 1 for several pictures or frames. None while they lie in ``file``.
        video: True if the pictures are the frames of a video.
        file: where the pictures are kept; None for nowhere.
        peak_memory: most bytes that torch held on the device at once during the call; None where it cannot be told.
        run: the cache's record, of a video that was made chunk by chunk its own kind; None for the bare pipeline.
        identical: True if the pictures equal the bare pipeline's to the last bit.
        quality: metric -> value, against the bare pipeline where it needs one, mean over N. PSNR is infinite for
            identical pictures.
    """

    prompt: str
    seed: int
    latencies: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    pictures: Tensor | None = None
    video: bool = False
    file: Path | None = None
    peak_memory: int | None = None
    run: Run | VideoRun | None = None
    identical: bool = False
    quality: dict[str, float] = field(default_factory=dict)

    @property
    def strip(self) -> str:
        """One mark per step; "" for the bare pipeline."""
        return self.run.strip() if isinstance(self.run, Run) else ""

    @property
    def nfe(self) -> int | None:
        """Computed steps, of a video those of all chunks; None for the bare pipeline."""
        return None if self.run is None else self.run.nfe if isinstance(self.run, Run) else passes(self.run)

    @property
    def psnr(self) -> float | None:
        """In dB; None where it was not measured."""
        return self.quality.get("psnr")

    @property
    def ssim(self) -> float | None:
        """None where it was not measured."""
        return self.quality.get("ssim")

    @property
    def st_lpips(self) -> float | None:
        """None where it was not measured."""
        return self.quality.get("st_lpips")

    def look(self) -> Tensor:
        """The pictures, read from their file if need be.

        Raises:
            OSError: the file is gone.
        """
        from cachedit.evaluate.picture_files import read

        if self.pictures is not None:
            return self.pictures
        assert self.file is not None
        return read(self.file)

    def to_dict(self, folder: Path | None = None) -> dict[str, Any]:
        """JSON form, without the pictures; their file as it is seen from ``folder``."""
        values: dict[str, Any] = {"prompt": self.prompt, "seed": self.seed, "latency_s": self.latency_s}
        if folder is not None:
            values |= {"latencies_s": self.latencies, "processor_s": self.processor, "peak_memory": self.peak_memory}
            values["file"] = self.file.relative_to(folder).as_posix() if self.file is not None else None
        if self.run is not None or self.quality:
            values |= {
                "nfe": self.nfe,
                "strip": self.strip or None,
                "identical": self.identical,
                **flat(self.quality),
            }
        return values

    @property
    def latency_s(self) -> float | None:
        """Median of the calls; None if none was timed."""
        return statistics.median(self.latencies) if self.latencies else None

    def to_state(self) -> dict[str, Any]:
        """Plain data and tensors, from which ``from_state`` makes it again."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("run", "file")}
        return {
            **values,
            "run": None if self.run is None else asdict(self.run),
            "file": None if self.file is None else str(self.file),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Shot:
        """The reverse of ``to_state``."""
        file = state["file"]
        return cls(**{**state, "run": _record(state["run"]), "file": None if file is None else Path(file)})


def _record(state: dict[str, Any] | None) -> Run | VideoRun | None:
    """The record of a run from its plain data."""
    if state is None:
        return None
    if "steps" in state:
        return Run(**{**state, "steps": [Step(**step) for step in state["steps"]]})
    from cachedit.video.record import ChunkRecord, VideoRun

    return VideoRun(**{**state, "chunks": [ChunkRecord(**chunk) for chunk in state["chunks"]]})


def flat(quality: dict[str, float]) -> dict[str, Any]:
    """Metrics as JSON: a key for each of the standard ones, and those that other packages bring under "plugins"."""
    names = [metric.name for metric in STANDARD]
    others = {name: finite(value) for name, value in quality.items() if name not in names}
    return {**{name: finite(quality.get(name)) for name in names}, "plugins": others}


def finite(value: float | None) -> float | None:
    """``value``, or None where JSON has no number for it."""
    return value if value is not None and math.isfinite(value) else None
