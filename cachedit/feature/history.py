"""The computed residuals that a forecast may draw on."""

from __future__ import annotations

from collections import deque

import torch

from cachedit.feature.place import Forecast, Residual

MOST_BRANCHES = 16  # a host that invents a label per step must not fill the memory


class History:
    """The newest ``depth`` residuals of every branch of one denoiser.

    Args:
        depth: residuals kept per branch.
        device: where they are kept; None leaves them where they were computed.
        dtype: how they are kept; None leaves them as they were computed.

    Attributes:
        nbytes: bytes held.
        plain: branch -> the newest residual as it is, for a reused step to take without further ado; only where it is
            kept where and as it was computed.
    """

    def __init__(self, depth: int, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        self.depth, self.device, self.dtype = depth, device, dtype
        self._rings: dict[str, deque[tuple[int, Residual, int]]] = {}  # step, residual, bytes
        self._origins: dict[str, list[tuple[torch.device, torch.dtype]]] = {}
        self.plain: dict[str, Forecast] = {}
        self.nbytes = 0

    def push(self, branch: str, step: int, residual: Residual) -> None:
        """Keep the residual of a step; the oldest one beyond ``depth`` is dropped."""
        if self.device is not None or self.dtype is not None:
            self._origins[branch] = [(r.device, r.dtype) for r in residual]
            residual = tuple([r.to(device=self.device or r.device, dtype=self.dtype or r.dtype) for r in residual])
        if not self.depth:
            return
        ring = self._rings.setdefault(branch, deque(maxlen=self.depth))
        size = 0
        for r in residual:
            size += r.nbytes
        self.nbytes += size - (ring[0][2] if len(ring) == self.depth else 0)
        ring.append((step, residual, size))
        if branch not in self._origins:
            self.plain[branch] = Forecast((residual,))
        if len(self._rings) > MOST_BRANCHES:
            self.drop(next(iter(self._rings)))

    def steps(self, branch: str) -> list[int]:
        """Steps of the residuals of a branch, oldest first."""
        return [step for step, _, _ in self._rings.get(branch, ())]

    @property
    def branches(self) -> list[str]:
        """Branches of which something is kept."""
        return list(self._rings)

    def __contains__(self, branch: str) -> bool:
        """True if there is a residual of a branch."""
        return branch in self._rings

    def newest(self, branch: str) -> Residual | None:
        """The newest residual of a branch, where and as it was computed; None if there is none."""
        ring = self._rings.get(branch)
        if ring is None:
            return None
        return ring[-1][1] if branch not in self._origins else self._restored(branch, ring[-1][1])

    def of(self, branch: str) -> list[Residual]:
        """The residuals of a branch, oldest first, where and as they were computed."""
        kept = [residual for _, residual, _ in self._rings[branch]]
        return kept if branch not in self._origins else [self._restored(branch, residual) for residual in kept]

    def _restored(self, branch: str, residual: Residual) -> Residual:
        origins = self._origins[branch]
        return tuple([r.to(*origin) for r, origin in zip(residual, origins, strict=True)])

    def drop(self, branch: str | None = None) -> None:
        """Forget one branch, or all."""
        if branch is None:
            self._rings.clear()
            self._origins.clear()
            self.plain.clear()
            self.nbytes = 0
        else:
            self.plain.pop(branch, None)
            self.nbytes -= sum([size for _, _, size in self._rings.pop(branch, ())])
