"""Which channels of the residual move alike, and what forecasts each cluster of them best (HyCa, arXiv 2510.04188)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from cachedit.calibration.measure import Arrays, Measure, check_finite
from cachedit.errors import ProfileError, UnsupportedModelError
from cachedit.feature.place import Residual
from cachedit.run import Step
from cachedit.strategies.hy_ca import SOLVERS, HyCa
from cachedit.strategy import Context, FeatureStrategy, Site, Stack

CLUSTERS = 8
PROBED, FEWEST = 12, 4  # leading steps that describe the channels; a third difference takes four
TOKENS = 256  # of every tensor of a residual
RESTARTS, ROUNDS = 4, 50  # of k-means


class ChannelClusters(Measure):
    """Clusters of channels by how they move, and the solver of each.

    As in the paper: the leading steps of one probe prompt describe the channels, k-means groups them, and the solver of
    a cluster is the one with the least mean squared forecast error on real features at the strategy's interval. Ours:
    the first branch of the first prompt is the probe; the errors are those of the further prompts where there are any,
    of all branches; a sample of the tokens stands for all; the descriptors' formulas and the number of clusters.
    """

    makes: ClassVar[dict[str, tuple[str, ...]]] = {"channel_cluster": ("channel",), "cluster_solver": ("cluster",)}

    def __init__(self, strategy: FeatureStrategy) -> None:
        super().__init__(strategy)
        self._rule = (strategy if isinstance(strategy, HyCa) else HyCa()).configured(None)

    @property
    def sites(self) -> tuple[Site, ...]:
        """The whole stack."""
        return (Stack(),)

    def start(self, k: int) -> None:
        """Nothing is computed yet."""
        self._describes = k == 0
        self._probe: list[torch.Tensor] = []
        self._probed: tuple[str, str] | None = None
        self._computed: dict[tuple[str, str], tuple[list[int], list[torch.Tensor]]] = {}
        self._errors: torch.Tensor | None = None

    def watch(self, step: Step, values: Mapping[Site, Residual]) -> None:
        """Keep what describes the channels, and let every solver forecast what would be skipped."""
        tokens, at = _joined(some_tokens(values[Stack()])), (step.branch, step.expert)
        if self._describes and len(self._probe) < PROBED and self._probed in (None, at):
            self._probed = at
            self._probe.append(tokens)
        steps, kept = self._computed.setdefault(at, ([], []))
        if not steps or self._rule.should_compute(Context(step=step.index, computed_steps=steps)):
            steps.append(step.index)
            kept.append(tokens)
            del kept[: -self._rule.depth]
            return
        every = torch.tensor([solver(steps[-len(kept) :], step.index) for solver in SOLVERS.values()])  # [solvers, K]
        forecasts = torch.tensordot(every, torch.stack(kept), 1)  # [solvers, tokens, C]
        errors = (forecasts - tokens).double().square().mean(1)
        self._errors = errors if self._errors is None else self._errors + errors

    def stop(self) -> dict[str, Any]:
        """What describes the channels, of the first prompt alone, and the errors [solvers, C]."""
        return {"probe": self._probe, "errors": self._errors}

    def arrays(self, parts: list[Any]) -> Arrays:
        """The cluster of every channel, and for every cluster the place of its solver among ``SOLVERS``."""
        probe, seen = parts[0]["probe"], [part["errors"] for part in parts]
        judged = [errors for errors in seen[1:] if errors is not None] or [e for e in seen[:1] if e is not None]
        if not judged or len(probe) < FEWEST:
            raise ProfileError(
                f"in {self.trial.num_inference_steps} steps {self._rule} skips nothing, or they are fewer than "
                f"{FEWEST}. Calibrate on more steps, or at a larger interval."
            )
        errors = torch.stack(judged).sum(0)  # [solvers, C]
        check_finite(errors.sum(1).tolist(), "the squared error of the forecasts")
        cluster = k_means(descriptors(torch.stack(probe)), CLUSTERS)
        by_cluster = torch.zeros(len(SOLVERS), int(cluster.max()) + 1, dtype=errors.dtype).index_add_(
            1, cluster, errors
        )
        columns = by_cluster.T.tolist()
        solver = [column.index(min(column)) for column in columns]  # the simplest among equals
        if isinstance(self.strategy, HyCa):
            self.defaults = {"interval": self._rule.interval, "warmup": self._rule.warmup}
        self.notes = {"forecast_error": _compared(errors, sum(map(min, columns)))}
        return {"channel_cluster": {"all": cluster.tolist()}, "cluster_solver": {"all": solver}}


def _compared(errors: torch.Tensor, clustered: float) -> dict[str, float]:
    """Squared error of every solver alone, of the chosen ones and of a solver per channel, over that of plain reuse."""
    alone = dict(zip(SOLVERS, errors.sum(1).tolist(), strict=True))
    found = alone | {"by cluster": clustered, "by channel": float(errors.min(0).values.sum())}
    return {name: round(error / (alone["plain"] or 1.0), 6) for name, error in found.items()}


def some_tokens(residual: Residual) -> list[torch.Tensor]:
    """Evenly spread tokens of every tensor of a residual, as rows [tokens, C] in float32 on the CPU."""
    found = []
    for x in residual:
        tokens = x.flatten(0, -2)
        chosen = torch.linspace(0, len(tokens) - 1, min(TOKENS, len(tokens)), device=x.device).long()
        found.append(tokens[chosen].float().cpu())
    return found


def _joined(streams: list[torch.Tensor]) -> torch.Tensor:
    """The tokens of all streams; they share the clusters."""
    widths = sorted({x.shape[1] for x in streams})
    if len(widths) > 1:
        raise UnsupportedModelError(
            f"the stack carries streams of {' and '.join(map(str, widths))} channels; allowed: one width, as channels "
            "of all streams share the clusters. Choose another strategy for this model."
        )
    return torch.cat(streams)


def descriptors(series: torch.Tensor) -> torch.Tensor:
    """How each channel moves over the steps.

    Args:
        series: features [T, tokens, C] at consecutive steps, T at least 4.

    Returns:
        [C, 6], each column with mean 0 and deviation 1 over the channels: the sizes of the first and of the second
        difference against that of the feature, the energy, the jerk ratio (third against first difference), the
        curvature ratio (second against first), all as logarithms, and the spectral flatness over the steps.
    """
    orders = [series.double()]
    for _ in range(3):
        orders.append(orders[-1].diff(dim=0))
    size = torch.stack([order.abs().mean((0, 1)) for order in orders])  # [4, C]
    size = (size + 1e-6 * size[0] + 1e-30).log()  # so that a channel at rest has ratios
    power = torch.fft.rfft(orders[1], dim=0).abs().square().mean(1).clamp_min(1e-30)  # [frequencies, C]
    flatness = power.log().mean(0).exp() / power.mean(0)
    raw = [size[1] - size[0], size[2] - size[0], 2 * size[0], size[3] - size[1], size[2] - size[1], flatness]
    columns = torch.stack(raw, 1)
    spread = columns.std(0, correction=0)
    return torch.where(spread > 1e-9, (columns - columns.mean(0)) / spread.clamp_min(1e-9), 0.0)


def k_means(points: torch.Tensor, count: int, seed: int = 0) -> torch.Tensor:
    """Cluster of every point, numbered from 0 without gaps: Lloyd's algorithm from k-means++ centres.

    Args:
        points: [P, D].
        count: most clusters.
        seed: of the choice of centres; the same seed gives the same clusters.

    Returns:
        [P] integers, of the best of a few starts.
    """
    generator = torch.Generator().manual_seed(seed)
    best, least = torch.zeros(len(points), dtype=torch.long), float("inf")
    for _ in range(RESTARTS):
        centres = points[torch.randint(len(points), (1,), generator=generator)]
        while len(centres) < count:
            distance = torch.cdist(points, centres).min(1).values.square()
            if float(distance.max()) <= 1e-18:
                break  # no more than so many different points
            centres = torch.cat([centres, points[torch.multinomial(distance, 1, generator=generator)]])
        for _ in range(ROUNDS):
            nearest = torch.cdist(points, centres).argmin(1)
            members = torch.nn.functional.one_hot(nearest, len(centres)).to(points.dtype)  # [P, clusters]
            means = members.T @ points / members.sum(0).clamp_min(1)[:, None]
            moved = torch.where(members.sum(0)[:, None] > 0, means, centres)
            if torch.equal(moved, centres):
                break
            centres = moved
        spread = float((points - centres[nearest]).square().sum())
        if spread < least:
            best, least = nearest, spread
    numbered: torch.Tensor = torch.unique(best, return_inverse=True)[1]
    return numbered
