"""Commit rules: which of the tokens that the model proposes are decided at a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch

from cachedit.text.state import DecodeState

SURE = 0.95  # confidence above which a refined block decides a token, if nothing else is said


class CommitRule(Protocol):
    """Picks tokens; at least one in every row that has an open one, and only open or editable ones."""

    needs_entropy: ClassVar[bool]

    def begin(self, state: DecodeState, generators: list[torch.Generator | None]) -> None:
        """Look at a decoding before its first step."""

    def foresee(self, state: DecodeState) -> torch.Tensor | None:
        """What ``select`` will pick, before anything is computed [B, S]; None if that depends on the model."""

    def editable(self, state: DecodeState) -> torch.Tensor | None:
        """Decided tokens that ``select`` may pick too, to change them [B, S]; None for none."""
        return None

    def select(self, state: DecodeState) -> torch.Tensor:
        """The picked tokens [B, S], by what the model proposed, its confidence and its entropy."""

    def after(self, state: DecodeState) -> None:
        """Look at a step that has been committed, before rows go on to other blocks; may hold them."""
        return


def leading(score: torch.Tensor, allowed: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """The ``count`` [B] allowed tokens of each row with the highest score; the earlier of two equal ones."""
    ranked = score.masked_fill(~allowed, -torch.inf).argsort(dim=1, descending=True, stable=True)
    order = torch.arange(score.shape[1], device=score.device).expand_as(score)
    return torch.zeros_like(allowed).scatter_(1, ranked, order < count[:, None]) & allowed


@dataclass
class Quota(CommitRule):
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
class _Parallel(CommitRule):
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


@dataclass
class BlockRefinement(CommitRule):
    """As many tokens per step as a block and its steps ask for, or all that the model is sure of; decided ones change.

    What diffusers' BlockRefinementScheduler and LLaDA2Pipeline do with the row of a batch alone. At every step a
    decided token of the block is replaced where the model is sure of another one. Once nothing is masked this goes on
    until nothing changes, unless the steps are used up.

    Attributes:
        block_length: tokens of a block.
        steps: of a block.
        threshold: tokens with more confidence are all decided, if those are more than the step's share; None for 0.95.
        editing_threshold: confidence above which a decided token is replaced; None, as 0, for never.
        max_post_steps: so many steps may change tokens after the last mask is gone and be followed by another.
    """

    block_length: int
    steps: int
    threshold: float | None = None
    editing_threshold: float | None = None
    max_post_steps: int = 16
    needs_entropy: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range.
        """
        for name, value, lowest in (("refinement_steps", self.steps, 1), ("max_post_steps", self.max_post_steps, 0)):
            if type(value) is not int or value < lowest:
                raise ValueError(f"{name}={value!r}; allowed: an integer, {lowest} or more")
        for name, bound in (("threshold", self.threshold), ("editing_threshold", self.editing_threshold)):
            if bound is not None:
                _check_bound(name, bound)

    def begin(self, state: DecodeState, generators: list[torch.Generator | None]) -> None:
        """The answer alone may change."""
        self._answer = state.masked
        self._unfilled = self._changed = torch.zeros_like(state.done)
        self._post_steps = torch.zeros_like(state.step)

    def foresee(self, state: DecodeState) -> torch.Tensor | None:
        """The model decides."""
        return None

    def editable(self, state: DecodeState) -> torch.Tensor | None:
        """The decided tokens of the block that are no prompt."""
        if not self.editing_threshold:
            return None
        return self._answer & state.in_block & ~state.masked & ~state.done[:, None]

    def select(self, state: DecodeState) -> torch.Tensor:
        """The open tokens of this step, and the decided ones that change."""
        share, left_over = divmod(self.block_length, self.steps)
        quota = (share + (state.block_step < left_over).long()).clamp_min(1)
        sure = state.open & (state.confidence > (SURE if self.threshold is None else self.threshold))
        picked = torch.where((sure.sum(1) < quota)[:, None], leading(state.confidence, state.open, quota), sure)
        self._unfilled = (state.masked & state.in_block).any(1)
        if state.editable is None or self.editing_threshold is None:
            return picked
        changed = state.editable & (state.proposed != state.ids) & (state.confidence > self.editing_threshold)
        self._changed = changed.any(1)
        return picked | changed

    def after(self, state: DecodeState) -> None:
        """A row stays while steps are left for its block, and then as long as its tokens change."""
        if not self.editing_threshold:
            return
        self._post_steps = torch.where(self._unfilled, 0, self._post_steps + 1)
        again = self._changed & (self._post_steps <= self.max_post_steps)
        state.held = torch.where(self._unfilled, state.block_step < self.steps, again) & ~state.done


def _check_bound(name: str, bound: object) -> None:
    if isinstance(bound, bool) or not isinstance(bound, (int, float)) or not bound >= 0:
        raise ValueError(f"{name}={bound!r}; allowed: a number, 0 or more, None")


def commit_rule(
    steps: int | None,
    order: str,
    threshold: float | None,
    factor: float | None,
    entropy_bound: float | None,
    refinement: BlockRefinement | None = None,
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
    asked = [*(["steps"] if steps is not None else []), *given, *(["refinement_steps"] if refinement else [])]
    if len(asked) > 1 or (asked not in ([], ["steps"]) and order != "confidence"):
        said = [*asked, *([f"order={order!r}"] if order != "confidence" else [])]
        raise ValueError(
            f"got {', '.join(said)}; allowed: one of steps (with order), threshold, factor, entropy_bound, "
            "refinement_steps (with threshold)"
        )
    if refinement is not None:
        return refinement
    for name in given:
        bound, rule = rules[name]
        _check_bound(name, bound)
        assert bound is not None
        made: CommitRule = rule(float(bound))
        return made
    return Quota(steps, order)  # type: ignore[arg-type]
