"""What a strategy for condition and edit caches is asked."""

from __future__ import annotations

from typing import Any, ClassVar

from cachedit.conditions.session import ConditionSession
from cachedit.registry import Strategy


class ConditionStrategy(Strategy, abstract=True):
    """Base of the strategies that keep tokens of a condition out of the sequence. Subclasses are frozen dataclasses."""

    engine: ClassVar[str] = "cachedit.conditions.attachment"

    def session(self, pipe: Any) -> ConditionSession:
        """A session for a pipeline, which it does not touch.

        Raises:
            UnsupportedModelError: the pipeline has nothing for it to keep.
        """
        raise NotImplementedError
