"""Says without a neural network whether a clip shows the moving shape its prompt asks for."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .clips import BACKGROUND, CLIP_SIZE, COLOURS, DIRECTIONS, LIMIT, RADIUS, SHAPES, SPEED, Subject
from .scenes import draw_mask, shape_moments

ASPECTS = ("colour", "shape", "size", "course")
"""What :func:`follow` checks, in this order."""

_FAR_COLOUR = 0.3  # RGB distance above which a colour has no name
_FAINT = 0.25  # RGB distance from the background below which nothing is seen
_LOW_OVERLAP = 0.7  # intersection over union below which a shape has no name
_SIZE_TOLERANCE = 0.15  # of the radius
_ACROSS_TOLERANCE = 0.06  # canvas units between two frames, 1 pixel
_PAST_THE_EDGE = 0.1  # canvas units beyond the place of the bounce


@dataclass(frozen=True)
class Sighting:
    """What one frame shows.

    Attributes:
        colour: a key of ``COLOURS``, None if it is none of them.
        shape: one of ``SHAPES``, None if it looks like none of them.
        place: centre of mass (x, y) in canvas units.
        radius: of the shape with that area, in canvas units.
    """

    colour: str | None
    shape: str | None
    place: tuple[float, float]
    radius: float


def sight(frame: torch.Tensor) -> Sighting | None:
    """Finds the shape in a frame; None where nothing stands out from the background.

    Args:
        frame: [3, 32, 32], RGB in [-1, 1].

    Raises:
        ValueError: the frame has another shape.
    """
    if frame.shape != (3, CLIP_SIZE, CLIP_SIZE):
        raise ValueError(f"sight got a frame of shape {list(frame.shape)}; allowed: [3, {CLIP_SIZE}, {CLIP_SIZE}].")
    background = torch.tensor(BACKGROUND)[:, None, None]
    difference = (frame.float() + 1) / 2 - background
    contrast = difference.norm(dim=0)  # [32, 32]
    strongest = contrast.flatten().topk(32).values.mean()
    if strongest < _FAINT:
        return None
    colour = difference[:, contrast > 0.7 * strongest].median(1).values  # [3], from the background
    coverage = torch.einsum("chw,c->hw", difference, colour / colour.dot(colour)).clamp(0, 1)
    coverage = torch.where(coverage < 0.15, 0.0, coverage)  # faint ripples would shift area and centre
    axis = (torch.arange(CLIP_SIZE) + 0.5) / CLIP_SIZE * 2 - 1
    total = coverage.sum().item()
    place = ((coverage.sum(0) * axis).sum().item() / total, (coverage.sum(1) * axis).sum().item() / total)
    area = total * 4 / CLIP_SIZE**2  # canvas units
    radii = torch.tensor([math.sqrt(area / shape_moments(shape)[0]) for shape in SHAPES])
    drawn = draw_mask(SHAPES, torch.tensor([place] * len(SHAPES)), radii, torch.zeros(len(SHAPES)), CLIP_SIZE)
    overlaps = torch.minimum(drawn, coverage).sum((1, 2)) / torch.maximum(drawn, coverage).sum((1, 2))
    best = int(overlaps.argmax())
    seen = [value + offset for value, offset in zip(colour.tolist(), BACKGROUND, strict=True)]
    name = min(COLOURS, key=lambda key: math.dist(COLOURS[key], seen))
    return Sighting(
        colour=name if math.dist(COLOURS[name], seen) < _FAR_COLOUR else None,
        shape=SHAPES[best] if overlaps[best] > _LOW_OVERLAP else None,
        place=place,
        radius=radii[best].item(),
    )


def follow(frames: torch.Tensor, subject: Subject) -> dict[str, float]:
    """The share of a clip's frames that are right.

    A frame is on course if the shape came to it from the frame before by one step along the axis of the direction: not
    across, not faster than it should, slower only beside the edge where it bounces, and not beyond that.

    Args:
        frames: [3, F, 32, 32], RGB in [-1, 1].
        subject: what the clip should show.

    Returns:
        For each of :data:`ASPECTS` a share in [0, 1].
    """
    sightings = [sight(frame) for frame in frames.unbind(1)]
    seen = [found for found in sightings if found is not None]
    right = {
        "colour": sum(found.colour == subject.colour for found in seen),
        "shape": sum(found.shape == subject.shape for found in seen),
        "size": sum(abs(found.radius / RADIUS - 1) < _SIZE_TOLERANCE for found in seen),
    }
    shares = {aspect: count / len(sightings) for aspect, count in right.items()}
    steps = list(zip(sightings, sightings[1:], strict=False))
    return shares | {"course": sum(_is_step(*step, subject) for step in steps) / max(1, len(steps))}


def bounces(frames: torch.Tensor, subject: Subject) -> int:
    """How often the shape turned round: changes of the sign of its movement along the axis of the direction.

    Args:
        frames: [3, F, 32, 32], RGB in [-1, 1].
        subject: says which axis.
    """
    places = [found.place[_axis(subject)] for frame in frames.unbind(1) if (found := sight(frame)) is not None]
    moves = _signs([b - a for a, b in zip(places, places[1:], strict=False)])
    return sum(a != b for a, b in zip(moves, moves[1:], strict=False))


def _axis(subject: Subject) -> int:
    return 0 if DIRECTIONS[subject.direction][0] else 1


def _is_step(before: Sighting | None, after: Sighting | None, subject: Subject) -> bool:
    if before is None or after is None:
        return False
    axis = _axis(subject)
    along, across = (abs(after.place[i] - before.place[i]) for i in (axis, 1 - axis))
    edge = max(abs(before.place[axis]), abs(after.place[axis]))
    steady = 0.5 * SPEED < along < 1.5 * SPEED or (along <= 0.5 * SPEED and edge > LIMIT - SPEED)
    return steady and across < _ACROSS_TOLERANCE and edge < LIMIT + _PAST_THE_EDGE


def _signs(moves: Sequence[float]) -> list[bool]:
    """Directions of the moves that are more than a wobble."""
    return [move > 0 for move in moves if abs(move) > 0.3 * SPEED]
