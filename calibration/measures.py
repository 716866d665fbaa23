"""What can be measured of a run: each measure turns consecutive residuals into one number per step and branch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def magnitude_ratio(previous: Sequence[torch.Tensor], current: Sequence[torch.Tensor]) -> float:
    """MagCache's ratio: mean over tokens of ``|r_i| / |r_{i-1}|``, norms over channels (arXiv 2506.09045).

    Args:
        previous: residuals of the step before, one tensor [..., C] per cached stream.
        current: residuals of this step, of the same shapes.

    Returns:
        The mean over all tokens of all streams; tokens whose previous residual is zero do not count.
    """
    before, now = _token_norms(previous), _token_norms(current)
    counted = before > 0
    return float((now[counted] / before[counted]).mean()) if bool(counted.any()) else 1.0


def _token_norms(residual: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([r.float().norm(dim=-1).flatten() for r in residual])


MEASURES: dict[str, Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], float]] = {
    "magnitude_ratio": magnitude_ratio,
}
"""Array name in the profile -> measure."""
