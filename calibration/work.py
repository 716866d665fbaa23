"""The units that a calibration is made of: each is done once, by one of the processes, and known to all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from cachedit.calibration.checkpoint import Checkpoint
from cachedit.calibration.ranks import Ranks
from cachedit.calibration.tally import Tally

K = TypeVar("K")
T = TypeVar("T")
Unit = dict[str, Any]
"""The key of a unit, its result, and how many steps of the sampler it took."""


class Work:
    """Deals units of work to the processes, keeps their results, and skips what is there already.

    Args:
        ranks: the processes; units are dealt to them in turns.
        checkpoint: where results are kept, opened; the main process alone has one. None for nowhere.
        tally: counts steps, those of the other processes when their turn is over.
    """

    def __init__(
        self, ranks: Ranks | None = None, checkpoint: Checkpoint | None = None, tally: Tally | None = None
    ) -> None:
        self.ranks, self.checkpoint, self.tally = ranks or Ranks(), checkpoint, tally or Tally()

    def map(self, name: str, keys: Sequence[K], work: Callable[[K], T]) -> list[T]:
        """Results of ``work`` for all keys, in their order; every process gets all of them.

        All processes must ask for the same, and ``work`` must give the same wherever it is done.

        Args:
            name: of these units, told from all others of the calibration; letters, digits and hyphens.
            keys: what each unit is about; numbers, strings or tuples of them.
            work: does one unit and returns numbers, strings, None, lists, tuples, dicts, and tensors on the CPU.
        """
        units: dict[int, Unit] = self.ranks.exchange(lambda: self._kept(name, keys))[0]
        self.tally.add(sum(unit["steps"] for unit in units.values()))
        missing = [place for place in range(len(keys)) if place not in units]
        fresh: dict[int, Unit] = {}
        for first in range(0, len(missing), self.ranks.count):
            mine = missing[first : first + self.ranks.count][self.ranks.index :][:1]

            def turn(mine: Sequence[int] = mine, before: Mapping[int, Unit] = fresh) -> dict[int, Unit]:
                self._keep(name, before)
                return {place: self._do(keys[place], work) for place in mine}

            shares = self.ranks.exchange(turn)
            fresh = {place: unit for share in shares for place, unit in share.items()}
            self.tally.add(sum(unit["steps"] for place, unit in fresh.items() if place not in mine))
            units |= fresh
        self.ranks.exchange(lambda: self._keep(name, fresh))
        return [units[place]["result"] for place in range(len(keys))]

    def _do(self, key: K, work: Callable[[K], T]) -> Unit:
        before = self.tally.done
        result = work(key)
        return {"key": key, "result": result, "steps": self.tally.done - before}

    def _kept(self, name: str, keys: Sequence[K]) -> dict[int, Unit]:
        """The units that were done before an interruption; the main process has them."""
        if self.checkpoint is None:
            return {}
        found = {place: self.checkpoint.load(f"{name}-{place}") for place in range(len(keys))}
        return {place: unit for place, unit in found.items() if unit is not None and unit["key"] == keys[place]}

    def _keep(self, name: str, units: Mapping[int, Unit]) -> None:
        if self.checkpoint is not None:
            for place, unit in units.items():
                self.checkpoint.save(f"{name}-{place}", unit)
