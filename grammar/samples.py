"""Short texts that patterns match: where free text has to end in something particular, they lead out of it."""

from __future__ import annotations

import importlib
import json
import string
from collections.abc import Iterator, Sequence
from typing import Any

sre: Any = importlib.import_module("re._parser")
"""Python's own parser of patterns; private, so whatever it raises or changes costs a hint and no more."""
MAX_SAMPLE = 256
MAX_SUFFIXES = 12
_PRINTABLE = string.ascii_lowercase + string.digits + string.ascii_uppercase + string.punctuation + " "


def sample(pattern: str) -> str | None:
    """A shortest text that `pattern` matches, up to what look-around and the like would add; None if too long or not
    readable."""
    try:
        text = _shortest(sre.parse(pattern))
    except Exception:  # another dialect, too deep, too large: a hint less
        return None
    return text if len(text) <= MAX_SAMPLE else None


def suffixes(text: str) -> list[str]:
    """What may be missing after a beginning of `text`, longest first."""
    return [text[start:] for start in range(min(len(text), MAX_SUFFIXES))]


def pattern_samples(schema: Any) -> Iterator[str]:
    """Suffixes of a sample of every pattern in a schema, as they stand inside a JSON string."""
    pending = [schema]
    while pending:
        node = pending.pop()
        if isinstance(node, list):
            pending += node
        elif isinstance(node, dict):
            pending += node.values()
            patterns = [node.get("pattern"), *(node.get("patternProperties") or ())]
            for pattern in patterns:
                found = sample(pattern) if isinstance(pattern, str) else None
                if found:
                    yield from (json.dumps(part, ensure_ascii=False)[1:-1] for part in suffixes(found))


def _shortest(parsed: Any) -> str:
    text = ""
    for operator, argument in parsed:
        text += _one(str(operator), argument)
        if len(text) > MAX_SAMPLE:
            raise ValueError("too long")
    return text


def _one(operator: str, argument: Any) -> str:
    match operator:
        case "LITERAL":
            return chr(argument)
        case "NOT_LITERAL":
            return next(char for char in _PRINTABLE if ord(char) != argument)
        case "ANY":
            return "a"
        case "IN":
            return _from_set(argument)
        case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
            least, _, inner = argument
            return _shortest(inner) * int(least) if least else ""
        case "SUBPATTERN":
            return _shortest(argument[-1])
        case "ATOMIC_GROUP":
            return _shortest(argument)
        case "BRANCH":
            return min((_shortest(branch) for branch in argument[1]), key=len)
    return ""  # anchors and assertions take no text


def _from_set(items: Sequence[tuple[Any, Any]]) -> str:
    negated = str(items[0][0]) == "NEGATE"
    inside = [char for char in _PRINTABLE if any(_holds(item, char) for item in items[negated:])]
    if negated:
        return next(char for char in _PRINTABLE if char not in inside)
    if inside:
        return inside[0]
    operator, argument = items[0]
    return chr(argument[0] if str(operator) == "RANGE" else argument)


def _holds(item: tuple[Any, Any], char: str) -> bool:
    operator, argument = str(item[0]), item[1]
    if operator == "LITERAL":
        return bool(ord(char) == argument)
    if operator == "RANGE":
        return bool(argument[0] <= ord(char) <= argument[1])
    kind = str(argument)  # a category
    found = char.isdigit() if "DIGIT" in kind else char.isspace() if "SPACE" in kind else char.isalnum() or char == "_"
    return found != ("NOT_" in kind)
