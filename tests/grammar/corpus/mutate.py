"""Ways to spoil a valid instance. Whether the result is really invalid is for the validator to say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ..schema_check import Checker

OTHER_TYPES: tuple[Any, ...] = (None, True, 0, -1, 2.5, "", "zz", [], [0], {}, {"zz": 0})
EXTRA_KEY = "zz extra"


def mutations(value: Any) -> Iterator[Any]:
    """Copies of `value` with one node replaced, removed, added or pushed out of range."""
    yield from (other for other in OTHER_TYPES if type(other) is not type(value) or other != value)
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, int | float):
        yield from (value + 1, value - 1, -value - 1, value * 1000 + 7, value - 1000, value + 0.001)
    elif isinstance(value, str):
        yield from _strings(value)
    elif isinstance(value, list):
        yield from _lists(value)
    elif isinstance(value, dict):
        yield from _objects(value)


def _strings(value: str) -> Iterator[str]:
    yield from (value[:-1], value + "!", "!" + value, value + "\n", value * 20, value.swapcase(), value[::-1])
    if value:
        middle = len(value) // 2
        yield value[:middle] + "~" + value[middle + 1 :]


def _lists(value: list[Any]) -> Iterator[list[Any]]:
    yield value[:-1]
    yield value + value[-1:]
    yield value * 10
    yield [*value, None]
    for index, item in enumerate(value):
        for changed in mutations(item):
            yield [*value[:index], changed, *value[index + 1 :]]


def _objects(value: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {**value, EXTRA_KEY: 0}
    for key, item in value.items():
        yield {name: other for name, other in value.items() if name != key}
        yield {(key + "_" if name == key else name): other for name, other in value.items()}
        for changed in mutations(item):
            yield {**value, key: changed}


def broken_texts(instance: Any, schema: dict[str, Any]) -> list[str]:
    """Texts near a valid one that are not JSON, or not of the schema."""
    compact = json.dumps(instance, ensure_ascii=False, separators=(",", ":"))
    indented = json.dumps(instance, ensure_ascii=False, indent=2)
    candidates = [
        compact[:-1],
        compact[: len(compact) // 2],
        compact[1:],
        compact + compact,
        compact + ",",
        compact + "}",
        compact + "]",
        compact.replace('"', "'"),
        compact.replace(":", "=", 1),
        compact.replace(",", ";", 1),
        compact.replace(",", ",,", 1),
        compact.replace("}", ",}", 1),
        compact.replace("]", ",]", 1),
        compact.replace("{", "{,", 1),
        compact.replace("[", "[,", 1),
        compact.replace("null", "None").replace("true", "True").replace("false", "False"),
        indented.replace("{", "{ // note", 1),
        indented.replace("\n", "\x0b", 1),
        "NaN",
        "-Infinity",
        "",
        "\ufeff" + compact,
    ]
    checker = Checker(schema)
    return [text for text in dict.fromkeys(candidates) if checker.text_fault(text) is not None]
