"""Images that take their background from one of them, the anchor, whose keys and values are kept."""

from __future__ import annotations

from typing import Any

import torch

from cachedit.conditions.bank import KVBank
from cachedit.conditions.passes import Pass
from cachedit.conditions.picture import foreground
from cachedit.conditions.processors import count_layers
from cachedit.conditions.session import ConditionSession, Passed, Stock


class AnchorSession(ConditionSession):
    """Records the first call, and lets the background of the calls that follow attend to it (PoseGen, 2508.05091).

    What is kept of the anchor outlives its run: it goes when there is another anchor, or with the session.

    Args:
        described: the strategy.
        pipe: the pipeline.
        shared: leading steps at which the anchor is recorded and attended to.
        layers: last layers that take part.
        device, dtype: of what is kept (``KVBank``).
    """

    def __init__(
        self, described: str, pipe: Any, shared: int, layers: int, device: str | None, dtype: torch.dtype | None
    ) -> None:
        super().__init__(described, pipe)
        count = count_layers(pipe.transformer)
        self.shared, self.layers = shared, range(max(0, count - layers), count)
        self.device, self.dtype = device, dtype
        self._anchor: dict[Any, KVBank] = {}  # by step and branch
        self._mask: Any = None  # of the subject of this call
        self._subject = self._anchor_subject = torch.zeros(0, dtype=torch.long)  # tokens that the masks cover
        self._records = False

    def call(self, pipe: Any, stock: Stock, *arguments: Any, **named: Any) -> Any:
        """The pipeline's own call with two more arguments.

        Args:
            pipe: the pipeline.
            stock: its call.
            *arguments: those of the pipeline.
            **named: those of the pipeline, and

                * ``anchor``: True makes this image the anchor; otherwise that is the first one;
                * ``subject_mask``: white where the subject is (``foreground``), which stays the image's own. Without
                  one everything is background.

        Raises:
            ValueError: an image that does not fit to the anchor.
        """
        self._mask = named.pop("subject_mask", None)
        self._records = named.pop("anchor", False) or not self._anchor
        if self._records:
            self._anchor = {}
        try:
            return super().call(pipe, stock, *arguments, **named)
        except BaseException:
            if self._records:
                self._anchor = {}
            raise

    def end(self) -> None:
        """A run is over, however it ended."""
        if self._records:
            self._anchor = self.banks
        super().end()
        self._mask = None

    def predict(self, passed: Passed, inputs: dict[str, Any]) -> torch.Tensor:
        """A pass that writes the anchor or attends to it at the leading steps; the model's own at the others."""
        tokens, at = inputs["hidden_states"].shape[1], (self.step, self.branch)
        if self.step >= self.shared:
            self.note(tokens, 0)
            return passed(Pass(), inputs)
        if at == (0, 0):
            self._subject = self._covered(inputs)
        label = tokens, float(inputs["timestep"].reshape(-1)[0])
        if self._records:
            self._anchor_subject = self._subject
            self.banks[at] = bank = KVBank(label, self.device, self.dtype)
            found = passed(Pass(into=bank, layers=self.layers), inputs)
            self.note(tokens, 0)
            return found
        bank = self._bank(at)
        bank.check(label)
        background = torch.ones(tokens, dtype=torch.bool)
        background[self._subject] = background[self._anchor_subject] = False
        rows = background.nonzero().flatten()
        found = passed(Pass(anchor=bank, anchored=rows) if len(rows) else Pass(), inputs)
        self.banks[at] = bank
        self.note(tokens, tokens if len(rows) else 0)
        return found

    def _covered(self, inputs: dict[str, Any]) -> torch.Tensor:
        if self._mask is None:
            return torch.zeros(0, dtype=torch.long)
        return foreground(self._mask, self.layout.grid(inputs))

    def _bank(self, at: tuple[int, int]) -> KVBank:
        if at not in self._anchor:
            raise ValueError(
                f"got an anchor that was recorded in {len(self._anchor)} calls of the model, none of them call "
                f"{at[1]} of step {at[0]}; allowed: guidance and steps as the anchor had them. Make another with "
                "anchor=True."
            )
        return self._anchor[at]
