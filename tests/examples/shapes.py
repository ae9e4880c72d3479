"""Pictures of coloured shapes and questions about them, made from a seed.

A scene has one group of like shapes ("three red circles"), or two that differ in colour and in
shape. One count of every pair of colour and shape is held out: no scene for training has such a
group, though its colour, its shape, its count and any two of the three are in many of them.
"""

import math
import random
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

COLORS: dict[str, tuple[int, int, int]] = {
    "red": (215, 35, 35),
    "orange": (245, 130, 25),
    "yellow": (240, 215, 40),
    "green": (40, 150, 60),
    "blue": (40, 80, 215),
    "purple": (125, 45, 165),
    "pink": (245, 130, 185),
    "brown": (110, 65, 30),
}
SHAPES = ("circle", "square", "triangle", "star", "cross")
COUNTS = ("one", "two", "three", "four", "five")
PLACES = ("left", "right", "top", "bottom")
KINDS = ("color", "shape", "count", "place")
SIDES = (128, 128, 128, 96, 160, 192, 224)  # of a picture, in pixels
REACH = 1.3  # no shape's outline is further from its centre, in radii
FINE = 3  # pictures are drawn so many times larger, then reduced: soft edges
MOST = 6  # shapes in a picture of two groups

# By kind: about all shapes of a picture, and about one group of two, named by what is not asked.
ABOUT_ALL = {
    "color": (
        "What color are the shapes?",
        "Which color do you see?",
        "What is the color of the shapes in the picture?",
    ),
    "shape": (
        "What shape is in the picture?",
        "Which shape do you see?",
        "What kind of shape is this?",
    ),
    "count": (
        "How many shapes are there?",
        "How many shapes do you see?",
        "Count the shapes in the picture.",
    ),
    "place": (
        "Where are the shapes: left, right, top or bottom?",
        "Which side of the picture are the shapes on?",
        "Where in the picture do you see the shapes?",
    ),
}
ABOUT_ONE = {
    "color": ("What color is the {shape}?", "Which color is the {shape}?"),
    "shape": ("What shape is {color}?", "Which shape is the {color} one?"),
    "count": ("How many {color} shapes are there?", "Count the {color} shapes."),
}


@dataclass(frozen=True, slots=True)
class Group:
    color: str
    shape: str
    count: int

    @property
    def held_out(self) -> bool:
        """One count of the five for every colour and shape, each count for as many of them."""
        pair = list(COLORS).index(self.color) + 2 * SHAPES.index(self.shape)
        return self.count == 1 + pair % len(COUNTS)


@dataclass(frozen=True, slots=True)
class Thing:
    """One shape: of which group, its centre and radius as shares of the side, its turn in rad."""

    group: int
    x: float
    y: float
    radius: float
    turn: float


@dataclass(frozen=True, slots=True)
class Scene:
    groups: tuple[Group, ...]
    place: str | None  # the side that all shapes are on, None where they are anywhere
    things: tuple[Thing, ...]
    side: int
    seed: int  # of the shades and the noise


@dataclass(frozen=True, slots=True)
class Question:
    kind: str
    text: str
    answer: str


def make_scene(source: random.Random, *, held_out: bool, groups: int = 1) -> Scene:
    """With `held_out` the first group is a combination that training never has; else none is."""
    while True:
        chosen = tuple(_group(source, most=MOST - groups + 1) for _ in range(groups))
        differ = len({g.color for g in chosen}) == len({g.shape for g in chosen}) == groups
        few = groups == 1 or sum(g.count for g in chosen) <= MOST
        fits = chosen[0].held_out == held_out and (held_out or not any(g.held_out for g in chosen))
        if differ and few and fits:
            break
    place = source.choice(PLACES) if groups == 1 and source.random() < 0.6 else None
    things = _placed(source, chosen, place)
    return Scene(chosen, place, things, source.choice(SIDES), source.getrandbits(32))


def _group(source: random.Random, most: int) -> Group:
    count = source.randint(1, min(most, len(COUNTS)))
    return Group(source.choice(tuple(COLORS)), source.choice(SHAPES), count)


def _placed(
    source: random.Random, groups: tuple[Group, ...], place: str | None
) -> tuple[Thing, ...]:
    """Shapes that do not touch, drawn until they fit."""
    members = [number for number, group in enumerate(groups) for _ in range(group.count)]
    largest = 0.2 if len(members) == 1 else 0.16 if len(members) < 4 else 0.12
    while True:
        things: list[Thing] = []
        for member in members:
            for _ in range(20):
                radius = source.uniform(0.065, largest)
                thing = Thing(member, *_centre(source, place, radius), radius, _turn(source))
                if all(_apart(thing, other) for other in things):
                    things.append(thing)
                    break
        if len(things) == len(members) and _is_on(things, place):
            return tuple(things)
        largest = max(0.08, 0.97 * largest)


def _turn(source: random.Random) -> float:
    return source.uniform(-0.2, 0.2)


def _centre(source: random.Random, place: str | None, radius: float) -> tuple[float, float]:
    low, high = REACH * radius, 1 - REACH * radius
    along, across = source.uniform(low, high), source.uniform(low, max(low, 0.38))
    if place is None:
        return along, source.uniform(low, high)
    if place in ("right", "bottom"):
        across = 1 - across
    return (across, along) if place in ("left", "right") else (along, across)


def _apart(a: Thing, b: Thing) -> bool:
    return math.hypot(a.x - b.x, a.y - b.y) > REACH * (a.radius + b.radius)


def _is_on(things: list[Thing], place: str | None) -> bool:
    """Whether the other direction is about in the middle, so that one word says where."""
    if place is None:
        return True
    values = [t.y if place in ("left", "right") else t.x for t in things]
    return abs(sum(values) / len(values) - 0.5) < 0.1


def questions(scene: Scene, source: random.Random, about: int = 0) -> list[Question]:
    """One question of every kind that the scene can be asked, about one of its groups."""
    group = scene.groups[about]
    answers = {
        "color": group.color,
        "shape": group.shape,
        "count": COUNTS[group.count - 1],
        "place": scene.place,
    }
    wordings = ABOUT_ALL if len(scene.groups) == 1 else ABOUT_ONE
    return [
        Question(
            kind, source.choice(texts).format(color=group.color, shape=group.shape), answers[kind]
        )
        for kind, texts in wordings.items()
        if answers[kind] is not None
    ]


def draw(scene: Scene) -> Image.Image:
    """The picture: flat shapes on a light ground, every shade a little off, with some noise."""
    source = np.random.default_rng(scene.seed)
    size = FINE * scene.side
    picture = Image.new("RGB", (size, size), tuple(map(int, source.integers(195, 256, 3))))
    pen = ImageDraw.Draw(picture)
    shades = [
        tuple(map(int, np.clip(COLORS[g.color] + source.integers(-12, 13, 3), 0, 255)))
        for g in scene.groups
    ]
    for thing in scene.things:
        outline = [(size * x, size * y) for x, y in _outline(scene.groups[thing.group], thing)]
        if len(outline) == 2:
            pen.ellipse(outline, fill=shades[thing.group])
        else:
            pen.polygon(outline, fill=shades[thing.group])
    pixels = np.asarray(picture.reduce(FINE)).astype(np.int16)
    strength = int(source.integers(0, 9))
    noise = source.integers(-strength, strength + 1, pixels.shape, dtype=np.int16)
    return Image.fromarray(np.clip(pixels + noise, 0, 255).astype(np.uint8))


def _outline(group: Group, thing: Thing) -> list[tuple[float, float]]:
    """The corners, or two of the box around a circle."""
    x, y, r = thing.x, thing.y, thing.radius
    if group.shape == "circle":
        return [(x - r, y - r), (x + r, y + r)]
    if group.shape == "cross":
        wide, thin = math.hypot(1.1, 0.38), math.atan2(0.38, 1.1)
        polar = [(wide, -thin), (wide, thin), (0.38 * math.sqrt(2), math.pi / 4)]
        corners = [(s, a + k * math.pi / 2) for k in range(4) for s, a in polar]
    else:
        steps, radii, start = {
            "square": (4, (1.2,), math.pi / 4),
            "triangle": (3, (1.25,), -math.pi / 2),
            "star": (10, (1.3, 0.55), -math.pi / 2),
        }[group.shape]
        corners = [(radii[k % len(radii)], start + k * math.tau / steps) for k in range(steps)]
    return [
        (x + r * s * math.cos(a + thing.turn), y + r * s * math.sin(a + thing.turn))
        for s, a in corners
    ]
