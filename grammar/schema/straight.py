"""Schemas that llguidance's own JSON compiler reads as we do, in a third of the time that our rules take. Our rules for
them are made only when an output comes near to its budget; how near is a bound on bytes, computed here.

That compiler does not limit digits and brackets: `json_limits` takes those beyond a limit out of its masks.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from typing import Any, NamedTuple

from llguidance import LLMatcher

from asyncengine.grammar.lark import literal
from asyncengine.grammar.limits import PatternLimits
from asyncengine.grammar.regexes import looks_ahead
from asyncengine.grammar.schema.numbers import KEYWORDS, SAFE
from asyncengine.grammar.schema.one_of import Branches
from asyncengine.grammar.schema.rules import MAX_NESTING
from asyncengine.grammar.schema.terms import Entry
from asyncengine.grammar.schemas import TABLES, resolve
from asyncengine.grammar.shapes.nodes import span
from asyncengine.grammar.vocabulary import UNREACHABLE

MAX_LEAST = 1000
"""Largest minimum of lengths and items, and most characters of a pattern's shortest match. Beyond it a schema may be
too large for the library, which shows at the masks that are made when rules are compiled, and not here."""
MAX_SIZE, MAX_WIDTH = 4000, 200
"""Most schemas and properties in one document, whose rules, perhaps made after outputs have begun, then stay far within
the limits of `rules.Rules`; and most that may come at one position: the library follows 2,000 Earley items, about four
for each."""
_LETTER, _SEPARATORS, _KEY = 6, 4, 12
"""Most bytes left of a character or an escape, around a key or an item, and of an undeclared key."""
_ASCII = re.compile(r"(?:[ -Z^-~\]]|\[(?!\^)|\\[^0-9cfnprtuvxP])*")
"""Patterns each class of which has a printable character of ASCII."""
_USUAL = span(32, 126) | span(0x80, 0xBF)
"""Bytes (bit b: byte b) that completing an output may need: printable ASCII, and the rest of a character that has
begun."""
_ALL = _USUAL | span(0xC2, 0xF0)
"""The same with the first bytes of characters, for schemas whose texts or patterns have others than ASCII. Unicode
assigns no character that begins with F1 or F2."""
_TAKEN = frozenset(TABLES["straight"]["taken"])
_RESTRICTING = frozenset([*_TAKEN, *TABLES["straight"]["others"], *KEYWORDS]).union(
    *TABLES["about"].values(), *TABLES["schemas"].values()
) - {*TABLES["about"]["nothing"], "$defs", "definitions"}
"""Keywords that restrict a value."""


class NotStraight(Exception):
    """The library's compiler may read the schema otherwise, or not at all. Never leaves the package."""


class Bounds(NamedTuple):
    """Bounds on bytes: of a value's shortest text, and of what completes one that has begun."""

    least: int
    left: int
    width: int = 1
    """Most members and alternatives that may come at one position."""

    @property
    def most(self) -> int:
        return self.left if self.least == UNREACHABLE else max(self.least, self.left)


_LOOP = Bounds(UNREACHABLE, 0)
"""The bounds of a schema that is met inside itself, while its own are being computed."""
_ANY = Bounds(1, MAX_NESTING + _KEY + _LETTER, 7)


def straight(schema: dict[str, Any], options: dict[str, Any], letters: int) -> tuple[str, int]:
    """(text for `LLMatcher`, most tokens that complete any output, or `UNREACHABLE`). `schema`: from `schema_object`;
    `letters`: the set of bytes that are tokens (bit b: byte b). Raises `NotStraight`, `RecursionError` and
    `GrammarTooLarge`."""
    reader = _Reader(schema)
    most = reader.of(schema).most
    if reader.loops:  # each of the open brackets may lack as much
        known = [bounds for bounds in reader.known.values() if bounds is not _LOOP]
        most = (MAX_NESTING + 1) * max(map(max, known or [_LOOP]))
    text = json.dumps(schema)
    needed = _ALL if '"pattern"' in text or "\\u" in text else _USUAL
    size = UNREACHABLE if needed & ~letters else min(UNREACHABLE, most)
    return str(LLMatcher.grammar_from_json_schema(text, overrides={**options, "coerce_one_of": True})), size


class _Reader:
    """Reads the schemas of one document, each once."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._branches = Branches(root)
        self.known: dict[int, Bounds] = {}
        self.loops = False
        """Some schema refers to itself."""
        self._size = 0

    def of(self, schema: Any) -> Bounds:
        if schema is True:
            return _ANY
        if not isinstance(schema, dict):
            raise NotStraight
        if id(schema) not in self.known:
            if self._size > MAX_SIZE:
                raise NotStraight
            self.known[id(schema)] = _LOOP
            self._size += 1
            self.known[id(schema)] = self._read(schema)
        self.loops |= (bounds := self.known[id(schema)]) is _LOOP
        return bounds

    def _read(self, schema: dict[str, Any]) -> Bounds:
        restricting = _RESTRICTING.intersection(schema)
        if not restricting <= _TAKEN:
            raise NotStraight
        if not restricting.isdisjoint(("$ref", "anyOf", "oneOf")):
            chosen = [schema] if "$ref" in restricting else _list(schema.get("anyOf", schema.get("oneOf")))
            entries = [Entry(f"{id(schema)}/{i}", one) for i, one in enumerate(chosen) if "oneOf" in restricting]
            if not all(map(self._branches.is_empty, itertools.combinations(entries, 2))):
                raise NotStraight  # a value may be valid under two
            targets = [resolve(self._root, one) for one in chosen]
            if all(isinstance(one, dict) and one.get("type") == schema.get("type") for one in targets):
                restricting -= {"type"}
            if len(restricting) > 1:
                raise NotStraight
            return self.of(targets[0]) if "$ref" in restricting else _any_of([self.of(one) for one in chosen])
        types = schema.get("type", [*TABLES["types"]])
        if "enum" not in restricting and "const" not in restricting:
            names = _list([types] if isinstance(types, str) else types)
            return _any_of([self._of_type(name, schema) for name in names])
        values = _list(schema["enum"]) if "enum" in restricting else [schema["const"]]
        numbers = [value for value in values if not isinstance(value, str | bool | None)]
        if len(restricting - {"type"}) > 1 or any(not isinstance(one, int) or abs(one) >= SAFE for one in numbers):
            raise NotStraight
        sizes = [_encoded_size(value) for value in values]
        return Bounds(min(sizes), max(sizes))

    def _of_type(self, name: str, schema: dict[str, Any]) -> Bounds:
        match name:
            case "null" | "boolean":
                return Bounds(4, 4)
            case "number" | "integer":
                return _number(schema, name == "integer")
            case "string":
                return _string(schema)
            case "array":
                if "additionalItems" in schema and isinstance(schema.get("items"), list):
                    raise NotStraight
                item = self.of(schema.get("items", True))
                least = 2 + _fewest(schema, "minItems") * (item.least + _SEPARATORS)
                return Bounds(least, least + _SEPARATORS + item.most, item.width)
            case "object":
                return self._object(schema)
        raise NotStraight

    def _object(self, schema: dict[str, Any]) -> Bounds:
        declared, required = schema.get("properties", {}), schema.get("required", [])
        additional = schema.get("additionalProperties", True)
        keys = [*declared, *required] if isinstance(declared, dict) and isinstance(required, list) else [None]
        if not all(isinstance(key, str) and key.isprintable() for key in keys):  # others have several spellings
            raise NotStraight
        self._size += len(declared)
        undeclared = None if additional is False else self.of(additional)
        width = 1 + len(declared)
        least, member = 2, 0 if undeclared is None else _KEY + _SEPARATORS + undeclared.most
        for key in dict.fromkeys(keys):
            value, size = self.of(declared.get(key, additional)), _encoded_size(key) + _SEPARATORS
            least += size + value.least if key in required else 0
            member, width = max(member, size + value.most), max(width, value.width)
        return Bounds(least, least + member, width)


def _number(schema: dict[str, Any], is_integer: bool) -> Bounds:
    bounds = [schema[key] for key in KEYWORDS if key in schema]
    if not all(type(bound) in ((int,) if is_integer else (int, float)) and abs(bound) < SAFE for bound in bounds):
        raise NotStraight
    if bounds and not is_integer:  # exclusive bounds, "-0", zeros behind the last number are read otherwise
        low, high = schema.get("minimum", -1), schema.get("maximum", SAFE)
        is_plain = 0 <= low < high == int(high) and (low == int(low) or low >= 1e-4)
        if not is_plain or len(bounds) != ("minimum" in schema) + ("maximum" in schema):
            raise NotStraight
    digits = max([1, *(len(str(bound)) + 1 for bound in bounds)])
    return Bounds(digits, digits)


def _string(schema: dict[str, Any]) -> Bounds:
    least = _fewest(schema, "minLength")
    if "pattern" in schema:
        letters, most = _pattern_bounds(schema["pattern"])
        least = (least + letters) * most
    return Bounds(2 + least, 2 + least + _LETTER)


@functools.lru_cache(1024)
def _pattern_bounds(pattern: Any) -> tuple[int, int]:
    """(most characters from any position in a pattern to its end, most bytes of each)."""
    if not isinstance(pattern, str) or looks_ahead(pattern):
        raise NotStraight
    if (letters := PatternLimits(len(pattern), len(pattern)).pattern(pattern, fewest=1)) > MAX_LEAST:
        raise NotStraight
    return letters, 2 if _ASCII.fullmatch(pattern) else _LETTER


def _fewest(schema: dict[str, Any], key: str) -> int:
    least = schema.get(key, 0)
    if type(least) is not int or not 0 <= least <= MAX_LEAST:
        raise NotStraight
    return least


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise NotStraight
    return value


def _any_of(branches: list[Bounds]) -> Bounds:
    width = sum(branch.width for branch in branches)
    if width > MAX_WIDTH:
        raise NotStraight
    return Bounds(min(branch.least for branch in branches), max(branch.most for branch in branches), width)


def _encoded_size(value: Any) -> int:
    return len((literal(value) if isinstance(value, str) else json.dumps(value)).encode("utf-8", "replace"))
