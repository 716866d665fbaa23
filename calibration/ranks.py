"""The processes that share a calibration, each with a model of its own."""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from cachedit.errors import ProfileError

T = TypeVar("T")
PATIENCE = timedelta(days=30)  # a rank that waits for another one's runs must not take it for dead
TOLD_AS_THEY_ARE = (KeyboardInterrupt, ProfileError, ValueError, TypeError, OSError)  # by whoever catches them


@dataclass(frozen=True)
class Ranks:
    """This process and those beside it.

    Attributes:
        index: of this process; 0 is the main one, which alone writes files and shows progress.
        count: of processes.
        group: over which they talk; None if there is one process.
    """

    index: int = 0
    count: int = 1
    group: Any = None

    @classmethod
    def here(cls) -> Ranks:
        """Those of ``accelerate launch`` or ``torchrun``, or of a process group that is there; else this one alone."""
        if _launched() and not _grouped():
            _joined()
        if not _grouped() or dist.get_world_size() == 1:
            return cls()
        return cls(dist.get_rank(), dist.get_world_size(), _talk(dist.group.WORLD))

    @property
    def is_main(self) -> bool:
        """True for the process that writes."""
        return self.index == 0

    def exchange(self, work: Callable[[], T]) -> list[T]:
        """Do this process's share, and get the shares of all in the order of the ranks.

        Args:
            work: gives what ``pickle`` can hold, with its tensors on the CPU.

        Raises:
            BaseException: its own failure, or that of the first rank that failed, told by its number. No rank is left
                waiting for another.
        """
        if self.count == 1:
            return [work()]
        share, failure, told = None, None, ("", "")
        try:
            share = work()
        except BaseException as error:
            failure, told = error, (_kind(error).__name__, f"{type(error).__name__}: {error}")
        shares: list[Any] = [None] * self.count
        dist.all_gather_object(shares, (share, told), self.group)
        if failure is not None:
            raise failure
        for rank, (_, (kind, text)) in enumerate(shares):
            if kind:
                raise _KINDS[kind](f"rank {rank} of {self.count} failed: {text}")
        return [found for found, _ in shares]

    def agreed(self, value: T) -> T:
        """The main process's value, which counts for all: the arithmetic of another machine may round otherwise."""
        return self.exchange(lambda: value)[0]


def device_of_rank() -> str | None:
    """Where a process of ``accelerate launch`` or ``torchrun`` should load its model; None for any other process."""
    return str(_joined().device) if _launched() else None


_KINDS: dict[str, type[BaseException]] = {kind.__name__: kind for kind in (*TOLD_AS_THEY_ARE, RuntimeError)}


def _kind(error: BaseException) -> type[BaseException]:
    return next((kind for kind in TOLD_AS_THEY_ARE if isinstance(error, kind)), RuntimeError)


def _grouped() -> bool:
    return dist.is_available() and dist.is_initialized()


def _launched() -> bool:
    """True if a launcher started this process beside others."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def _joined() -> Any:
    """accelerate's state of a launched process, which has joined the others on their GPUs or else on CPUs."""
    from accelerate import PartialState

    joining = not _grouped()
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    state = PartialState(cpu=on_cpu or not getattr(torch, "accelerator", torch.cuda).is_available())
    if not _grouped():
        raise RuntimeError(
            f"{os.environ['WORLD_SIZE']} processes were launched, and accelerate finds no way for them to talk on "
            f"{state.device}; allowed: processes on GPUs or CPUs. Call torch.distributed.init_process_group before."
        )
    if joining:
        atexit.register(_leave)
    return state


def _leave() -> None:
    """Close the group while Python still runs: its threads end a process with SIGABRT if they are left to its end."""
    if _grouped():
        dist.destroy_process_group()


@functools.lru_cache(maxsize=1)
def _talk(world: Any) -> Any:
    """A group on the CPU: that of the model may lie on its devices, and may give up after ten minutes."""
    return dist.new_group(backend="gloo", timeout=PATIENCE)
