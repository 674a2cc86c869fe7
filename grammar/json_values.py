"""JSON Schema's rules for single keywords and values: types, equality, bounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from asyncengine.errors import GrammarError


def types(schema: dict[str, Any], at: str) -> list[str]:
    names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    for name in names:
        if not isinstance(name, str) or name not in IS_TYPE:
            raise GrammarError("grammar", f"type at {at or '/'} must be one of {', '.join(IS_TYPE)}", name)
    return names


def count(schema: dict[str, Any], key: str, at: str) -> int | None:
    value = schema.get(key)
    if value is None:
        return None
    if not is_integer(value) or value < 0:
        raise GrammarError("grammar", f"{key} at {at or '/'} must be a whole number, 0 or more", value)
    return int(value)


def limits(schema: dict[str, Any], low: str, high: str, at: str) -> str | None:
    """A quantifier; None where the bounds exclude each other."""
    least, most = count(schema, low, at) or 0, count(schema, high, at)
    if most is None:
        return f"{{{least},}}" if least else "*"
    return f"{{{least},{most}}}" if least <= most else None


def is_integer(value: Any) -> bool:
    """Whether JSON Schema takes a value for an integer: 1.0 is one, true is not."""
    if isinstance(value, float):
        return value.is_integer()
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """True is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def same(left: Any, right: Any) -> bool:
    """Equality of JSON values: 1 is 1.0, but not true."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


IS_TYPE: Final[Mapping[str, Callable[[Any], bool]]] = MappingProxyType(
    {
        "object": lambda value: isinstance(value, dict),
        "array": lambda value: isinstance(value, list),
        "string": lambda value: isinstance(value, str),
        "number": is_number,
        "integer": is_integer,
        "boolean": lambda value: isinstance(value, bool),
        "null": lambda value: value is None,
    }
)
