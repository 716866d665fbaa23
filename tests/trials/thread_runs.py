"""Threads that crowd one wrapped object: every run is right or refused."""

from __future__ import annotations

import random
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

REFUSAL = re.compile(r"another thread.*copy\.deepcopy.*take turns")
PATIENCE = 120.0  # seconds until a thread is called hung


@contextmanager
def hurried() -> Iterator[None]:
    """Python changes threads some hundred times as often as it does by itself."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(2e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def crowd(
    make: Callable[[Any], Any],
    expected: dict[Hashable, Any],
    same: Callable[[Any, Any], bool],
    threads: int = 8,
    runs: int = 5,
    seed: int = 0,
) -> Counter[str]:
    """Let threads that start together make runs as fast as they can.

    Args:
        make: makes the run of that key on the one object.
        expected: key -> what its run gives when nobody disturbs it.
        same: compares two results.
        threads: how many.
        runs: of every thread.
        seed: of the order in which a thread asks for the keys.

    Returns:
        How many runs were right and how many were refused.

    Raises:
        AssertionError: a run was wrong, failed in another way, or hangs.
    """
    barrier, tally, faults = threading.Barrier(threads), Counter[str](), list[str]()

    def work(number: int) -> None:
        draw = random.Random(1000 * seed + number)
        barrier.wait(PATIENCE)
        for _ in range(runs):
            key = draw.choice(list(expected))
            try:
                right = same(make(key), expected[key])
            except Exception as error:
                if isinstance(error, RuntimeError) and REFUSAL.search(str(error)):
                    tally["refused"] += 1
                else:
                    faults.append(f"{key}: {error!r}")
                continue
            tally["right"] += right
            if not right:
                faults.append(f"{key}: mixed")

    with hurried():
        workers = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(PATIENCE)
    assert not any(worker.is_alive() for worker in workers), "a thread hangs"
    assert not faults, faults[:5]
    return tally
