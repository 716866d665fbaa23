"""Keep what a site added, and in the same pass everything that tells how much it changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from cachedit.kernels.registration import refuse_gradients, register, same_shape, tl, triton

TILE = 1024  # elements of a tile: whole rows where they are short


class Statistics(NamedTuple):
    """Sums over the channels of every token [...], in fp32, of the residual as it was rounded and stored.

    Every published measure of change is made of these: |R| / |R_prev| for magnitudes, the product over both norms for
    directions, L1 of the change over L1 of the previous residual for thresholds.

    Attributes:
        norm: L2 norm of the residual.
        previous_norm: L2 norm of the previous residual; zero without one, as all that follows from it.
        product: inner product of the two.
        leaving: L1 norm of what left the site.
        change: L1 norm of the difference of the two residuals.
        previous: L1 norm of the previous residual.
    """

    norm: torch.Tensor
    previous_norm: torch.Tensor
    product: torch.Tensor
    leaving: torch.Tensor
    change: torch.Tensor
    previous: torch.Tensor


COUNT = len(Statistics._fields)


def _reference(
    entering: torch.Tensor, leaving: torch.Tensor, previous: torch.Tensor | None, wanted: Sequence[bool] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    residual = (leaving - entering).contiguous()
    dtype = torch.promote_types(residual.dtype, torch.float32)
    now, scratch = residual.to(dtype), None

    def total(terms: Callable[..., torch.Tensor], *given: torch.Tensor) -> torch.Tensor:
        """Sum of the terms over the channels; one temporary serves all sums."""
        nonlocal scratch
        scratch = terms(*given, out=scratch)
        return scratch.sum(-1)

    ways: dict[str, Callable[[], torch.Tensor]] = {
        "norm": lambda: torch.linalg.vector_norm(now, dim=-1),
        "leaving": lambda: total(torch.abs, leaving.to(dtype)),
    }
    if previous is not None:
        before = previous.to(dtype)
        ways["previous_norm"] = lambda: torch.linalg.vector_norm(before, dim=-1)
        ways["product"] = lambda: total(torch.mul, now, before)
        ways["change"] = lambda: total(_distance, now, before)
        ways["previous"] = lambda: total(torch.abs, before)
    names = [name for name, asked in zip(Statistics._fields, wanted or [True] * COUNT, strict=True) if asked]
    sums = now.new_full((*now.shape[:-1], COUNT), math.nan)
    for name in names:
        sums[..., Statistics._fields.index(name)] = ways[name]() if name in ways else 0
    return residual, sums


def _distance(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None) -> torch.Tensor:
    return torch.sub(a, b, out=out).abs_()


def _fake(
    entering: torch.Tensor, leaving: torch.Tensor, previous: torch.Tensor | None, wanted: Sequence[bool] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.promote_types(entering.dtype, leaving.dtype)
    sums = leaving.new_empty((*leaving.shape[:-1], COUNT), dtype=torch.promote_types(dtype, torch.float32))
    return leaving.new_empty(leaving.shape, dtype=dtype), sums


if triton is not None:

    @triton.jit
    def _kernel(
        entering: tl.tensor, leaving: tl.tensor, previous: tl.tensor, residual: tl.tensor, sums: tl.tensor,
        rows: tl.tensor, columns: tl.tensor, COUNT: tl.constexpr, HAS_PREVIOUS: tl.constexpr,
        ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ) -> None:  # fmt: skip
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        square, left = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
        before_square, product = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
        change, before_left = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, columns, COLUMNS):
            column = start + tl.arange(0, COLUMNS)[None, :]
            inside = (row[:, None] < rows) & (column < columns)
            place = row[:, None] * columns + column
            out = tl.load(leaving + place, inside, 0.0).to(tl.float32)
            rounded = (out - tl.load(entering + place, inside, 0.0).to(tl.float32)).to(residual.dtype.element_ty)
            tl.store(residual + place, rounded, inside)
            now = rounded.to(tl.float32)
            square += now * now
            left += tl.abs(out)
            if HAS_PREVIOUS:
                before = tl.load(previous + place, inside, 0.0).to(tl.float32)
                before_square += before * before
                product += now * before
                change += tl.abs(now - before)
                before_left += tl.abs(before)
        to = sums + row * COUNT
        tl.store(to, tl.sqrt(tl.sum(square, 1)), row < rows)
        tl.store(to + 1, tl.sqrt(tl.sum(before_square, 1)), row < rows)
        tl.store(to + 2, tl.sum(product, 1), row < rows)
        tl.store(to + 3, tl.sum(left, 1), row < rows)
        tl.store(to + 4, tl.sum(change, 1), row < rows)
        tl.store(to + 5, tl.sum(before_left, 1), row < rows)


def _launch(
    entering: torch.Tensor, leaving: torch.Tensor, previous: torch.Tensor | None, wanted: Sequence[bool] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    residual, sums = _fake(entering, leaving, previous)
    if residual.dtype == torch.float64:
        return _reference(entering, leaving, previous, wanted)
    columns = residual.shape[-1]
    rows = residual.numel() // max(columns, 1)
    if not rows:
        return residual, sums.zero_()
    wide = min(triton.next_power_of_2(columns), TILE)
    with torch.cuda.device_of(residual):
        _kernel[(triton.cdiv(rows, TILE // wide),)](
            entering.contiguous(), leaving.contiguous(), None if previous is None else previous.contiguous(), residual,
            sums, rows, columns, COUNT=COUNT, HAS_PREVIOUS=previous is not None, ROWS=TILE // wide, COLUMNS=wide,
            num_warps=4,
        )  # fmt: skip
    return residual, sums


_operation = register(
    "capture",
    "(Tensor entering, Tensor leaving, Tensor? previous, bool[]? wanted=None) -> (Tensor, Tensor)",
    _reference,
    _fake,
    _launch if triton is not None else None,
)


def capture(
    entering: torch.Tensor,
    leaving: torch.Tensor,
    previous: torch.Tensor | None = None,
    sums: Sequence[str] = Statistics._fields,
) -> tuple[torch.Tensor, Statistics]:
    """What a site added, and how it compares with what it added before, in one pass.

    Args:
        entering: what entered the site, [..., C].
        leaving: what left it, of the same shape.
        previous: the residual to compare with, of the same shape; None if there is none yet, which saves its pass.
        sums: names of the statistics that are needed. The kernel has them all for nothing; the reference saves the
            passes of the others, and leaves NaN in their place.

    Returns:
        The residual ``leaving - entering`` [..., C], contiguous, and its statistics, each [...] in fp32 (fp64 of fp64).

    Raises:
        ValueError: the shapes differ, or there is no such statistic.
        RuntimeError: a gradient is asked for.
    """
    same_shape("capture", leaving, [entering, previous], "tensors")
    refuse_gradients("capture", [entering, leaving, previous])
    unknown = set(sums).difference(Statistics._fields)
    if unknown:
        raise ValueError(
            f"capture got sums {sorted(unknown)}; allowed: {', '.join(Statistics._fields)}. Leave them out for all."
        )
    residual, found = _operation(entering, leaving, previous, [name in sums for name in Statistics._fields])
    return residual, Statistics(*found.unbind(-1))
