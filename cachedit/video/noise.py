"""Where the noise of a rollout comes from, so that a stream can be stopped and taken up again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Noise:
    """Draws from generators of its own; those that it is given are left as they are.

    Args:
        generator: one, or one per sample; None takes a seed from torch's own generator.
        device: where the noise goes.
        dtype: of the noise.
        given: the noise that the video starts from, [B, C, F, H, W], as far as it reaches.
    """

    def __init__(
        self,
        generator: torch.Generator | Sequence[torch.Generator] | None,
        device: torch.device,
        dtype: torch.dtype,
        given: torch.Tensor | None = None,
    ) -> None:
        if generator is None:
            generator = torch.Generator().manual_seed(int(torch.randint(2**31, (1,))))
        self._one = isinstance(generator, torch.Generator)
        self._generators = [_copy(x) for x in ([generator] if isinstance(generator, torch.Generator) else generator)]
        self.device, self.dtype, self.given = device, dtype, given

    def draw(self, shape: Sequence[int]) -> torch.Tensor:
        """Fresh noise of that shape."""
        from diffusers.utils.torch_utils import randn_tensor

        source = self._generators[0] if self._one else self._generators
        return randn_tensor(tuple(shape), generator=source, device=self.device, dtype=self.dtype)

    def first(self, shape: Sequence[int], start: int) -> torch.Tensor:
        """What the frames from ``start`` on start from, [B, C, n, H, W]: what was given as far as it reaches."""
        batch, channels, count, height, width = shape
        if self.given is None or self.given.shape[2] <= start:
            return self.draw(shape)
        given = self.given[:, :, start : start + count].to(self.device, self.dtype)
        missing = count - given.shape[2]
        return given if not missing else torch.cat([given, self.draw((batch, channels, missing, height, width))], 2)

    def states(self) -> list[torch.Tensor]:
        """States of the generators, for ``set_states``."""
        return [x.get_state() for x in self._generators]

    def set_states(self, states: Sequence[torch.Tensor]) -> None:
        """Go on from where ``states`` was asked for."""
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    def state_dict(self) -> dict[str, Any]:
        """Everything that ``from_state`` needs."""
        devices = [str(x.device) for x in self._generators]
        return {"states": self.states(), "devices": devices, "one": self._one, "given": self.given}

    @classmethod
    def from_state(cls, state: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Noise:
        """The noise that follows that which was drawn before ``state_dict``."""
        generators = [torch.Generator(name) for name in state["devices"]]
        noise = cls(generators[0] if state["one"] else generators, device, dtype, state["given"])
        noise.set_states(state["states"])
        return noise


def _copy(generator: torch.Generator) -> torch.Generator:
    made = torch.Generator(generator.device)
    made.set_state(generator.get_state())
    return made
