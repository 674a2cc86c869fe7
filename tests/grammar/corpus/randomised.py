"""Random schemas, the same in every run. Each piece comes with a way to draw an instance of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

from .case import Case, make, read

WORDS = ("id", "name", "größe", "x", "items", "kind", "value", "日本", "note", "a b", "count", "Ende", "n1", "sub")


@dataclass(frozen=True, slots=True)
class Piece:
    schema: dict[str, Any]
    draw: Callable[[Random], Any]


def from_list(schema: dict[str, Any], values: list[Any]) -> Piece:
    return Piece(schema, lambda random: random.choice(values))


LIMITS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}


@cache
def tables() -> list[list[Piece]]:
    """Pieces that the written cases of integers, numbers, patterns, formats and lengths are."""
    rows = [row for row in read() if isinstance(row["schema"].get("type"), str) and "annotation" not in row["name"]]
    return [
        [
            from_list(row["schema"], row["valid"])
            for row in rows
            if row["name"].startswith(f"{category}/") and row["schema"].keys() - {"type"} <= keywords
        ]
        for category, keywords in (
            ("integer", LIMITS),
            ("number", LIMITS),
            ("pattern", {"pattern"}),
            ("format", {"format"}),
            ("length", {"minLength", "maxLength"}),
        )
    ]


def scalar(random: Random) -> Piece:
    match random.randrange(9):
        case 0 | 1 | 2 | 3 | 4 as number:
            return random.choice(tables()[number])
        case 5:
            values = random.sample(["red", "green", "blue", 1, 2.5, None, "日", "", "red "], random.randint(1, 6))
            return from_list({"enum": values}, values)
        case 6:
            return from_list({"type": "boolean"}, [True, False])
        case 7:
            return from_list({"type": ["string", "null"]}, ["text", None, 'q"\\'])
    return from_list({"type": "integer"}, [0, -1, 10**12])


def array(random: Random, depth: int) -> Piece:
    item = piece(random, depth - 1)
    least = random.choice([0, 0, 1, 2])
    most = random.choice([None, least, least + 1, least + 4])
    schema: dict[str, Any] = {"type": "array", "items": item.schema}
    schema |= {"minItems": least} if least else {}
    schema |= {"maxItems": most} if most is not None else {}
    top = least + 2 if most is None else most
    return Piece(schema, lambda draw: [item.draw(draw) for _ in range(draw.randint(least, top))])


def fixed(random: Random, depth: int) -> Piece:
    parts = [piece(random, depth - 1) for _ in range(random.randint(1, 3))]
    schema = {"type": "array", "prefixItems": [part.schema for part in parts], "items": False, "minItems": len(parts)}
    return Piece(schema, lambda draw: [part.draw(draw) for part in parts])


def record(random: Random, depth: int) -> Piece:
    names = random.sample(WORDS, random.randint(1, 5))
    parts = {name: piece(random, depth - 1) for name in names}
    required = [name for name in names if random.random() < 0.6]
    schema: dict[str, Any] = {"type": "object", "properties": {name: part.schema for name, part in parts.items()}}
    schema["required"] = required
    extra = random.choice(["closed", "closed", "open", "typed"])
    spare = scalar(random)
    if extra != "open":
        schema["additionalProperties"] = False if extra == "closed" else spare.schema

    def draw(source: Random) -> dict[str, Any]:
        made = {name: part.draw(source) for name, part in parts.items() if name in required or source.random() < 0.5}
        return {**made, "spare one": spare.draw(source)} if extra == "typed" and source.random() < 0.5 else made

    return Piece(schema, draw)


def mapping(random: Random, depth: int) -> Piece:
    item = piece(random, depth - 1)
    schema = {"type": "object", "additionalProperties": item.schema}
    return Piece(schema, lambda draw: {name: item.draw(draw) for name in draw.sample(WORDS, draw.randint(0, 3))})


def choice(random: Random, depth: int) -> Piece:
    parts = [piece(random, depth - 1) for _ in range(random.randint(2, 3))]
    return Piece({"anyOf": [part.schema for part in parts]}, lambda draw: draw.choice(parts).draw(draw))


def tagged(random: Random, depth: int) -> Piece:
    """oneOf whose branches differ in a required constant."""
    parts = {f"k{index}": piece(random, depth - 1) for index in range(random.randint(2, 3))}
    branches = []
    for tag, part in parts.items():
        properties = {"kind": {"const": tag}, "body": part.schema}
        branches.append({"type": "object", "properties": properties, "required": ["kind", "body"]})

    def draw(source: Random) -> dict[str, Any]:
        tag = source.choice(list(parts))
        return {"kind": tag, "body": parts[tag].draw(source)}

    return Piece({"oneOf": branches}, draw)


def piece(random: Random, depth: int) -> Piece:
    if depth <= 0 or random.random() < 0.25:
        return scalar(random)
    makers = [array, fixed, record, record, record, mapping, choice, tagged]
    return random.choice(makers)(random, depth)


def recursive(random: Random) -> Piece:
    """A record with some scalars that holds more of itself, under a name."""
    parts = {name: scalar(random) for name in random.sample(WORDS, random.randint(1, 3))}
    again = {"$ref": "#/$defs/node"}
    inner: dict[str, Any] = (
        {"type": "array", "items": again} if random.random() < 0.5 else {"anyOf": [again, {"type": "null"}]}
    )
    many = inner.get("type") == "array"
    properties = {**{name: part.schema for name, part in parts.items()}, "rest": inner}
    node = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}

    def draw(source: Random, depth: int = 3) -> dict[str, Any]:
        made = {name: part.draw(source) for name, part in parts.items()}
        below = [draw(source, depth - 1) for _ in range(source.randint(0, 2))] if depth else []
        return {**made, "rest": below if many else (below[0] if below else None)}

    return Piece({"$defs": {"node": node}, **again}, draw)


def random_cases(count: int) -> Iterator[Case]:
    for number in range(count):
        random = Random(f"asyncengine schema {number}")
        if number % 6 == 5:
            made = recursive(random)
        else:
            made = random.choice([record, record, array, choice, tagged, mapping])(random, 1 + number % 4)
        yield make(f"random/{number:03d}", made.schema, [made.draw(random) for _ in range(3)])
