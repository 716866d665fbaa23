"""All tiny pipelines by name: ``run(PIPELINES["flux"]())`` returns latents.

Text enters as embeddings, so there are no tokenizers and no text encoders.
"""

from __future__ import annotations

from collections.abc import Callable

from .built import Built, run
from .image_pipelines import IMAGE_PIPELINES
from .video_pipelines import VIDEO_PIPELINES

__all__ = ["PIPELINES", "Built", "run"]

PIPELINES: dict[str, Callable[[], Built]] = {build.__name__: build for build in [*IMAGE_PIPELINES, *VIDEO_PIPELINES]}
