"""What a strategy for autoregressive video is asked."""

from __future__ import annotations

from typing import ClassVar

from cachedit.registry import Strategy
from cachedit.video.presets import Preset


class VideoStrategy(Strategy, abstract=True):
    """Base of the strategies that decide what the chunks of a video attend to. Subclasses are frozen dataclasses."""

    engine: ClassVar[str] = "cachedit.video.attachment"

    def __post_init__(self) -> None:
        """Refuse impossible values, as ``plan`` does.

        Raises:
            ValueError: with what was given and what is allowed.
        """
        self.plan()

    def plan(self) -> Preset:
        """How the model is rolled out.

        Raises:
            ValueError: the options do not fit together.
        """
        raise NotImplementedError
