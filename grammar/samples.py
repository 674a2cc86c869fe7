"""Short texts that patterns match: where free text has to end in something particular, they lead out of it."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import re
import string
from collections.abc import Iterator, Sequence
from typing import Any

from asyncengine.grammar.schemas import schemas_of, subschemas
from asyncengine.grammar.spec import Grammar

sre: Any = importlib.import_module("re._parser")
"""Python's own parser of patterns; private, so whatever it raises or changes costs a hint and no more."""
MAX_SAMPLE, MAX_BEGUN = 2048, 256
"""Letters of a sample, and of one that is also offered without its first letters, one after the other."""
MAX_SAMPLES = 64
"""The number of samples of one pattern."""
MAX_SUFFIXES = 12
MAX_BYTES = 64 << 10
"""Bytes of all ways out of one grammar together: that much is tried in a few milliseconds."""
_PRINTABLE = string.ascii_lowercase + string.digits + string.ascii_uppercase + string.punctuation + " "
_QUOTED = re.compile(r'"((?:[^"\\\n]|\\.){1,64})"')
_ESCAPE = re.compile(r"\\(?:u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|x[0-9A-Fa-f]{2}|.)", re.DOTALL)
_PATTERN = re.compile(r"/((?:[^/\\\n]|\\.){1,200})/")
_MARKUP = re.compile(r"<\\?/?[A-Za-z_|][^<>\s\\]{0,40}>|\[\\?/?[A-Z_]+\]")


def ways_out(grammar: Grammar, text: str) -> list[bytes]:
    """Texts that may lead out of a free text of `grammar`, `text` being what the library compiles: samples of its
    patterns, its options, its quoted literals and what looks like markup in it."""
    found: list[str] = []
    match grammar.kind:
        case "json_schema":
            found += _inside_strings(grammar)
        case "regex":
            found += _endings(samples(grammar.text))
        case "choice":
            found += sorted(json.loads(grammar.text), key=len)
        case _:
            found += [_ESCAPE.sub(_unescaped, literal) for literal in _QUOTED.findall(text)]
            found += [markup.replace("\\", "") for markup in _MARKUP.findall(text)]
            found += _endings([sample for pattern in _PATTERN.findall(text) for sample in samples(pattern)])
            found += _inside_strings(grammar)
    ways = [item.encode("utf-8", "replace") for item in dict.fromkeys(found) if item]
    room = itertools.accumulate(map(len, ways))
    return [way for way, used in zip(ways, room, strict=True) if used <= MAX_BYTES]


def _inside_strings(grammar: Grammar) -> list[str]:
    """Samples of the patterns of a grammar's schemas, as JSON writes them, and their endings."""
    found = [sample for schema in schemas_of(grammar) for sample in pattern_samples(schema)]
    return _endings([json.dumps(sample, ensure_ascii=False)[1:-1] for sample in found])


def _unescaped(match: re.Match[str]) -> str:
    """An escape's character; all that is not escaped may be of any script."""
    if match[0][1] not in "abfnrtvuUx":
        return match[0][1:]
    return match[0].encode("ascii", "replace").decode("unicode_escape", "replace")


@functools.lru_cache(4096)
def samples(pattern: str) -> Sequence[str]:
    """Short texts that `pattern` matches, up to what look-around and the like would add: a shortest one for each of its
    alternatives. None where it is not readable."""
    try:
        found = itertools.islice(_variants(sre.parse(pattern)), MAX_SAMPLES)
        return tuple(dict.fromkeys(text for text in found if text))
    except Exception:  # another dialect, too deep, too large: a hint less
        return ()


def _endings(texts: Sequence[str]) -> list[str]:
    """`texts`, then what may be missing after their beginnings."""
    return [*texts, *(ending for text in texts for ending in suffixes(text))]


def suffixes(text: str) -> list[str]:
    """Endings that may be left after a beginning of `text`, longest first: all but a few letters, or the last few."""
    few = range(min(len(text), MAX_SUFFIXES))
    begun = [text[start:] for start in few] if len(text) <= MAX_BEGUN else []
    return [*begun, *(text[-MAX_SUFFIXES:][start:] for start in few)]


def pattern_samples(schema: Any) -> Iterator[str]:
    """Samples of every pattern in a schema, in its order."""
    for _, node in subschemas(schema):
        for pattern in (node.get("pattern"), *(node.get("patternProperties") or ())):
            if isinstance(pattern, str):
                yield from samples(pattern)
        if isinstance(node.get("allOf"), list):  # one after the other they may match all at once
            parts = [part.get("pattern") for part in node["allOf"] if isinstance(part, dict)]
            yield "".join(text for part in parts if isinstance(part, str) for text in samples(part)[:1])


def _variants(parsed: Any) -> Iterator[str]:
    """The shortest text, then one for each alternative anywhere, the rest being shortest."""
    yield _shortest(parsed)
    items = list(parsed)
    for index, (operator, argument) in enumerate(items):
        inner: list[Any] = []
        match str(operator):
            case "BRANCH":
                inner = list(argument[1])
            case "SUBPATTERN":
                inner = [argument[-1]]
            case "ATOMIC_GROUP":
                inner = [argument]
            case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
                inner = [argument[-1]] if argument[1] else []
        if inner:
            before, after = _shortest(items[:index]), _shortest(items[index + 1 :])
            yield from (before + text + after for part in inner for text in _variants(part))


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
    for char in _PRINTABLE:
        if any(_holds(item, char) for item in items[negated:]) != negated:
            return char
    operator, argument = items[negated]
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
