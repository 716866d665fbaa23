"""Another prompt in the middle of a video."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cachedit.video.rollout import Rollout

WAYS = ("keep", "recache", "flush", "interpolate")


@dataclass
class PromptChange:
    """A change that is under way.

    embeds: the new text [B, tokens, channels].
    how:    "keep" changes the text alone; "recache" also writes the frames of the window anew under the new text
            (LongLive, arXiv 2509.22622); "flush" keeps only the sink and the last frame of them (2511.20649);
            "interpolate" goes over to the new text in equal steps (Krea).
    chunks: how many chunks "interpolate" takes.
    prompt: its words; "" if only embeddings were given.
    old:    the text before, from the first step on.
    step:   steps of "interpolate" that have been taken.
    """

    embeds: torch.Tensor
    how: str = "keep"
    chunks: int = 3
    prompt: str = ""
    old: torch.Tensor | None = None
    step: int = 0

    def __post_init__(self) -> None:
        """Refuse what is not known.

        Raises:
            ValueError: with what is allowed.
        """
        if self.how not in WAYS or type(self.chunks) is not int or self.chunks < 1:
            raise ValueError(
                f"got how={self.how!r}, chunks={self.chunks!r}; allowed: {', '.join(WAYS)}, over 1 chunk or more"
            )

    @property
    def over(self) -> bool:
        """True once nothing is left of it."""
        return self.step >= (self.chunks if self.how == "interpolate" else 1)

    def apply(self, rollout: Rollout) -> None:
        """Take a step of it, before a chunk is made; negative prompts stay.

        Raises:
            ValueError: the new text has another shape than the old one.
        """
        branch = rollout.branches[0]
        self.check(branch.embeds)
        if self.old is None:
            self.old = branch.embeds
        share = (self.step + 1) / self.chunks if self.how == "interpolate" else 1.0
        branch.prompt(self.embeds if share == 1.0 else torch.lerp(self.old, self.embeds, share))
        if self.how == "recache":
            rollout.recommit()
        elif self.how == "flush":
            for one in rollout.branches:
                one.cache.forget(one.cache.done - 1)
        self.step += 1

    def check(self, embeds: torch.Tensor) -> None:
        """Refuse text that does not fit to the text before."""
        if self.embeds.shape != embeds.shape:
            raise ValueError(
                f"got a prompt of {list(self.embeds.shape)} (samples, tokens, channels) after one of "
                f"{list(embeds.shape)}; allowed: as many samples, and the same max_sequence_length."
            )

    def state_dict(self) -> dict[str, Any]:
        """The arguments that make it again."""
        return dict(vars(self))
