"""What stands in for the attention processors of a model, and for how long."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

Current = TypeVar("Current")


class Processor(Generic[Current]):
    """Base of what stands in for the attention processors of a model.

    Args:
        current: the pass that is made; outside of one the model's own processor is called.
        layer: number of the block.
        stock: the processor that it stands in for.
    """

    _parallel_config = None

    def __init__(self, current: Current, layer: int, stock: Any) -> None:
        self.current, self.layer, self.stock = current, layer, stock
        self._attention_backend = getattr(stock, "_attention_backend", None)
