"""How the sample text model is asked, and how its answers are judged."""

from __future__ import annotations

from cachedit.samples.ledgers import Ledger, exact

OPTIONS = {"gen_length": 64, "block_length": 16}
"""Of ``cachedit.generate``: what the model was trained for."""


def score(prompt: str, answer: str) -> float:
    """1.0 if every line of an answer is right, else 0.0.

    Raises:
        ValueError: the prompt is no ledger.
    """
    return float(exact(answer, Ledger.parse(prompt)))
