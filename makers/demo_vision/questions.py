"""Questions about scenes, with short answers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from makers.demo_vision.scenes import CELLS, Scene, Shape

NUMBERS = ("None", "One", "Two", "Three", "Four")
NO_PICTURE = "There is no picture."


@dataclass(frozen=True)
class Question:
    """A question, and the only right answer."""

    skill: str
    text: str
    answer: str


def _a(name: str) -> str:
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def _at(cell: int) -> str:
    """ "in the top left", "at the top", "on the left"."""
    place = CELLS[cell]
    word = "in" if cell == 4 or " " in place else "at" if place in ("top", "bottom") else "on"
    return f"{word} the {place}"


def _upper(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def described(of: Scene) -> str:
    """All shapes in the order of their places: "A red circle and a blue star."."""
    *first, last = (_a(shape.name) for shape in of.shapes)
    return _upper(f"{', '.join(first)} and {last}" if first else last)


def _describe(of: Scene, rng: random.Random) -> tuple[str, str]:
    asked = (
        "What is this?", "What is in the picture?", "What do you see?", "Describe the picture.",
        "What does the picture show?", "What is in this image?", "Describe this image.", "What's this?",
    )  # fmt: skip
    return rng.choice(asked), described(of)


def _count(of: Scene, rng: random.Random) -> tuple[str, str]:
    word = rng.choice(("shapes", "shapes", "things", "objects"))
    return _how_many(word, rng), f"{NUMBERS[len(of.shapes)]}."


def _how_many(word: str, rng: random.Random) -> str:
    return rng.choice((f"How many {word} are there?", f"How many {word} do you see?", f"How many {word}?"))


def _color(of: Scene, rng: random.Random) -> tuple[str, str] | None:
    shape = _only(of, "kind", rng)
    if shape is None:
        return None
    spelled = "colour" if rng.random() < 0.1 else "color"
    asked: tuple[str, ...] = (f"What {spelled} is the {shape.kind}?", f"Which {spelled} is the {shape.kind}?")
    if len(of.shapes) == 1:
        asked += (f"What {spelled} is it?", f"What {spelled} is this?")
    return rng.choice(asked), f"It is {shape.color}."


def _kind(of: Scene, rng: random.Random) -> tuple[str, str] | None:
    shape = _only(of, "color", rng)
    if shape is None:
        return None
    asked: tuple[str, ...] = (
        f"What is {shape.color}?",
        f"Which shape is {shape.color}?",
        f"What shape is {shape.color}?",
    )
    if len(of.shapes) == 1:
        asked += ("What shape is it?", "What shape is this?", "Which shape is this?")
    return rng.choice(asked), _upper(_a(shape.kind))


def _where(of: Scene, rng: random.Random) -> tuple[str, str]:
    shape = rng.choice(of.shapes)
    alone = sum(other.kind == shape.kind for other in of.shapes) == 1
    return f"Where is the {shape.kind if alone and rng.random() < 0.5 else shape.name}?", _upper(_at(shape.cell))


MAKERS: dict[str, Callable[[Scene, random.Random], tuple[str, str] | None]] = {
    "describe": _describe, "count": _count, "color": _color, "kind": _kind,
    "where": _where,
}  # fmt: skip
"""A maker of questions for each skill; None where a scene has no such question."""
_SHARES = (3, 0.5, 4, 0.5, 5)


def question(of: Scene, rng: random.Random, skill: str | None = None) -> Question | None:
    """A question of a `skill`, of a random one by default; None: the scene has none of that skill."""
    drawn = rng.choices(tuple(MAKERS), _SHARES)[0] if skill is None else skill
    made = MAKERS[drawn](of, rng)
    return None if made is None else Question(drawn, *made)


def questions(of: Scene, rng: random.Random, count: int) -> list[Question]:
    """So many questions about one scene."""
    found: list[Question] = []
    while len(found) < count:
        made = question(of, rng)
        if made is not None:
            found.append(made)
    return found


def _only(of: Scene, field: str, rng: random.Random) -> Shape | None:
    """A shape that is the only one of its color or kind."""
    values = [getattr(shape, field) for shape in of.shapes]
    alone = [shape for shape, value in zip(of.shapes, values, strict=True) if values.count(value) == 1]
    return rng.choice(alone) if alone else None
