"""Commit rules: which of the tokens that the model proposes are decided at a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch

from cachedit.text.state import DecodeState


class CommitRule(Protocol):
    """Picks tokens; at least one in every row that has an open one, and only open ones."""

    needs_entropy: ClassVar[bool]

    def begin(self, state: DecodeState, generators: list[torch.Generator | None]) -> None:
        """Look at a decoding before its first step."""

    def foresee(self, state: DecodeState) -> torch.Tensor | None:
        """What ``select`` will pick, before anything is computed [B, S]; None if that depends on the model."""

    def select(self, state: DecodeState) -> torch.Tensor:
        """The picked tokens [B, S], by the confidence and entropy of the open ones."""


def leading(score: torch.Tensor, allowed: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """The ``count`` [B] allowed tokens of each row with the highest score; the earlier of two equal ones."""
    ranked = score.masked_fill(~allowed, -torch.inf).argsort(dim=1, descending=True, stable=True)
    order = torch.arange(score.shape[1], device=score.device).expand_as(score)
    return torch.zeros_like(allowed).scatter_(1, ranked, order < count[:, None]) & allowed


@dataclass
class Quota:
    """As many tokens per step as the number of steps asks for: the base sampler of LLaDA.

    The steps are shared out evenly among the blocks and the masks of a block among its steps; what is left over goes to
    the first ones. Where a strategy lets tokens of several blocks be decided, all masks are shared out among all steps.

    Attributes:
        steps: number of steps in all; None for one per token.
        order: "confidence", or "random" for an order that is drawn before the first step.
    """

    steps: int | None = None
    order: Literal["confidence", "random"] = "confidence"
    needs_entropy: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range.
        """
        if self.steps is not None and (type(self.steps) is not int or self.steps < 1):
            raise ValueError(f"steps={self.steps!r}; allowed: an integer, 1 or more, None for one step per token")
        if self.order not in ("confidence", "random"):
            raise ValueError(f"order={self.order!r}; allowed: 'confidence', 'random'")

    def begin(self, state: DecodeState, generators: list[torch.Generator | None]) -> None:
        """Count the blocks and draw the order.

        Raises:
            ValueError: there are fewer steps than blocks.
        """
        last = torch.where(state.masked, state.block_of, -1).amax(1)
        self._blocks = (last - state.first_block + 1).clamp_min(1)
        if self.steps is not None and self.steps < int(self._blocks.max()):
            raise ValueError(
                f"steps={self.steps} for {int(self._blocks.max())} blocks; allowed: one step per block or more. Raise "
                "steps or block_length."
            )
        self._sliding = torch.zeros_like(state.done)
        self._priority = None
        if self.order == "random":
            self._priority = torch.zeros(state.ids.shape, device=state.ids.device)
            for row, (masked, generator) in enumerate(zip(state.masked, generators, strict=True)):
                device = state.ids.device if generator is None else generator.device
                drawn = torch.rand(int(masked.sum()), generator=generator, device=device)
                self._priority[row, masked] = drawn.to(state.ids.device)

    def count(self, state: DecodeState) -> torch.Tensor:
        """Tokens of this step [B]."""
        if self.steps is None:
            return torch.ones_like(state.block)
        block = state.block - state.first_block
        steps = self.steps // self._blocks + (block < self.steps % self._blocks)
        share = (state.block_masks // steps + (state.block_step < state.block_masks % steps)).clamp_min(1)
        self._sliding |= (state.open & ~state.in_block).any(1)
        left = (self.steps - state.step).clamp_min(1)
        return torch.where(self._sliding, (state.masked.sum(1) + left - 1) // left, share)

    def foresee(self, state: DecodeState) -> torch.Tensor | None:
        """The next tokens of the drawn order."""
        return None if self._priority is None else leading(self._priority, state.open, self.count(state))

    def select(self, state: DecodeState) -> torch.Tensor:
        """The most confident tokens, or the next of the drawn order."""
        score = state.confidence if self._priority is None else self._priority
        return leading(score, state.open, self.count(state))


@dataclass
class _Parallel:
    """As many tokens as a bound on their confidence allows, the best one always."""

    bound: float
    needs_entropy: ClassVar[bool] = False

    def begin(self, state: DecodeState, generators: list[torch.Generator | None]) -> None:
        """Nothing to prepare."""

    def foresee(self, state: DecodeState) -> torch.Tensor | None:
        """The model decides."""
        return None

    def select(self, state: DecodeState) -> torch.Tensor:
        """The longest leading part of the ranked tokens that the bound allows."""
        score, allowed = self._score(state), state.open
        ranked = score.masked_fill(~allowed, -torch.inf).sort(dim=1, descending=True, stable=True).values
        fits = self._fits(ranked) & (ranked > -torch.inf)
        count = fits.cumprod(1).sum(1).clamp_min(1)
        return leading(score, allowed, count)

    def _score(self, state: DecodeState) -> torch.Tensor:
        return state.confidence

    def _fits(self, ranked: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


@dataclass
class Threshold(_Parallel):
    """Every token that the model is at least so sure of (Fast-dLLM, arXiv 2505.22618); above 1, one per step."""

    def _fits(self, ranked: torch.Tensor) -> torch.Tensor:
        return ranked >= self.bound


@dataclass
class Factor(_Parallel):
    """The most tokens n with (n + 1) (1 - confidence of the n-th) below the factor (arXiv 2505.22618, theorem 1)."""

    def _fits(self, ranked: torch.Tensor) -> torch.Tensor:
        count = torch.arange(1, ranked.shape[1] + 1, device=ranked.device, dtype=ranked.dtype)
        return (count + 1) * (1 - ranked) < self.bound


@dataclass
class EntropyBound(_Parallel):
    """The most tokens whose entropies without the largest one sum to at most the bound, in nats (arXiv 2505.24857)."""

    needs_entropy: ClassVar[bool] = True

    def _score(self, state: DecodeState) -> torch.Tensor:
        return -state.entropy

    def _fits(self, ranked: torch.Tensor) -> torch.Tensor:
        entropy = (-ranked).masked_fill(ranked == -torch.inf, 0)
        return entropy.cumsum(1) - entropy <= self.bound


def commit_rule(
    steps: int | None, order: str, threshold: float | None, factor: float | None, entropy_bound: float | None
) -> CommitRule:
    """The rule that these arguments of ``generate`` ask for.

    Raises:
        ValueError: more than one is asked for, or a value is out of range.
    """
    rules = {
        "threshold": (threshold, Threshold),
        "factor": (factor, Factor),
        "entropy_bound": (entropy_bound, EntropyBound),
    }
    given = [name for name, (bound, _) in rules.items() if bound is not None]
    if len(given) + (steps is not None) > 1 or (given and order != "confidence"):
        said = [
            *(["steps"] if steps is not None else []),
            *given,
            *([f"order={order!r}"] if order != "confidence" else []),
        ]
        raise ValueError(f"got {', '.join(said)}; allowed: one of steps (with order), threshold, factor, entropy_bound")
    for name in given:
        bound, rule = rules[name]
        if isinstance(bound, bool) or not isinstance(bound, (int, float)) or not bound >= 0:
            raise ValueError(f"{name}={bound!r}; allowed: a number, 0 or more, None")
        made: CommitRule = rule(float(bound))
        return made
    return Quota(steps, order)  # type: ignore[arg-type]
