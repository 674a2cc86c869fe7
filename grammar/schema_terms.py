"""A schema, or several that must all hold, as alternatives without applicators: references followed, choices spread.

Schemas are addressed by JSON pointer, so that what must hold of a child (one pointer for each schema that speaks of it)
has a name, and a recursive schema comes to an end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

from asyncengine.errors import GrammarError, GrammarTooLarge, GrammarUnsupported
from asyncengine.grammar.numbers import KEYWORDS, Numbers, exact, number_text, of_schema
from asyncengine.grammar.schemas import resolve

MAX_TERMS = 4096
"""Alternatives of one place: a conjunction of choices multiplies them."""
MAX_WORK = 200_000
"""Schemas looked at in one document, counted again in every alternative that they are part of; under a second."""
ALL_TYPES = ("null", "boolean", "integer", "fraction", "string", "array", "object")


class Entry(NamedTuple):
    """One schema that must hold, and where it stands."""

    pointer: str
    schema: Any
    numbers: Numbers | None = None
    """A list of numbers in place of a schema."""
    plain: bool = False
    """Made here, without applicators: its "enum" holds strings or Booleans and is taken as it is."""


Conjunction = tuple[Entry, ...]


class Term(NamedTuple):
    """Schemas that must all hold, their applicators already dealt with."""

    entries: Conjunction

    @property
    def types(self) -> list[str]:
        """Types that are left of `ALL_TYPES`: "fraction" are numbers that are not whole."""
        found = list(ALL_TYPES)
        for entry in self.entries:
            if "type" in entry.schema:
                names = _types(entry)
                found = [name for name in found if name in names]
        return found

    def numbers(self) -> Numbers:
        """Numbers that all of them allow."""
        found = Numbers(integer="fraction" not in self.types)
        for entry in self.entries:
            found = found.meet(entry.numbers or of_schema(entry.schema, entry.pointer))
        return found

    def where(self) -> str:
        """The pointer of the schema that speaks of numbers last."""
        return next((e.pointer for e in reversed(self.entries) if any(key in e.schema for key in KEYWORDS)), "")

    def having(self, *keywords: str) -> list[Entry]:
        return [entry for entry in self.entries if any(keyword in entry.schema for keyword in keywords)]


class Alternatives:
    """Spreads the choices of one document's schemas, with a bound on the work that all of them together may be.

    `oneOf` is read as `anyOf`: that its branches exclude one another has been checked.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._work = 0

    def of(self, conjunction: Sequence[Entry]) -> list[Term]:
        """In the order of the schema; together they mean what `conjunction` does.

        Raises `GrammarTooLarge` beyond `MAX_TERMS` and `MAX_WORK`, `GrammarUnsupported` for a reference that leads out
        of the document, `GrammarError` for a malformed schema.
        """
        found: list[Term] = []
        stack: list[tuple[list[Entry | list[Entry]], Conjunction]] = [(list(conjunction), ())]
        while stack:
            todo, done = stack.pop()
            dead = False
            while todo and not dead:
                item = todo.pop(0)
                self._count(item, done)
                if isinstance(item, list):
                    stack.extend(([option, *todo], done) for option in reversed(item))
                    dead = True
                elif item.schema is False:
                    dead = True
                elif item.schema is not True and item.pointer not in [entry.pointer for entry in done]:
                    done = (*done, item)
                    todo[:0] = list(_applied(self._root, item))
            if not dead:
                found.append(Term(done))
        if len(found) > MAX_TERMS:
            raise GrammarTooLarge("grammar", f"a conjunction of choices must not exceed {MAX_TERMS} alternatives")
        return found

    def _count(self, item: Entry | list[Entry], done: Conjunction) -> None:
        self._work += len(item) + len(done) // 16 if isinstance(item, list) else 1 + len(done) // 16
        if self._work > MAX_WORK:
            raise GrammarTooLarge("grammar", f"its choices and conjunctions must not exceed {MAX_WORK} combinations")
        if isinstance(item, Entry) and not isinstance(item.schema, (bool, dict)):
            raise GrammarError("grammar", f"the schema at {item.pointer or '/'} must be an object", item.schema)


def _applied(root: dict[str, Any], entry: Entry) -> Iterator[Entry | list[Entry]]:
    """Schemas that the applicators of a schema add: those that must hold too, and choices among schemas."""
    pointer, schema = entry.pointer, entry.schema
    if entry.plain:
        return
    for key, value in schema.items():
        if key == "$ref":
            target = resolve(root, schema)
            if not isinstance(target, (dict, bool)):
                raise GrammarUnsupported("grammar", [("$ref", f"{pointer}/$ref")], "leads nowhere in the schema")
            yield Entry(unquote(value.removeprefix("#")), target)
        elif key in ("allOf", "anyOf", "oneOf"):
            if not isinstance(value, list) or not value:
                raise GrammarError("grammar", f"{key} at {pointer or '/'} must be a list with at least one schema")
            members = [Entry(f"{pointer}/{key}/{index}", member) for index, member in enumerate(value)]
            if key == "allOf":
                yield from members
            else:
                yield members
        elif key == "const":
            yield _values(f"{pointer}/const", [value])
        elif key == "enum":
            if not isinstance(value, list):
                raise GrammarError("grammar", f"enum at {pointer or '/'} must be a list", value)
            yield _values(f"{pointer}/enum", value)


def _values(pointer: str, values: list[Any]) -> list[Entry]:
    """A choice: the strings together, the numbers together, anything else one by one."""
    strings = [value for value in values if isinstance(value, str)]
    numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
    found = []
    if strings:
        found.append(Entry(f"{pointer}/strings", {"type": "string", "enum": strings}, plain=True))
    if numbers:
        listed = {exact(value, pointer): number_text(value) for value in numbers}
        found.append(Entry(f"{pointer}/numbers", {"type": "number"}, Numbers(listed=tuple(listed.items())), True))
    for index, value in enumerate(values):
        at = f"{pointer}/{index}"
        if value is None:
            found.append(Entry(at, {"type": "null"}, plain=True))
        elif isinstance(value, bool):
            found.append(Entry(at, {"type": "boolean", "enum": [value]}, plain=True))
        elif isinstance(value, (list, dict)):
            found.append(Entry(at, _structure(value)))
    return found


def _structure(value: list[Any] | dict[str, Any]) -> dict[str, Any]:
    """A schema that only `value` satisfies, one level deep; below it says `const`."""
    if isinstance(value, list):
        items = [{"const": item} for item in value]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items), "maxItems": len(items)}
    properties = {name: {"const": item} for name, item in value.items()}
    return {"type": "object", "properties": properties, "required": list(value), "additionalProperties": False}


def _types(entry: Entry) -> list[str]:
    value = entry.schema["type"]
    names = value if isinstance(value, list) else [value]
    for name in names:
        if name not in (*ALL_TYPES, "number") or name == "fraction":
            raise GrammarError("grammar", f"type at {entry.pointer or '/'} is none of JSON's", name)
    return [*names, "integer", "fraction"] if "number" in names else names
