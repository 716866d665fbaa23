"""Procedural 32x32 clips with prompts: the data of the shipped sample video model.

One coloured shape moves on a dark background along one axis and bounces off the edges: "a red star moves to the right
and bounces". What it is and where it goes may change on the way, as when a prompt is changed while a video streams: the
shape then changes at once, and a new direction that is at right angles to the movement turns it. Any other direction
leaves the movement as it is, because after a bounce both ways of an axis fit its prompts.

Shapes and colours are those of :mod:`.scenes`; every clip follows from a seed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .scenes import COLOURS as ALL_COLOURS
from .scenes import draw_mask

CLIP_SIZE = 32
"""Height and width of every frame in pixels."""

SHAPES = ("circle", "square", "triangle", "star")

COLOURS = {name: ALL_COLOURS[name] for name in ("red", "yellow", "green", "cyan", "blue", "purple")}
"""Colours of the shape, RGB in [0, 1]."""

BACKGROUND = (0.06, 0.06, 0.10)
"""RGB in [0, 1]."""

DIRECTIONS = {"to the right": (1, 0), "to the left": (-1, 0), "up": (0, -1), "down": (0, 1)}
"""Unit vectors (x, y), y downwards."""

RADIUS = 0.36
"""Of the shape, on a canvas that spans [-1, 1]: 6 pixels."""

SPEED = 0.1
"""Canvas units a frame: 1.6 pixels."""

LIMIT = 0.6
"""Where the centre of mass bounces, in canvas units from the middle."""

START = (-0.4, 0.0)
"""Centre of mass in the first frame, in canvas units along the direction and across it."""

_START_JITTER = (0.15, 0.15)


@dataclass(frozen=True, order=True)
class Subject:
    """What a clip shows and where it goes.

    Attributes:
        colour: a key of :data:`COLOURS`.
        shape: one of :data:`SHAPES`.
        direction: a key of :data:`DIRECTIONS`.
    """

    colour: str
    shape: str
    direction: str

    def __post_init__(self) -> None:
        for name, allowed in (("colour", COLOURS), ("shape", SHAPES), ("direction", DIRECTIONS)):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"Subject got {name}={value!r}; allowed: {', '.join(allowed)}.")

    @property
    def prompt(self) -> str:
        """The sentence that describes the subject, at most nine words."""
        return f"a {self.colour} {self.shape} moves {self.direction} and bounces"

    @classmethod
    def parse(cls, prompt: str) -> "Subject":
        """Reads a subject back from its :attr:`prompt`.

        Args:
            prompt: "a COLOUR SHAPE moves DIRECTION and bounces"; case, a closing full stop and repeated spaces do not
                matter.

        Raises:
            ValueError: the sentence has another form, or a word is not known.
        """
        words = prompt.lower().strip().rstrip(".").split()
        if len(words) < 7 or words[0] != "a" or words[3] != "moves" or words[-2:] != ["and", "bounces"]:
            form = "a COLOUR SHAPE moves DIRECTION and bounces"
            raise ValueError(f"Subject.parse got {prompt!r}; the form is {form!r}. Example: {EXAMPLE.prompt!r}.")
        return cls(colour=words[1], shape=words[2], direction=" ".join(words[4:-2]))


EXAMPLE = Subject("red", "star", "to the right")


def all_subjects() -> list[Subject]:
    """Every subject, in a fixed order."""
    return [Subject(*words) for words in ((c, s, d) for c in COLOURS for s in SHAPES for d in DIRECTIONS)]


def path(directions: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Where shapes are in every frame.

    Args:
        directions: unit vectors asked for in each of F frames of N clips, [N, F, 2].
        generator: source of a small jitter of the start; None starts exactly at :data:`START`.

    Returns:
        Centres of mass [N, F, 2], (x, y) in canvas units.
    """
    count, frames, _ = directions.shape
    jitter = torch.zeros(count, 2) if generator is None else torch.rand(count, 2, generator=generator) * 2 - 1
    along, across = (torch.tensor(START) + jitter * torch.tensor(_START_JITTER)).unbind(1)
    heading = directions[:, 0].float()
    place = along[:, None] * heading + across[:, None] * heading.flip(1)
    places = [place]
    for frame in range(1, frames):
        wanted = directions[:, frame].float()
        turns = (heading * wanted).sum(1, keepdim=True) == 0
        heading = torch.where(turns, wanted, heading)
        place = place + SPEED * heading
        heading = torch.where(place.abs() > LIMIT, -heading, heading)
        place = torch.where(place.abs() > LIMIT, place.sign() * 2 * LIMIT - place, place)
        places.append(place)
    return torch.stack(places, 1)


def draw_clips(subjects: Sequence[Sequence[Subject]], places: torch.Tensor) -> torch.Tensor:
    """Draws clips.

    Args:
        subjects: for N clips what each of the F frames shows.
        places: centres of mass, [N, F, 2] in canvas units.

    Returns:
        Frames [N, 3, F, 32, 32], RGB in [-1, 1], float32.
    """
    count, frames, _ = places.shape
    shapes = [subject.shape for clip in subjects for subject in clip]
    radii = torch.full((count * frames,), RADIUS)
    mask = draw_mask(shapes, places.flatten(0, 1), radii, torch.zeros(count * frames), CLIP_SIZE)
    colour = torch.tensor([[COLOURS[subject.colour] for subject in clip] for clip in subjects])  # [N, F, 3]
    background = torch.tensor(BACKGROUND)
    mask = mask.unflatten(0, (count, 1, frames))
    colour = (colour - background).transpose(1, 2)[..., None, None]  # [N, 3, F, 1, 1]
    return (background[:, None, None, None] + colour * mask) * 2 - 1


def headings(subjects: Sequence[Sequence[Subject]]) -> torch.Tensor:
    """The direction each frame asks for, as unit vectors [N, F, 2]."""
    return torch.tensor([[DIRECTIONS[subject.direction] for subject in clip] for clip in subjects])
