"""Add a forecast residual to what reached a site, in one pass over what it reads and writes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cachedit.kernels.registration import refuse_gradients, register, same_shape, tl, triton

LONGEST = 8  # residuals that one launch takes; a longer history runs the reference
ROWS, COLUMNS = 4, 512  # of a tile: 128-bit loads, at most 64 registers with three residuals, no spills


def _reference(x: torch.Tensor | None, history: Sequence[torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
    base = history[-1] if x is None else x
    dtype = torch.promote_types(base.dtype, torch.float32)
    # The sum is the only temporary: every residual is read once, and added where the sum lies.
    total = torch.zeros_like(base, dtype=dtype) if x is None else x.to(dtype, copy=True)
    for weight, residual in zip(weights.to(dtype).unbind(), history, strict=True):
        total.addcmul_(residual, weight)
    return total.to(base.dtype)


def _fake(x: torch.Tensor | None, history: Sequence[torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(history[-1] if x is None else x)


if triton is not None:

    @triton.jit
    def _kernel(
        x: tl.tensor, history: tl.tensor, weights: tl.tensor, out: tl.tensor, count: tl.tensor, columns: tl.tensor,
        K: tl.constexpr, HAS_X: tl.constexpr, PER_CHANNEL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ) -> None:  # fmt: skip
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        place = row * columns + column
        inside = (column < columns) & (place < count)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        if HAS_X:
            total += tl.load(x + place, inside, 0.0).to(tl.float32)
        for k in tl.static_range(K):
            if PER_CHANNEL:
                weight = tl.load(weights + k * columns + column, column < columns, 0.0)
            else:
                weight = tl.load(weights + k)
            total += weight * tl.load(history[k] + place, inside, 0.0).to(tl.float32)
        tl.store(out + place, total.to(out.dtype.element_ty), inside)


def _launch(x: torch.Tensor | None, history: Sequence[torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
    base = history[-1] if x is None else x
    per_channel = weights.ndim == 2
    served = weights.ndim == 1 or (per_channel and weights.shape[1] == base.shape[-1] and base.is_contiguous())
    if not served or len(history) > LONGEST or base.dtype == torch.float64:
        return _reference(x, history, weights)
    out = torch.empty_like(base)
    count, columns = out.numel(), base.shape[-1] if per_channel else COLUMNS
    if not count:
        return out
    alike = [r if r.stride() == out.stride() else torch.empty_like(out, dtype=r.dtype).copy_(r) for r in history]
    if x is not None and x.stride() != out.stride():
        x = torch.empty_like(out).copy_(x)
    grid = triton.cdiv(count, columns * ROWS), triton.cdiv(columns, COLUMNS)
    with torch.cuda.device_of(out):
        _kernel[grid](
            x, tuple(alike), weights.float().contiguous(), out, count, columns, K=len(alike), HAS_X=x is not None,
            PER_CHANNEL=per_channel, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4,
        )  # fmt: skip
    return out


_operation = register(
    "forecast",
    "(Tensor? x, Tensor[] history, Tensor weights) -> Tensor",
    _reference,
    _fake,
    _launch if triton is not None else None,
)


def forecast(
    x: torch.Tensor | None, history: Sequence[torch.Tensor], weights: torch.Tensor | None = None
) -> torch.Tensor:
    """``x + sum_k weights[k] * history[k]``, accumulated in fp32 and rounded once.

    Args:
        x: what reached the site, any shape, e.g. [B, N, C]; None for the sum alone.
        history: residuals of the shape of ``x``, oldest first; at least one.
        weights: one number per residual [K], one per residual and channel [K, C], or [K, ...] that broadcasts to the
            residuals; None takes the newest residual unweighted, which is one pass and exact.

    Returns:
        A tensor of the shape and dtype of ``x``, or of the newest residual. Without ``x`` and ``weights`` it is the
        newest residual itself.

    Raises:
        ValueError: the residuals are not of the shape of ``x``, or not as many as the weights.
        RuntimeError: a gradient is asked for.
    """
    if weights is None:
        return history[-1] if x is None else x + history[-1]  # three passes in one launch: nothing to fuse
    if len(history) != len(weights):
        raise ValueError(
            f"forecast got {len(history)} residuals and {len(weights)} weights; allowed: as many of one as of the "
            "other. Drop the oldest residuals, or give them the weight 0."
        )
    base = history[-1] if x is None else x
    same_shape("forecast", base, history, "residuals")
    refuse_gradients("forecast", [x, *history, weights])
    return _operation(x, history, weights.to(base.device, non_blocking=True))
