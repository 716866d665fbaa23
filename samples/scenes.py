"""Procedural 64x64 scenes with prompts: the data of the shipped sample model.

A scene is one bold shape of one colour on a flat background: "a large red star on a dark blue background at the top
left". Shapes are drawn from signed distances in torch, so nothing is stored or downloaded, every picture follows from a
seed, and :mod:`.judge` can say without a neural network whether a picture shows what its prompt asks for.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

IMAGE_SIZE = 64
"""Height and width of every picture in pixels."""

SHAPES = ("circle", "square", "triangle", "star", "ring", "cross", "heart", "moon")

COLOURS = {
    "red": (0.90, 0.10, 0.12),
    "orange": (1.00, 0.52, 0.00),
    "yellow": (1.00, 0.88, 0.05),
    "green": (0.15, 0.78, 0.22),
    "cyan": (0.10, 0.85, 0.95),
    "blue": (0.12, 0.32, 1.00),
    "purple": (0.62, 0.18, 0.85),
}
"""Colours of the shape, RGB in [0, 1]."""

BACKGROUNDS = {
    "black": (0.02, 0.02, 0.02),
    "white": (0.98, 0.98, 0.98),
    "grey": (0.48, 0.48, 0.48),
    "dark blue": (0.05, 0.07, 0.34),
    "dark green": (0.03, 0.26, 0.10),
    "light yellow": (1.00, 0.96, 0.72),
}
"""Colours of the background, RGB in [0, 1]."""

PLACES = {
    "in the centre": (0.0, 0.0),
    "at the top left": (-0.42, -0.42),
    "at the top right": (0.42, -0.42),
    "at the bottom left": (-0.42, 0.42),
    "at the bottom right": (0.42, 0.42),
}
"""Centre of mass of the shape (x, y), on a canvas that spans [-1, 1] with y downwards."""

SIZES = {"small": 0.28, "large": 0.43}
"""Radius of the shape in canvas units: 9 and 14 pixels."""

_NEAR = 0.7  # RGB distance below which a colour is not drawn on a background: yellow on light yellow
_POSITION_JITTER = 0.05  # canvas units, 1.6 pixels
_SIZE_JITTER = 0.06  # fraction of the radius
_ANGLE_JITTER = 0.12  # radians


@dataclass(frozen=True, order=True)
class Scene:
    """One shape on a flat background.

    Attributes:
        shape: one of :data:`SHAPES`.
        colour: a key of :data:`COLOURS`.
        background: a key of :data:`BACKGROUNDS`.
        place: a key of :data:`PLACES`.
        size: a key of :data:`SIZES`.
    """

    shape: str
    colour: str
    background: str
    place: str
    size: str

    def __post_init__(self) -> None:
        for name, allowed in _ATTRIBUTES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"Scene got {name}={value!r}; allowed: {', '.join(allowed)}.")

    @property
    def prompt(self) -> str:
        """The sentence that describes the scene, at most 13 words."""
        return f"a {self.size} {self.colour} {self.shape} on a {self.background} background {self.place}"

    @classmethod
    def parse(cls, prompt: str) -> "Scene":
        """Reads a scene back from its :attr:`prompt`.

        Args:
            prompt: "a SIZE COLOUR SHAPE on a BACKGROUND background PLACE"; case, a closing full stop and repeated
                spaces do not matter.

        Raises:
            ValueError: the sentence has another form, or a word is not known.
        """
        words = prompt.lower().strip().rstrip(".").split()
        form = "a SIZE COLOUR SHAPE on a BACKGROUND background PLACE"
        if len(words) < 10 or words[0] != "a" or words[4:6] != ["on", "a"] or "background" not in words:
            raise ValueError(f"Scene.parse got {prompt!r}; the form is {form!r}. Example: {_EXAMPLE!r}.")
        end = words.index("background")
        return cls(
            shape=words[3],
            colour=words[2],
            background=" ".join(words[6:end]),
            place=" ".join(words[end + 1 :]),
            size=words[1],
        )


_ATTRIBUTES = {"shape": SHAPES, "colour": COLOURS, "background": BACKGROUNDS, "place": PLACES, "size": SIZES}
_EXAMPLE = "a large red star on a dark blue background at the top left"


@functools.cache
def all_scenes() -> tuple[Scene, ...]:
    """Every combination whose colour can be told from its background, in a fixed order."""
    combinations = itertools.product(SHAPES, COLOURS, BACKGROUNDS, PLACES, SIZES)
    scenes = (Scene(*values) for values in combinations)
    return tuple(s for s in scenes if math.dist(COLOURS[s.colour], BACKGROUNDS[s.background]) > _NEAR)


def held_out(scene: Scene) -> bool:
    """True for the eleventh of all combinations that training never sees.

    The rule is a linear code over the attributes, so that every pair of attribute values still occurs in training.
    """
    digits = [list(allowed).index(getattr(scene, name)) for name, allowed in _ATTRIBUTES.items()]
    return sum(weight * digit for weight, digit in zip((1, 2, 3, 5, 7), digits, strict=True)) % 11 == 0


def training_scenes() -> list[Scene]:
    """All scenes that are not held out."""
    return [scene for scene in all_scenes() if not held_out(scene)]


def sample_scenes(scenes: Sequence[Scene], count: int, generator: torch.Generator) -> list[Scene]:
    """Draws scenes uniformly, with replacement."""
    return [scenes[index] for index in torch.randint(len(scenes), (count,), generator=generator).tolist()]


def render(scenes: Sequence[Scene], generator: torch.Generator | None = None) -> torch.Tensor:
    """Draws scenes, with a little jitter in position, size and angle when a generator is given.

    Args:
        scenes: N scenes.
        generator: source of the jitter; None draws every scene exactly at its nominal position, size and angle.

    Returns:
        Pictures of shape [N, 3, 64, 64], RGB in [-1, 1], float32.
    """
    count = len(scenes)
    jitter = torch.zeros(count, 4) if generator is None else torch.rand(count, 4, generator=generator) * 2 - 1
    centres = torch.tensor([PLACES[scene.place] for scene in scenes]) + jitter[:, :2] * _POSITION_JITTER
    radii = torch.tensor([SIZES[scene.size] for scene in scenes]) * (1 + jitter[:, 2] * _SIZE_JITTER)
    mask = draw_mask([scene.shape for scene in scenes], centres, radii, jitter[:, 3] * _ANGLE_JITTER)[:, None]
    colour = torch.tensor([COLOURS[scene.colour] for scene in scenes])[:, :, None, None]  # [N, 3, 1, 1]
    background = torch.tensor([BACKGROUNDS[scene.background] for scene in scenes])[:, :, None, None]
    return (background + (colour - background) * mask) * 2 - 1


def draw_mask(
    shapes: Sequence[str], centres: torch.Tensor, radii: torch.Tensor, angles: torch.Tensor, size: int = IMAGE_SIZE
) -> torch.Tensor:
    """Draws anti-aliased shapes in white on black.

    Args:
        shapes: N names from :data:`SHAPES`.
        centres: where the centre of mass goes, [N, 2], (x, y) in canvas units.
        radii: [N], canvas units.
        angles: [N], radians clockwise.
        size: height and width in pixels.

    Returns:
        Coverage in [0, 1], shape [N, size, size].
    """
    axis = (torch.arange(size) + 0.5) / size * 2 - 1
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    x = (x - centres[:, 0, None, None]) / radii[:, None, None]  # [N, size, size], in units of the radius
    y = (y - centres[:, 1, None, None]) / radii[:, None, None]
    cosine, sine = angles.cos()[:, None, None], angles.sin()[:, None, None]
    x, y = x * cosine + y * sine, y * cosine - x * sine
    distance = torch.empty_like(x)
    for shape in sorted(set(shapes)):
        rows = torch.tensor([index for index, name in enumerate(shapes) if name == shape])
        _, centre_x, centre_y = shape_moments(shape)
        distance[rows] = _DISTANCES[shape](x[rows] + centre_x, y[rows] + centre_y)
    pixels = distance * radii[:, None, None] * size / 2
    return (0.5 - pixels / 1.4).clamp(0, 1)


@functools.cache
def shape_moments(shape: str) -> tuple[float, float, float]:
    """Area and centre of mass (x, y) of a shape of radius 1, integrated on a fine grid."""
    axis = torch.linspace(-1.5, 1.5, 601)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    inside = (_DISTANCES[shape](x, y) < 0).float()
    area = inside.mean().item() * 9
    return area, (x * inside).sum().item() / inside.sum().item(), (y * inside).sum().item() / inside.sum().item()


# Signed distances, negative inside, of shapes with a radius near 1; y points down.


def _circle(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.hypot(x, y) - 0.95


def _square(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.maximum(x.abs(), y.abs()) - 0.84


def _triangle(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.maximum(math.sqrt(0.75) * x.abs() - 0.5 * y, y) - 0.58


def _star(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    tip, notch, sector = 1.15, 0.52, math.pi / 5
    radius, angle = torch.hypot(x, y), torch.atan2(x, -y)
    folded = (torch.remainder(angle + sector, 2 * sector) - sector).abs()  # 0 on a tip, `sector` in a notch
    edge_x, edge_y = notch * math.cos(sector) - tip, notch * math.sin(sector)
    length = math.hypot(edge_x, edge_y)
    return ((radius * folded.cos() - tip) * edge_y - radius * folded.sin() * edge_x) / length


def _ring(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (torch.hypot(x, y) - 0.74).abs() - 0.25


def _cross(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x, y = x.abs(), y.abs()
    return torch.minimum(torch.maximum(x - 0.32, y - 1.0), torch.maximum(x - 1.0, y - 0.32))


def _heart(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    scale = 0.6
    x, y = x.abs() * scale, 0.55 - y * scale
    lobe = torch.hypot(x - 0.25, y - 0.75) - math.sqrt(2) / 4
    along = (x + y).clamp(min=0) / 2  # foot of the perpendicular on the straight side
    side = torch.minimum(torch.hypot(x, y - 1), torch.hypot(x - along, y - along)) * torch.sign(x - y)
    return torch.where(x + y > 1, lobe, side) / scale


def _moon(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.maximum(torch.hypot(x, y) - 1, 0.8 - torch.hypot(x - 0.5, y))


_DISTANCES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "star": _star,
    "ring": _ring,
    "cross": _cross,
    "heart": _heart,
    "moon": _moon,
}
