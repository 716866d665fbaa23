"""How the answers of the sample text model are judged."""

from __future__ import annotations

from cachedit.samples.ciphers import Cipher, exact


def score(prompt: str, answer: str) -> float:
    """1.0 if every character of an answer is right, else 0.0.

    Raises:
        ValueError: the prompt is no cipher.
    """
    return float(exact(answer, Cipher.parse(prompt)))
