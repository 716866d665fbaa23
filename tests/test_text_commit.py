"""Commit rules, by vectors that can be checked by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cachedit.text import DecodeState
from cachedit.text.commit import EntropyBound, Factor, Quota, Threshold, commit_rule


def state(confidence: list[list[float]], entropy: list[list[float]] | None = None, block: int = 8) -> DecodeState:
    """One prompt token, and an answer with these confidences."""
    found = torch.tensor(confidence, dtype=torch.float64)
    rows, length = found.shape
    masked = torch.arange(1 + length).expand(rows, -1) > 0
    blocks = torch.arange(-1, length).div(block, rounding_mode="floor").expand(rows, -1)
    seen = torch.ones_like(masked)
    made = DecodeState(torch.zeros(rows, 1 + length, dtype=torch.long), seen, seen, blocks, blocks, masked)
    made.confidence = torch.cat([torch.full((rows, 1), 9.0), found], 1)
    if entropy is not None:
        made.entropy = torch.cat([torch.zeros(rows, 1), torch.tensor(entropy)], 1).double()
    return made


def picked(rule: Any, at: DecodeState) -> list[list[int]]:
    """Places in the answer, per row."""
    rule.begin(at, [None] * len(at.ids))
    return [row[1:].nonzero()[:, 0].tolist() for row in rule.select(at)]


@pytest.mark.parametrize(
    ("bound", "expected"),
    [(0.9, [[1, 3], [0]]), (0.95, [[1], [0]]), (1.5, [[1], [0]]), (0.0, [[0, 1, 2, 3], [0, 1, 2, 3]])],
)
def test_a_threshold_takes_all_that_reach_it_and_always_the_best(bound: float, expected: list[list[int]]) -> None:
    assert picked(Threshold(bound), state([[0.2, 0.99, 0.5, 0.9], [0.4, 0.3, 0.2, 0.1]])) == expected


def test_thresholds_are_nested() -> None:
    at = state(torch.rand(5, 12, generator=torch.Generator().manual_seed(0)).tolist(), block=12)
    found = [[set(row) for row in picked(Threshold(bound / 10), at)] for bound in range(12)]
    for lower, higher in zip(found, found[1:], strict=False):
        assert all(h <= lo for lo, h in zip(lower, higher, strict=True))


@pytest.mark.parametrize(
    ("bound", "expected"),
    [
        # 2 / 64, 3 / 8, 4 / 4, 5 * 3 / 8
        (1.1, [0, 1, 2]),
        (1.0, [0, 1]),  # below, not at
        (0.4, [0, 1]),
        (0.375, [0]),
        (0.0, [0]),
        (1.9, [0, 1, 2, 3]),
    ],
)
def test_a_factor_takes_the_longest_prefix_below_it(bound: float, expected: list[int]) -> None:
    assert picked(Factor(bound), state([[1 - 1 / 64, 1 - 1 / 8, 1 - 1 / 4, 1 - 3 / 8]])) == [expected]


def test_the_factor_stops_at_the_first_failure() -> None:
    # 2 * 0.3 = 0.6 fails 0.5, and nothing behind it can pass
    assert picked(Factor(0.5), state([[0.7, 0.7, 0.7, 0.7]])) == [[0]]


@pytest.mark.parametrize(
    ("bound", "expected"), [(0.0, [2]), (0.12, [2]), (0.125, [0, 2]), (0.375, [0, 2, 3]), (0.875, [0, 1, 2, 3])]
)
def test_an_entropy_bound_leaves_the_largest_out_of_the_sum(bound: float, expected: list[int]) -> None:
    # ranked 1/8, 1/4, 1/2, 5/8: sums without the last 0, 1/8, 3/8, 7/8
    at = state([[0.1, 0.9, 0.3, 0.8]], [[0.25, 0.625, 0.125, 0.5]])
    assert picked(EntropyBound(bound), at) == [expected]


def counts_of(rule: Quota, at: DecodeState) -> list[int]:
    """How many tokens each step commits until nothing is masked."""
    rule.begin(at, [None])
    counts = []
    while not bool(at.done.all()):
        found = rule.select(at)
        counts.append(int(found.sum()))
        at.commit(found, at.ids)
        at.enter_blocks()
    return counts


def test_a_quota_shares_steps_out_among_blocks_and_masks_among_steps() -> None:
    at = state([[0.1 * i for i in range(10)]], block=4)  # blocks of 4, 4 and 2
    rule = Quota(steps=5)  # 2, 2 and 1 steps
    assert counts_of(rule, at) == [2, 2, 2, 2, 2]


def test_what_is_left_over_goes_to_the_first_steps() -> None:
    at = state([[0.0] * 8])
    rule = Quota(steps=3)
    assert counts_of(rule, at) == [3, 3, 2]


def test_a_drawn_order_is_known_beforehand_and_is_each_row_s_own() -> None:
    at = state([[0.5] * 8] * 2)
    rule = Quota(order="random")
    rule.begin(at, [torch.Generator().manual_seed(seed) for seed in (3, 4)])
    foreseen, chosen = rule.foresee(at), rule.select(at)
    assert foreseen is not None
    assert torch.equal(foreseen, chosen)
    alone = Quota(order="random")
    alone.begin(state([[0.5] * 8]), [torch.Generator().manual_seed(4)])
    assert torch.equal(alone.select(state([[0.5] * 8]))[0], chosen[1])


@pytest.mark.parametrize("rule", [Quota(), Quota(3), Threshold(0.7), Factor(1.0), EntropyBound(0.2)])
def test_every_row_gets_a_token_of_its_block_and_none_elsewhere(rule: Any) -> None:  # E12
    generator = torch.Generator().manual_seed(1)
    shape = 4, 11
    at = state(torch.rand(shape, generator=generator).tolist(), torch.rand(shape, generator=generator).tolist(), 4)
    rule.begin(at, [None] * 4)
    while not bool(at.done.all()):
        before, found = at.open, rule.select(at)
        assert not bool((found & ~before).any())
        assert bool((found.any(1) | at.done).all())
        at.commit(found, at.ids)
        at.enter_blocks()


@pytest.mark.parametrize(
    "asked",
    [
        {"steps": 3, "threshold": 0.9},
        {"threshold": 0.9, "factor": 1.0},
        {"order": "random", "threshold": 0.9},
        {"threshold": -0.1},
        {"steps": 0},
        {"order": "left"},
    ],
)
def test_impossible_rules_are_refused(asked: dict[str, Any]) -> None:
    none: dict[str, Any] = {"steps": None, "order": "confidence", "threshold": None, "factor": None}
    with pytest.raises(ValueError, match="allowed"):
        commit_rule(**{**none, "entropy_bound": None, **asked})
