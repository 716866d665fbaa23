"""What the sample text model writes: ledgers, a column of sums whose working is written out.

A prompt gives a number and some changes; the answer writes every change as a sum, each of which begins with the result
of the one before::

    42          a 42 + 7 = 49
    a + 7       b 49 - 5 = 44
    b - 5       c 44 + 8 = 52
    c + 8
"""

import re
from dataclasses import dataclass
from typing import Self

import torch

FEWEST, MOST = 3, 10  # changes of a ledger
LOWEST, HIGHEST = 10, 99  # results: always two digits
LABELS = "abcdefghij"

_FORM = re.compile(r"\d\d(;[a-j][+-][1-9])+;?")


@dataclass(frozen=True)
class Ledger:
    """A number and the changes made to it, one after the other.

    Attributes:
        start: the number, 10 to 99.
        changes: -9 to 9 and not 0; 3 to 10 of them, and every result is again 10 to 99.

    Raises:
        ValueError: another number of changes, or a result out of range.
    """

    start: int
    changes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not FEWEST <= len(self.changes) <= MOST:
            raise ValueError(f"got {len(self.changes)} changes; allowed: {FEWEST} to {MOST}. Add or leave out some.")
        outside = [total for total in (self.start, *self.results) if not LOWEST <= total <= HIGHEST]
        if outside:
            raise ValueError(
                f"the ledger comes to {outside[0]}; allowed: {LOWEST} to {HIGHEST} all along. Change the numbers."
            )

    @classmethod
    def parse(cls, prompt: str) -> Self:
        """Reads a prompt back.

        Args:
            prompt: one line for the number and one for each change; semicolons do as well.

        Raises:
            ValueError: not of that form.
        """
        text = "".join(prompt.strip().replace("\n", ";").split())
        number, *parts = text.strip(";").split(";")
        labels = LABELS[: len(parts)]
        if not _FORM.fullmatch(text) or "".join(part[0] for part in parts) != labels:
            raise ValueError(f"got the prompt {prompt!r}; the form is '42; a + 7; b - 5; c + 8', with labels in order.")
        return cls(int(number), tuple(int(part[1:]) for part in parts))

    @property
    def results(self) -> list[int]:
        """The result of every line."""
        totals = [self.start]
        for change in self.changes:
            totals.append(totals[-1] + change)
        return totals[1:]

    @property
    def prompt(self) -> str:
        """The number, and a line for each change."""
        lines = (f"{label} {_signed(change)}" for label, change in zip(LABELS, self.changes, strict=False))
        return "\n".join([str(self.start), *lines])

    @property
    def answer(self) -> str:
        """A line for each change, with its sum."""
        before = [self.start, *self.results]
        lines = zip(LABELS, before, self.changes, self.results, strict=False)
        return "\n".join(f"{label} {old} {_signed(change)} = {new}" for label, old, change, new in lines)


def held_out(ledger: Ledger) -> bool:
    """True for the one ledger in sixteen that training never sees."""
    return (ledger.start + sum(k * change for k, change in enumerate(ledger.changes, 1))) % 16 == 0


def draw_ledgers(
    count: int, generator: torch.Generator, changes: int | None = None, held: bool = False
) -> list[Ledger]:
    """Random ledgers, either all held out of training or none.

    Args:
        count: how many.
        generator: of the numbers.
        changes: lines of each; None: any allowed number.
        held: which of the two sets they are from.
    """
    ledgers: list[Ledger] = []
    while len(ledgers) < count:
        length = changes or int(torch.randint(FEWEST, MOST + 1, (), generator=generator))
        start = int(torch.randint(LOWEST, HIGHEST + 1, (), generator=generator))
        total, drawn = start, []
        sizes = torch.randint(1, 10, (length,), generator=generator).tolist()
        signs = torch.randint(0, 2, (length,), generator=generator).tolist()
        for size, positive in zip(sizes, signs, strict=True):
            change = size if positive else -size
            if not LOWEST <= total + change <= HIGHEST:
                change = -change
            total += change
            drawn.append(change)
        ledger = Ledger(start, tuple(drawn))
        if held_out(ledger) == held:
            ledgers.append(ledger)
    return ledgers


def exact(answer: str, ledger: Ledger) -> bool:
    """True if every line of an answer is right; white space does not count."""
    return "".join(answer.replace("\n", ";").split()) == "".join(ledger.answer.replace("\n", ";").split())


def _signed(change: int) -> str:
    return f"{'+' if change > 0 else '-'} {abs(change)}"
