"""Says without a neural network whether a picture shows the scene its prompt asks for."""

import math
from collections.abc import Iterable, Mapping

import torch

from .scenes import BACKGROUNDS, COLOURS, IMAGE_SIZE, PLACES, SHAPES, SIZES, Scene, draw_mask, shape_moments

ASPECTS = ("shape", "colour", "background", "place", "size")
"""What :func:`judge` checks, in this order."""

_FAR_COLOUR = 0.3  # RGB distance above which a colour has no name
_FAR_PLACE = 0.25  # canvas units from the nominal centre of mass
_LOW_OVERLAP = 0.7  # intersection over union below which a shape has no name
_ANGLES = (-0.24, -0.12, 0.0, 0.12, 0.24)  # radians tried for every shape


def judge(image: torch.Tensor, scene: Scene) -> dict[str, bool]:
    """Compares a picture with a scene.

    The border gives the background, the pixels far from it the colour of the shape. Each pixel's coverage is its
    position between the two colours; area and centre of mass of the coverage give size and place. The shape is the one
    whose drawing with that area and centre overlaps most.

    Args:
        image: one picture, [3, 64, 64], RGB in [-1, 1].
        scene: what the picture should show.

    Returns:
        For each of :data:`ASPECTS` whether it is right. All are False where no shape stands out.
    """
    found = describe(image)
    return {aspect: found.get(aspect) == getattr(scene, aspect) for aspect in ASPECTS}


def describe(image: torch.Tensor) -> dict[str, str | None]:
    """Names what a picture shows: :data:`ASPECTS` with their values, None for what has no name.

    Args:
        image: one picture, [3, 64, 64], RGB in [-1, 1].

    Raises:
        ValueError: the picture has another shape.
    """
    if image.shape != (3, IMAGE_SIZE, IMAGE_SIZE):
        raise ValueError(
            f"describe got a picture of shape {list(image.shape)}; allowed: [3, {IMAGE_SIZE}, {IMAGE_SIZE}]."
        )
    image = (image.float() + 1) / 2
    border = torch.cat(
        [image[:, :2].flatten(1), image[:, -2:].flatten(1), image[:, :, :2].flatten(1), image[:, :, -2:].flatten(1)], 1
    )
    background = border.median(1).values  # [3]
    contrast = (image - background[:, None, None]).norm(dim=0)  # [64, 64]
    strongest = contrast.flatten().topk(32).values.mean()
    if strongest < 0.25:
        return {"background": _nearest_colour(background, BACKGROUNDS)}
    colour = image[:, contrast > 0.7 * strongest].median(1).values  # [3]
    span = colour - background
    coverage = torch.einsum("chw,c->hw", image - background[:, None, None], span / span.dot(span)).clamp(0, 1)
    coverage = torch.where(coverage < 0.15, 0.0, coverage)  # faint ripples would shift area and centre
    axis = (torch.arange(IMAGE_SIZE) + 0.5) / IMAGE_SIZE * 2 - 1
    centre_x = (coverage.sum(0) * axis).sum().item() / coverage.sum().item()
    centre_y = (coverage.sum(1) * axis).sum().item() / coverage.sum().item()
    area = coverage.sum().item() * 4 / IMAGE_SIZE**2  # canvas units
    shape, overlap = _best_shape(coverage, centre_x, centre_y, area)
    radius = math.sqrt(area / shape_moments(shape)[0])
    place, distance = min(
        ((name, math.dist((centre_x, centre_y), centre)) for name, centre in PLACES.items()), key=lambda pair: pair[1]
    )
    return {
        "shape": shape if overlap > _LOW_OVERLAP else None,
        "colour": _nearest_colour(colour, COLOURS),
        "background": _nearest_colour(background, BACKGROUNDS),
        "place": place if distance < _FAR_PLACE else None,
        "size": min(SIZES, key=lambda name: abs(math.log(radius / SIZES[name]))),
    }


def accuracy(images: Iterable[torch.Tensor], scenes: Iterable[Scene]) -> dict[str, float]:
    """Share of right pictures for each of :data:`ASPECTS`, and under "all" the share that is right in every one.

    Args:
        images: N pictures, each [3, 64, 64], RGB in [-1, 1].
        scenes: the N scenes they should show.
    """
    verdicts = [judge(image, scene) for image, scene in zip(images, scenes, strict=True)]
    shares = {aspect: sum(verdict[aspect] for verdict in verdicts) / len(verdicts) for aspect in ASPECTS}
    return shares | {"all": sum(all(verdict.values()) for verdict in verdicts) / len(verdicts)}


def _nearest_colour(colour: torch.Tensor, palette: Mapping[str, tuple[float, float, float]]) -> str | None:
    name = min(palette, key=lambda key: math.dist(palette[key], colour.tolist()))
    return name if math.dist(palette[name], colour.tolist()) < _FAR_COLOUR else None


def _best_shape(coverage: torch.Tensor, centre_x: float, centre_y: float, area: float) -> tuple[str, float]:
    """The shape with the largest soft intersection over union, and that overlap."""
    shapes = [shape for shape in SHAPES for _ in _ANGLES]
    radii = torch.tensor([math.sqrt(area / shape_moments(shape)[0]) for shape in shapes])
    centres = torch.tensor([[centre_x, centre_y]]).expand(len(shapes), 2)
    drawn = draw_mask(shapes, centres, radii, torch.tensor(_ANGLES * len(SHAPES)))  # [shapes * angles, 64, 64]
    overlaps = torch.minimum(drawn, coverage).sum((1, 2)) / torch.maximum(drawn, coverage).sum((1, 2))
    best = int(overlaps.argmax())
    return shapes[best], overlaps[best].item()
