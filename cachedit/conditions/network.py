"""Passes of a stock Flux or QwenImage transformer that record condition tokens and attend to recorded ones."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from cachedit.conditions.bank import KVBank
from cachedit.conditions.passes import Current, Pass
from cachedit.conditions.processors import attach, check_model, detach


class ConditionedNetwork:
    """A transformer whose condition tokens can stay out of its sequence.

    Every operation of such a model but attention looks at one token alone. So a pass over some of the tokens, whose
    attention is given the keys and values of the others, computes what a pass over all would have.

    Args:
        model: a ``FluxTransformer2DModel`` or ``QwenImageTransformer2DModel``; nothing but its processors is changed.
        current: what the processors look at; a new one by default.

    Raises:
        UnsupportedModelError: another model, or one with other processors.
    """

    def __init__(self, model: nn.Module, current: Current | None = None) -> None:
        check_model(model)
        self.model: Any = model
        self.current = current or Current()

    @contextmanager
    def attached(self) -> Iterator[ConditionedNetwork]:
        """The processors are on the model inside."""
        attach(self.model, self.current)
        try:
            yield self
        finally:
            detach(self.model)

    def prefill(
        self, *, into: KVBank | None = None, label: Hashable = None, rows: torch.Tensor | None = None, **inputs: Any
    ) -> KVBank:
        """Condition tokens in a pass of their own, in which they attend only to themselves (EasyControl, 2503.07027).

        What is recorded depends on neither text nor latents nor the step, so one pass serves a whole run. Load or
        enable the condition's adapter for this pass alone.

        Args:
            into: bank to record into; a new one by default.
            label: what the bank depends on (``KVBank``).
            rows: positions of the tokens where those of ``inputs`` are a whole grid's (QwenImage).
            **inputs: of the model's forward: ``hidden_states`` [B, N, C] are the condition tokens, at the timestep
                that the adapter was trained for, which is 0 for EasyControl. The text only has to have the right shape.

        Returns:
            The bank.
        """
        bank = KVBank(label) if into is None else into
        bank.label = label
        self(Pass(into=bank, isolated=True, rows=rows), **inputs)
        return bank

    def record(
        self, record: torch.Tensor, *, into: KVBank | None = None, rows: torch.Tensor | None = None, **inputs: Any
    ) -> tuple[torch.Tensor, KVBank]:
        """A pass over all tokens that keeps those of the image rows ``record``.

        Returns:
            What the model predicts, and the bank.
        """
        bank = KVBank() if into is None else into
        return self(Pass(into=bank, record=record, rows=rows), **inputs), bank

    def attend(
        self,
        banks: KVBank | Sequence[KVBank],
        *,
        labels: Sequence[Hashable] | None = None,
        bias: float = 0.0,
        rows: torch.Tensor | None = None,
        **inputs: Any,
    ) -> torch.Tensor:
        """A pass over the tokens of ``inputs``, which attend to those of the banks too.

        Args:
            banks: one or several; what is in one bank never saw what is in another.
            labels: what each bank must have been recorded for; None does not ask.
            bias: added to the attention scores of recorded tokens.
            rows: positions of the tokens where those of ``inputs`` are a whole grid's (QwenImage).
            **inputs: of the model's forward.

        Returns:
            What the model predicts for these tokens.

        Raises:
            ValueError: a bank was recorded for another label or batch, or lacks a layer.
        """
        several = [banks] if isinstance(banks, KVBank) else list(banks)
        for bank, label in zip(several, labels or [bank.label for bank in several], strict=True):
            bank.check(label)
        return self(Pass(banks=several, bias=bias, rows=rows), **inputs)

    @torch.no_grad()
    def __call__(self, now: Pass, **inputs: Any) -> torch.Tensor:
        """What the model predicts in a pass."""
        with self.current.during(now):
            return self.model(**{**inputs, "return_dict": False})[0]
