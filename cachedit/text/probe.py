"""Whether a language model bears a cache: strategies tried out beside a decoding without one.

How much keys and values change from step to step does not tell; a trained model may live with a large change and fail
at a small one. So what is compared is what a step would decide from: the logits of the masked tokens.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from cachedit.profile import Profile
from cachedit.registry import Strategy
from cachedit.text.decode import Decoding, Request
from cachedit.text.fingerprint import fingerprint
from cachedit.text.masks import known_block_length
from cachedit.text.options import TextOptions
from cachedit.text.sampling import logits_for
from cachedit.text.session import Setting
from cachedit.text.strategy import TextStrategy

AGREEMENT = 0.99  # least share of equal tokens, and
DIVERGENCE = 0.02  # nats at most, of a strategy that is recommended
ARRAYS = ("agreement", "divergence", "token_ratio")  # of a profile that comes from a probe


@dataclass(frozen=True)
class Trial:
    """How a strategy did, at the steps that read something from the cache.

    Attributes:
        strategy: with its options.
        agreement: share of the masked tokens of the block whose likeliest token is that of a full pass.
        divergence: of their distributions (Kullback-Leibler, from the full pass to the cached one), mean, in nats.
        token_ratio: how many times fewer tokens were computed.
    """

    strategy: TextStrategy
    agreement: float
    divergence: float
    token_ratio: float

    @property
    def passes(self) -> bool:
        """Whether it gives what a full pass gives, nearly always."""
        return self.agreement >= AGREEMENT and self.divergence <= DIVERGENCE


@dataclass(frozen=True)
class Probe:
    """What was found out of a model.

    Attributes:
        model: its fingerprint.
        attention: "full", "prefix" if the prompt does not see the answer, or "block" if no token sees a later block.
        block_length: tokens of a block, of the model or as they were decoded.
        gen_length: tokens of an answer.
        prompts: number of prompts.
        trials: one for each setting that a strategy names.
    """

    model: dict[str, Any]
    attention: str
    block_length: int
    gen_length: int
    prompts: int
    trials: tuple[Trial, ...]

    @property
    def recommended(self) -> TextStrategy:
        """Of those that pass the one that computes fewest tokens."""
        return max((trial for trial in self.trials if trial.passes), key=lambda trial: trial.token_ratio).strategy

    def to_profile(self, name: str = "", command: str = "") -> Profile:
        """As a profile that "auto" finds again by the fingerprint of the model.

        Args:
            name: of the profile.
            command: that made it.
        """
        from cachedit import __version__

        best, model = self.recommended, dict(self.model)
        of_each = {str(trial.strategy): trial for trial in self.trials}
        return Profile(
            arrays={array: {label: [getattr(one, array)] for label, one in of_each.items()} for array in ARRAYS},
            axes={array: ["value"] for array in ARRAYS},
            name=name,
            strategy=best.name,
            model={"class": model.pop("class"), "fingerprint": model, "names": []},  # the weights say more than a name
            defaults=asdict(best),
            provenance={
                field: getattr(self, field) for field in ("attention", "block_length", "gen_length", "prompts")
            },
            versions={package: importlib.metadata.version(package) for package in ("torch", "transformers")}
            | {"cachedit": __version__},
            date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            command=command,
        )

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        trials = [
            {"strategy": trial.strategy.name, "options": asdict(trial.strategy), "passes": trial.passes}
            | {array: getattr(trial, array) for array in ARRAYS}
            for trial in self.trials
        ]
        best = {"strategy": self.recommended.name, "options": asdict(self.recommended)}
        return {**vars(self), "trials": trials, "recommended": best}

    def to_json(self) -> str:
        """The same as a JSON object."""
        return json.dumps(self.to_dict())

    def __str__(self) -> str:
        """A small table, the setting that computes fewest tokens first."""
        ranked = sorted(self.trials, key=lambda trial: -trial.token_ratio)
        width = max(len(str(trial.strategy)) for trial in ranked)
        kind = f"in blocks of {self.block_length} tokens" if self.attention == "block" else self.attention
        rows = [f"attention    {kind}", f"recommended  {self.recommended}", ""]
        rows.append(f"{'':{width}s}  same token  nats      fewer tokens")
        for trial in ranked:
            figures = f"{100 * trial.agreement:8.2f} %  {trial.divergence:<8.2g}  {trial.token_ratio:.1f}x"
            rows.append(f"{trial.strategy!s:{width}s}  {figures}{'' if trial.passes else '  differs too much'}")
        return "\n".join(rows)


def attended(model: Any, options: TextOptions) -> TextOptions:
    """The options with what the model itself tells of its attention, where it was not said.

    Raises:
        UnsupportedModelError: no text cache knows the model, or its attention.
        ValueError: the model has blocks of another length.
    """
    setting = Setting.of(model, TextStrategy(), options)
    if options.attention is not None or setting.layout.attention is not None:
        return replace(options, attention=setting.attention())
    found = known_block_length(model)
    if found is None:
        return replace(options, attention="full")
    if options.block_length not in (None, found):
        raise ValueError(
            f"block_length={options.block_length}; allowed: {found}, as {type(model).__name__} lets no token see a "
            f"later block of {found} tokens. Leave it out, or say attention= too if you know better."
        )
    return replace(options, attention="block", block_length=found)


@torch.no_grad()
def probe(
    model: Any,
    sample_ids: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None = None,
    gen_length: int = 64,
    steps: int | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    **options: Any,
) -> Probe:
    """Find out how a language model attends, and which strategies it bears.

    The prompts are answered without a cache, and every setting that a strategy names (``TextStrategy.trials``) computes
    the same steps with one. That takes as long as some ten answers.

    Args:
        model: a language model, wrapped or not.
        sample_ids: prompts like those that it will get, integers [P] or [B, P].
        attention_mask: 0 for padding, [B, P].
        gen_length: tokens of the answers.
        steps: of a decoding; None for one per token.
        progress: called after each step with the tokens decided, their number, and what runs now.
        **options: those of every text strategy: ``attention``, ``block_length``, ``mask_token_id``, ``shift``.

    Raises:
        UnsupportedModelError: no text cache knows the model, or its attention.
        TypeError, ValueError: an impossible option.
    """
    from cachedit import strategies  # noqa: F401  (fills the registry)

    common = attended(model, TextOptions(**options))
    length = common.block_length or Request.block_length
    request = Request(attention_mask, gen_length, length, steps)

    def decoding(strategy: TextStrategy) -> Decoding:
        return Decoding(Setting.of(model, strategy, common), sample_ids, request)

    plain, block = decoding(TextStrategy()), common.attention == "block"
    every = [cls for cls in Strategy.registry.values() if issubclass(cls, TextStrategy)]
    fitting = [cls for cls in every if cls.block_causal == block or not cls.caches]
    watched = [_Watched(decoding(strategy)) for cls in fitting for strategy in cls.trials()]
    count = int(plain.state.masked.sum())
    while not bool(plain.state.done.all()):
        found, tokens = plain.look()
        picked = plain.rule.select(plain.state)
        fresh = logits_for(plain.state, found, plain.state.open, plain.mask_token_id)
        for trial in watched:
            trial.step(fresh, plain.state.open, picked, tokens)
        plain.decide(picked, tokens)
        if progress is not None:
            progress(count - int(plain.state.masked.sum()), count, "tokens decided with and without caches")
    rows = len(plain.state.ids)
    trials = tuple(trial.result() for trial in watched)
    return Probe(fingerprint(model), common.attention or "full", length, gen_length, rows, trials)


class _Watched:
    """A decoding with a cache that decides what another one decides."""

    def __init__(self, decoding: Decoding) -> None:
        self.decoding = decoding
        self.same, self.nats, self.compared, self.computed, self.total = 0, 0.0, 0, 0, 0

    def step(self, fresh: torch.Tensor, asked: torch.Tensor, picked: torch.Tensor, tokens: torch.Tensor) -> None:
        """One step.

        Args:
            fresh: logits without a cache [M, V].
            asked: the tokens that they are for [B, S].
            picked: those that are decided [B, S].
            tokens: as which [B, S].
        """
        state = self.decoding.state
        self.total += self.decoding.total
        found, _ = self.decoding.look()
        self.computed += found.tokens
        stale = asked & ~found.refreshed[:, None]
        if bool(stale.any()):
            plain = fresh[stale[asked]].log_softmax(-1)
            cached = logits_for(state, found, stale, self.decoding.mask_token_id).log_softmax(-1)
            self.compared += len(plain)
            self.same += int((plain.argmax(-1) == cached.argmax(-1)).sum())
            chance = plain.exp()
            self.nats += float((chance * (plain - cached)).masked_fill(chance == 0, 0).sum())
        self.decoding.decide(picked, tokens)

    def result(self) -> Trial:
        """What came out; where everything was computed at every step, there was nothing to compare."""
        return Trial(
            self.decoding.setting.strategy,
            self.same / self.compared if self.compared else 1.0,
            max(self.nats, 0.0) / self.compared if self.compared else 0.0,
            self.total / self.computed,
        )
