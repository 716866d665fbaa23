"""The rows of the Pareto benchmark, who is best at equal speed, and the table that shows both."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

GROUPS = ("cachedit", "diffusers", "cache-dit")
TARGETS, MARGIN = (2.0, 3.0), 2.0  # speed-ups to compare at; dB by which cachedit is to be ahead
Axis = Literal["speedup", "flops_ratio", "nfe_ratio"]
AXES: dict[Axis, str] = {
    "speedup": "measured speed-up",
    "flops_ratio": "uncached FLOPs / FLOPs (no noise)",
    "nfe_ratio": "calls / computed calls (no noise; blocks that run at reused steps are free here)",
}
Point = tuple[float, float]
"""How many times faster, and PSNR in dB."""


@dataclass
class Row:
    """One method with one choice of settings.

    Attributes:
        group, name, settings: as in ``pareto_peers.Method``.
        calls: denoiser calls of a run.
        computed: calls of them that cost more than half of a full one, mean over the prompts.
        flops: of all denoiser calls, as a share of the uncached ones.
        speedup: median time of the uncached pipeline over the median time of this one, whole calls.
        psnr, ssim, st_lpips: against uncached, means over the prompts. PSNR is infinite if all pictures are identical.
        worst_psnr: lowest of a prompt.
        strips: one mark per step; of every prompt, or of the one batch that held them all.
        error: why there are no numbers; "" if there are.
    """

    group: str
    name: str
    settings: dict[str, Any]
    calls: int = 0
    computed: float = math.nan
    flops: float = math.nan
    speedup: float = math.nan
    psnr: float = math.nan
    worst_psnr: float = math.nan
    ssim: float = math.nan
    st_lpips: float | None = None
    strips: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def flops_ratio(self) -> float:
        """How many times less work."""
        return 1 / self.flops if self.flops else math.inf

    @property
    def nfe_ratio(self) -> float:
        """How many times fewer computed calls."""
        return self.calls / self.computed if self.computed else math.inf

    @property
    def label(self) -> str:
        """The settings as they are written in the table."""
        return ", ".join(f"{key} {_short(value)}" for key, value in self.settings.items()) or "defaults"

    def point(self, axis: Axis = "speedup") -> Point | None:
        """Where it lies; None if it failed or changed nothing."""
        point = getattr(self, axis), self.psnr
        return point if not self.error and all(map(math.isfinite, point)) else None

    def to_dict(self) -> dict[str, Any]:
        """JSON form; numbers that are not finite are null."""
        values = {**vars(self), "flops_ratio": self.flops_ratio, "nfe_ratio": self.nfe_ratio}
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in values.items()
        } | {"identical": self.psnr == math.inf}


def front(points: Iterable[Point]) -> list[Point]:
    """The points that no other one beats in both speed and PSNR, the slowest first."""
    best: list[Point] = []
    for point in sorted(set(points), reverse=True):
        if not best or point[1] > best[-1][1]:
            best.append(point)
    return best[::-1]


def psnr_at(points: Iterable[Point], target: float) -> float | None:
    """PSNR that a method reaches at a speed, linear between neighbours on its own front.

    Below its slowest setting it has that setting's PSNR, which is both faster and as good; beyond its fastest nothing
    is known, and the answer is None.
    """
    line = front(points)
    if not line or target > line[-1][0]:
        return None
    if target <= line[0][0]:
        return line[0][1]
    for (x0, y0), (x1, y1) in zip(line, line[1:], strict=False):
        if target <= x1:
            return y0 + (y1 - y0) * (target - x0) / (x1 - x0)
    raise AssertionError("the target lies between the ends")


def best_at(rows: Sequence[Row], group: str, axis: Axis, target: float) -> tuple[float, str] | None:
    """The best PSNR that a method of this group reaches at a speed, and the method's name."""
    lines: dict[str, list[Point]] = {}
    for row in rows:
        point = row.point(axis)
        if row.group == group and point is not None:
            lines.setdefault(row.name, []).append(point)
    reached = [(psnr, name) for name, points in lines.items() if (psnr := psnr_at(points, target)) is not None]
    return max(reached, default=None)


def answers(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For every axis and target: the best of every group, and by how much cachedit is ahead of each peer."""
    found = []
    for axis in AXES:
        for target in TARGETS:
            best = {group: best_at(rows, group, axis, target) for group in GROUPS}
            ours = best["cachedit"]
            lead = {
                group: ours[0] - theirs[0]
                for group, theirs in best.items()
                if group != "cachedit" and ours is not None and theirs is not None
            }
            found.append({"axis": axis, "target": target, "best": best, "lead_db": lead})
    return found


def sentences(found: Sequence[dict[str, Any]]) -> list[str]:
    """The answers in words."""
    lines = []
    for answer in found:
        parts = []
        for group, best in answer["best"].items():
            text = f"{group} -" if best is None else f"{group} {best[0]:.1f} dB ({best[1]})"
            lead = answer["lead_db"].get(group)
            if lead is not None:
                text += f", {lead:+.1f} dB {'reached' if lead >= MARGIN else 'NOT reached'}"
            parts.append(text)
        lines.append(f"{answer['target']:g}x by {AXES[answer['axis']]}: " + "; ".join(parts))
    return lines


def on_front(rows: Sequence[Row]) -> list[Row]:
    """The rows of cachedit that no other row of cachedit beats in both measured speed and PSNR."""
    ours = [row for row in rows if row.group == "cachedit" and row.point() is not None]
    best = set(front(point for row in ours if (point := row.point()) is not None))
    return [row for row in ours if row.point() in best]


def markdown(rows: Sequence[Row]) -> str:
    """All rows as a Markdown table, methods in order of appearance; below it those without numbers, and why."""
    titles = ("", "method", "settings", "computed calls", "FLOPs", "speed-up", "PSNR dB", "worst", "SSIM", "ST-LPIPS")
    lines = ["| " + " | ".join(titles) + " |", "|---" * 3 + "|---:" * 7 + "|"]
    best = {id(row) for row in on_front(rows)}
    for row in (row for row in rows if not row.error):
        group = "" if row.group == "cachedit" else f"{row.group}: "
        cells = (
            "**front**" if id(row) in best else "", group + row.name, row.label, f"{row.computed:.4g} / {row.calls}",
            f"{row.flops:.3f}", f"{row.speedup:.2f}", _decibel(row.psnr), _decibel(row.worst_psnr), f"{row.ssim:.4f}",
            "-" if row.st_lpips is None else f"{row.st_lpips:.4f}",
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    failed: dict[tuple[str, str, str], list[str]] = {}
    for row in (row for row in rows if row.error):
        failed.setdefault((row.group, row.name, row.error), []).append(row.label)
    if failed:
        lines += ["", "Without numbers:", ""]
        lines += [
            f"- {group}: {name} ({'; '.join(labels)}): {error}" for (group, name, error), labels in failed.items()
        ]
    return "\n".join(lines)


def _decibel(value: float) -> str:
    return "identical" if value == math.inf else f"{value:.2f}"


def _short(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(map(_short, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
