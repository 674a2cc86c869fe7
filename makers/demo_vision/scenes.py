"""Scenes of a few coloured shapes on a white or nearly white background, and pictures of them.

A scene says what can be asked about; a picture adds what nobody asks about: exact places, sizes, tints, turns, the
size of the canvas. About one scene in six is held out: no picture of it is ever trained on.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw

from makers.demo_model.words import in_held_out

RGB = tuple[int, int, int]
COLORS: dict[str, tuple[RGB, ...]] = {
    "red": ((255, 0, 0), (220, 20, 60), (205, 30, 30)),
    "orange": ((255, 165, 0), (255, 140, 0), (240, 130, 20)),
    "yellow": ((255, 255, 0), (250, 225, 0), (240, 230, 60)),
    "green": ((0, 128, 0), (0, 255, 0), (34, 139, 34), (50, 205, 50)),
    "blue": ((0, 0, 255), (30, 60, 220), (65, 105, 225)),
    "purple": ((128, 0, 128), (150, 50, 180), (138, 43, 226)),
    "pink": ((255, 192, 203), (255, 105, 180), (255, 150, 190)),
    "black": ((0, 0, 0), (25, 25, 25)),
}
"""Tints of each colour; Pillow's own by that name comes first."""
BACKGROUNDS: tuple[RGB, ...] = ((255, 255, 255), (255, 255, 255), (250, 250, 245), (240, 240, 240))
KINDS = ("circle", "square", "triangle", "cross")
CELLS = (
    "top left", "top", "top right", "left", "center", "right", "bottom left", "bottom", "bottom right",
)  # fmt: skip
"""Names of the thirds of a picture, row by row: a shape is where its center is."""
SIDE = 48
"""Pixels of width and height that the model sees."""


@dataclass(frozen=True)
class Shape:
    """One shape, in the cell of this index."""

    color: str
    kind: str
    cell: int

    @property
    def name(self) -> str:
        return f"{self.color} {self.kind}"

    @property
    def place(self) -> str:
        return CELLS[self.cell]


@dataclass(frozen=True)
class Scene:
    """A few shapes, no two of one color and kind, in the order of their cells."""

    shapes: tuple[Shape, ...]

    @property
    def held_out(self) -> bool:
        return in_held_out("/".join(f"{shape.name} {shape.place}" for shape in self.shapes))


def scene(rng: random.Random, held_out: bool = False, counts: Sequence[int] = (1, 1, 1, 2, 2, 3)) -> Scene:
    """A scene of this side of the split, with one of these `counts` of shapes."""
    while True:
        count = rng.choice(counts)
        cells = sorted(rng.sample(range(len(CELLS)), count))
        shapes = tuple(Shape(rng.choice(tuple(COLORS)), rng.choice(KINDS), cell) for cell in cells)
        found = Scene(shapes)
        if len({shape.name for shape in shapes}) == count and found.held_out == held_out:
            return found


def draw(of: Scene, rng: random.Random) -> Image.Image:
    """A picture of the scene, on a canvas of 48 to 256 pixels that is not always square."""
    width = rng.randint(48, 256 if rng.random() < 0.2 else 96)  # resizing large ones would take half of a step
    height = width if rng.random() < 0.7 else round(width * rng.uniform(0.8, 1.25))
    image = Image.new("RGB", (width, height), rng.choice(BACKGROUNDS))
    canvas = ImageDraw.Draw(image)
    for shape, (x, y, radius) in zip(of.shapes, _places(of, rng), strict=True):
        color = _jitter(rng.choice(COLORS[shape.color]), rng)
        points = _outline(shape.kind, radius, rng)
        canvas.polygon([((x + dx) * width, (y + dy) * height) for dx, dy in points], fill=color)
    return image


def _places(of: Scene, rng: random.Random) -> list[tuple[float, float, float]]:
    """(x, y, radius) of each shape, in parts of the canvas: inside of it, apart from each other."""
    largest = 0.35 if len(of.shapes) == 1 else 0.2
    while True:
        places: list[tuple[float, float, float]] = []
        for shape in of.shapes:
            row, column = divmod(shape.cell, 3)
            x, y = ((third + rng.uniform(0.2, 0.8)) / 3 for third in (column, row))
            limit = min(largest, x, y, 1 - x, 1 - y)
            radius = rng.uniform(max(0.12, 0.5 * limit), max(0.14, limit))
            x, y = (min(max(each, radius), 1 - radius) for each in (x, y))
            apart = (math.dist((x, y), other[:2]) > 1.15 * (radius + other[2]) for other in places)
            if (int(3 * y), int(3 * x)) != (row, column) or not all(apart):
                break
            places.append((x, y, radius))
        else:
            return places


def _jitter(tint: RGB, rng: random.Random) -> RGB:
    red, green, blue = (min(255, max(0, value + rng.randint(-10, 10))) for value in tint)
    return red, green, blue


def _outline(kind: str, radius: float, rng: random.Random) -> list[tuple[float, float]]:
    """Corners around the center of a shape that is a little turned and not quite as wide as high."""
    turn = 0.0 if rng.random() < 0.7 else math.radians(rng.uniform(-10, 10))
    wide = radius * rng.uniform(0.85, 1.0)
    high = radius * rng.uniform(0.85, 1.0)
    if kind == "circle":
        return [(wide * math.cos(each * math.pi / 32), high * math.sin(each * math.pi / 32)) for each in range(64)]
    if kind == "square":
        corners = [(-0.75, -0.75), (0.75, -0.75), (0.75, 0.75), (-0.75, 0.75)]
    elif kind == "triangle":
        corners = [(0.0, -1.0), (0.9, 0.7), (-0.9, 0.7)]
    else:
        arm = rng.uniform(0.22, 0.36)
        corners = [
            (-arm, -1), (arm, -1), (arm, -arm), (1, -arm), (1, arm), (arm, arm), (arm, 1), (-arm, 1), (-arm, arm),
            (-1, arm), (-1, -arm), (-arm, -arm),
        ]  # fmt: skip
    sine, cosine = math.sin(turn), math.cos(turn)
    return [(wide * (x * cosine - y * sine), high * (x * sine + y * cosine)) for x, y in corners]
