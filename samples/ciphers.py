"""What the sample text model does: it writes a text in a cipher that the prompt names.

Every letter is moved by the same distance through the alphabet, as Caesar did; the prompt tells which letter stands for
the first one, and the answer is the text with its spaces, 48 characters::

    a=f
    attack at dawn by the old bridge before they see
    fyyfhp fy ifbs gd ymj tqi gwnilj gjktwj ymjd xjj
"""

import re
from dataclasses import dataclass
from typing import Self

import torch

LETTERS = "abcdefghijklmnopqrstuvwxyz"
KEYS = "dflnrv"
LENGTH = 48  # characters of a text, single spaces between words included
SHORTEST, LONGEST = 2, 9  # letters of a word

_FORM = re.compile(r"a=([a-z])\s*[;\n]\s*([a-z]+(?: [a-z]+)*)")


@dataclass(frozen=True)
class Cipher:
    """A text, and the letter that stands for the first one of the alphabet.

    Attributes:
        key: the letter, one of six.
        text: words of small letters, 48 characters in all.

    Raises:
        ValueError: another key, or a text of another length.
    """

    key: str
    text: str

    def __post_init__(self) -> None:
        if len(self.key) != 1 or self.key not in KEYS:
            raise ValueError(f"got the key {self.key!r}; allowed: one of {', '.join(KEYS)}")
        if len(self.text) != LENGTH:
            raise ValueError(f"got a text of {len(self.text)} characters; allowed: {LENGTH}, spaces included")

    @classmethod
    def parse(cls, prompt: str) -> Self:
        """Reads a prompt back.

        Args:
            prompt: a line for the key and one for the text; a semicolon does as well.

        Raises:
            ValueError: not of that form.
        """
        found = _FORM.fullmatch(prompt.strip().lower())
        if found is None:
            raise ValueError(f"got the prompt {prompt!r}; the form is 'a=f; attack at dawn', 48 letters and spaces")
        return cls(found[1], found[2])

    @property
    def prompt(self) -> str:
        """The key and the text."""
        return f"a={self.key}\n{self.text}"

    @property
    def answer(self) -> str:
        """The text in the cipher."""
        distance = LETTERS.index(self.key)
        return self.text.translate(str.maketrans(LETTERS, LETTERS[distance:] + LETTERS[:distance]))


def held_out(cipher: Cipher) -> bool:
    """True for the one cipher in sixteen that training never sees."""
    return sum(k * ord(character) for k, character in enumerate(cipher.answer, 1)) % 16 == 0


def draw_ciphers(count: int, generator: torch.Generator, held: bool = False) -> list[Cipher]:
    """Random ciphers, either all held out of training or none.

    Args:
        count: how many.
        generator: of the keys and the letters.
        held: which of the two sets they are from.
    """
    ciphers: list[Cipher] = []
    while len(ciphers) < count:
        key = KEYS[int(torch.randint(0, len(KEYS), (), generator=generator))]
        letters = [LETTERS[k] for k in torch.randint(0, len(LETTERS), (LENGTH,), generator=generator).tolist()]
        at = int(torch.randint(SHORTEST, LONGEST + 1, (), generator=generator))
        while at < LENGTH - SHORTEST:
            letters[at] = " "
            at += 1 + int(torch.randint(SHORTEST, LONGEST + 1, (), generator=generator))
        cipher = Cipher(key, "".join(letters))
        if held_out(cipher) == held:
            ciphers.append(cipher)
    return ciphers


def exact(answer: str, cipher: Cipher) -> bool:
    """True if every letter and every space of an answer is right."""
    return answer.strip() == cipher.answer
