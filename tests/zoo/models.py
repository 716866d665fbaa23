"""All tiny denoisers by name: ``from zoo.models import CASES, Case, count_blocks``."""

from __future__ import annotations

from .case import BlockCount, Case, count_blocks
from .image_models import IMAGE_CASES
from .packed_models import PACKED_CASES
from .plain import PLAIN
from .video_models import VIDEO_CASES

__all__ = ["CASES", "BlockCount", "Case", "count_blocks"]

CASES: dict[str, Case] = {case.name: case for case in [*IMAGE_CASES, *PACKED_CASES, *VIDEO_CASES, PLAIN]}
