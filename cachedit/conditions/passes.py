"""What the attention of a model is to do with condition tokens in one pass."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch

from cachedit.conditions.bank import KVBank, Pair
from cachedit.processors import alone, attend


@dataclass
class Pass:
    """One forward of a model; image tokens are counted without the text before them.

    Attributes:
        into: bank that the image tokens ``record`` are written to.
        record: rows of the image tokens to write; None writes all.
        layers: that write; None lets all.
        banks: banks that all tokens attend to besides each other.
        bias: added to the attention scores of what is in the banks.
        isolated: image tokens attend only to each other, and not to the text.
        rows: positions of the image tokens in the model's table, for models whose positions are those of a whole grid.
        text: text tokens of the sequence; a block that is given the text apart says how many.
        text_positions: rotations of the text, in models that place it beside all images of the sequence: a pass that
            writes notes them, and one in which images are missing is given them.
        anchor: bank of another image; in the layers that it has, the image tokens ``anchored`` attend to it and to the
            text, and not to their own image.
        anchored: rows of these image tokens.
    """

    into: KVBank | None = None
    record: torch.Tensor | None = None
    layers: Container[int] | None = None
    banks: Sequence[KVBank] = ()
    bias: float = 0.0
    isolated: bool = False
    rows: torch.Tensor | None = None
    text: int = 0
    text_positions: torch.Tensor | None = None
    anchor: KVBank | None = None
    anchored: torch.Tensor | None = None


class Current:
    """The pass that the processors of a model are in; outside of one they are the model's own."""

    def __init__(self) -> None:
        self.now: Pass | None = None
        self._lock = Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Current:
        return memo.setdefault(id(self), Current())

    @contextmanager
    def during(self, now: Pass) -> Iterator[None]:
        """Inside, the model's forward is this pass. If it fails, what it was to record is dropped.

        Raises:
            RuntimeError: another thread is in one.
        """
        with alone(self._lock, "model with condition tokens"):
            try:
                self.now = now
                yield
            except BaseException:
                if now.into is not None:
                    now.into.clear()
                raise
            finally:
                self.now = None


def attended(
    now: Pass, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, backend: Any
) -> torch.Tensor:
    """Attention of text and image tokens in this pass.

    Args:
        now: the pass.
        layer: number of the layer in its banks.
        q, k, v: of text and then image tokens, [B, N, H, D].
        mask: of the model, boolean or added to the scores, broadcastable to [B, H, N, N]; None hides nothing.
        backend: of the attention, as diffusers names it.

    Returns:
        [B, N, H, D].
    """
    text = now.text
    if now.into is not None and (now.layers is None or layer in now.layers):
        rows = slice(None) if now.record is None else now.record
        now.into.write(layer, k[:, text:][:, rows], v[:, text:][:, rows])
    words, image = (k[:, :text], v[:, :text], mask), (k[:, text:], v[:, text:])
    if now.banks:
        kept = [bank.read(layer, k) for bank in now.banks]
        mask = _widened(mask, k, sum(keys.shape[1] for keys, _ in kept), now.bias)
        k = torch.cat([k, *(keys for keys, _ in kept)], 1)
        v = torch.cat([v, *(values for _, values in kept)], 1)
    if now.isolated:
        return torch.cat([attend(q[:, :text], k, v, backend, mask), attend(q[:, text:], *image, backend)], 1)
    found = attend(q, k, v, backend, mask)
    if now.anchor is None or now.anchored is None or layer not in now.anchor.layers:
        return found
    rows = now.anchored.to(q.device) + text
    return found.index_copy(1, rows, _anchored(now.anchor.read(layer, k), q, rows, *words, backend))


def _anchored(
    anchor: Pair, q: torch.Tensor, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
    backend: Any,
) -> torch.Tensor:  # fmt: skip
    """What rows of ``q`` read of the text ``k``, ``v`` and of the anchor, [B, len(rows), H, D]."""
    if mask is not None:
        mask = mask[..., : k.shape[1]] if mask.shape[-2] == 1 else mask[..., rows, : k.shape[1]]
    mask = _widened(mask, k, anchor[0].shape[1], 0.0)
    keys, values = (torch.cat(x, 1) for x in zip((k, v), anchor, strict=True))
    return attend(q[:, rows], keys, values, backend, mask)


def _widened(mask: torch.Tensor | None, k: torch.Tensor, more: int, bias: float) -> torch.Tensor | None:
    """The mask with columns for ``more`` keys, to whose scores ``bias`` is added."""
    if mask is None and bias == 0.0:
        return None
    if mask is None:
        mask = k.new_zeros(1, 1, 1, k.shape[1])
    if mask.dtype == torch.bool and bias != 0.0:
        mask = k.new_zeros(mask.shape).masked_fill(~mask, -torch.inf)
    new = torch.ones if mask.dtype == torch.bool else torch.zeros
    columns = new(*mask.shape[:-1], more, dtype=mask.dtype, device=mask.device)
    return torch.cat([mask, columns if mask.dtype == torch.bool else columns + bias], -1)
