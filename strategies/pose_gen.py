"""PoseGen: images that share the background of one of them, which is attended to from a bank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from cachedit.conditions.anchor import AnchorSession
from cachedit.conditions.strategy import ConditionStrategy
from cachedit.kernels.eight_bits import FORMATS

from .checks import check_choice, check_count


@dataclass(frozen=True)
class PoseGen(ConditionStrategy):
    """Let later images attend to the background of the first, the anchor (PoseGen, arXiv 2508.05091).

    For Flux and QwenImage pipelines, whose calls then also take ``subject_mask`` and ``anchor``. It makes images of one
    series alike and none of them faster. Whatever is neither the anchor's subject nor the image's own attends at the
    leading steps, in the last layers, to the anchor in place of its own image. The paper shares between the segments
    of a video and finds the subjects itself, in what the text is attended with; here masks are given.

    steps:  leading steps that share (paper: 1 for a close-up, 2 for half a body, 4 for a whole one).
    layers: last layers that share (paper, of 40: 6; 8 for a whole body, 10 for a distant one).
    device: where the anchor is kept between the calls; None where the model is.
    dtype:  None keeps it as it is, "int8" and "fp8" in eight bits.
    """

    steps: int = 2
    layers: int = 6
    device: str | None = "cpu"
    dtype: Literal["int8", "fp8"] | None = None

    paper: ClassVar[str] = "arXiv 2508.05091"

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range.
        """
        check_count(self, "steps", "layers", lowest=1)
        check_choice(self, "dtype", (None, "int8", "fp8"))

    def session(self, pipe: Any) -> AnchorSession:
        """A session that keeps the anchor from one call to the next."""
        return AnchorSession(repr(self), pipe, self.steps, self.layers, self.device, FORMATS[self.dtype])
