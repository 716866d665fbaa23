"""A cached model whose tokens lie on two ranks, by diffusers' context parallelism (Ulysses)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rank_parallel import LISTENING, STATIC, THRESHOLDS
from test_threads_ranks import ranks

ORDERS = ("wrapped, then parallel", "parallel, then wrapped")


@pytest.fixture(scope="module")
def seen() -> list[list[dict[str, Any]]]:
    """What each rank saw; ranks that decide differently would wait for each other in the middle of a step."""
    return ranks(Path(__file__).with_name("rank_parallel.py"))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("strategy", [*STATIC, *LISTENING])
@pytest.mark.parametrize("model", THRESHOLDS)
def test_ranks_decide_alike_and_give_what_one_process_gives(
    seen: list[list[dict[str, Any]]], model: str, strategy: str, order: str
) -> None:
    at = {"model": model, "strategy": strategy, "order": order}
    first, second = (next(run for run in rank if at.items() <= run.items()) for rank in seen)
    assert first == second
    assert {"■", "□"} == set(first["shared"])
    assert first["shared"] == first["alone"]
    assert first["error"] < 1e-5
