"""Reference images whose tokens are in the sequence at some steps, and in a bank at the others."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from cachedit.conditions.bank import KVBank
from cachedit.conditions.passes import Pass
from cachedit.conditions.session import ConditionSession, Passed


class Refresh(Protocol):
    """When reference tokens are computed."""

    def is_fresh(self, step: int, steps: int, drift: float | None) -> bool:
        """True if they are computed at that step; ``drift`` is what the last two computations differed by."""


class ReferenceSession(ConditionSession):
    """Leaves the reference tokens out of the sequence where their keys and values may be a few steps old.

    The branches of a step are computed or reused together. What the model predicts for reference tokens is zero where
    they are left out; pipelines cut it off.
    """

    _image: int | None  # tokens of the image itself
    _drift: float | None
    _decided: bool

    def __init__(self, described: str, pipe: Any, refresh: Refresh, dtype: torch.dtype | None = None) -> None:
        super().__init__(described, pipe)
        self.refresh, self.dtype = refresh, dtype
        self._text: dict[int, torch.Tensor | None] = {}  # rotations of the text by branch
        self._begin()

    def end(self) -> None:
        """A run is over, however it ended."""
        super().end()
        self._begin()

    def predict(self, passed: Passed, inputs: dict[str, Any]) -> torch.Tensor:
        """A pass over everything that keeps the reference tokens, or one without them."""
        tokens = inputs["hidden_states"]
        if self.branch == 0:
            self._decided = self.refresh.is_fresh(self.step, self.steps, self._drift)
        if self._image is None:
            self._image = self.layout.image_tokens(inputs)
        image, total, bank = self._image, tokens.shape[1], self.banks.get(self.branch)
        if image == total:  # no references
            self.note(total, 0)
            return passed(Pass(), inputs)
        controlled = any("controlnet" in name and value is not None for name, value in inputs.items())
        if self._decided or bank is None or controlled:
            return self._recorded(passed, inputs, image)
        now = Pass(banks=[bank], text_positions=self._text[self.branch])
        found = passed(now, self.layout.without_references(inputs, image))
        self.note(image, total - image)
        return torch.cat([found, found.new_zeros(found.shape[0], total - image, found.shape[2])], 1)

    def _recorded(self, passed: Passed, inputs: dict[str, Any], image: int) -> torch.Tensor:
        total, bank = inputs["hidden_states"].shape[1], self.banks.get(self.branch) or KVBank(dtype=self.dtype)
        rows = torch.arange(image, total, device=inputs["hidden_states"].device)
        now = Pass(into=bank, record=rows)
        found = passed(now, inputs)
        self.banks[self.branch], self._text[self.branch] = bank, now.text_positions
        drift = bank.drift if bank.changes else None
        if drift is not None:
            self._drift = drift if self.branch == 0 else max(drift, self._drift or 0.0)
        self.note(total, 0, drift)
        return found

    def _begin(self) -> None:
        self._image = None
        self._drift = None
        self._decided = True
        self._text.clear()
