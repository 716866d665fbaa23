"""No cache: everything is computed at every step, as the models' own loops do. What the others are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from cachedit.text.strategy import TextStrategy


@dataclass(frozen=True)
class NoCache(TextStrategy):
    """Compute every token at every step; nothing is kept."""

    caches: ClassVar[bool] = False

    @classmethod
    def trials(cls) -> Sequence[TextStrategy]:
        """What every model bears."""
        return (cls(),)
