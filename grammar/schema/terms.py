"""A schema, or several that must all hold, as alternatives without applicators: references followed, choices spread.

Schemas are addressed by JSON pointer, so that what must hold of a child (one pointer for each schema that speaks of it)
has a name, and a recursive schema comes to an end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from urllib.parse import unquote

from asyncengine.errors import GrammarError, GrammarTooLarge, GrammarUnsupported
from asyncengine.grammar.schema.complements import ALL_TYPES, NoOpposite, is_number, opposites, structure
from asyncengine.grammar.schema.numbers import KEYWORDS, Numbers, exact, number_text, of_schema
from asyncengine.grammar.schema.rules import Checkpoint, proceed
from asyncengine.grammar.schemas import TABLES, escape, resolve

_BOUNDS = frozenset(KEYWORDS)
MAX_TERMS = 4096
"""Alternatives of one place: a conjunction of choices multiplies them."""
MAX_WORK = 200_000
"""Schemas looked at in one document, counted again in every alternative that they are part of; three
seconds at worst."""
MADE = "\0"
"""Behind it in a pointer stands what was made of the schema that it leads to. No name in a schema has it."""
_KINDS: dict[str, tuple[type, ...]] = {
    "an object": (dict,),
    "a schema": (dict, bool),
    "a list": (list,),
    "a string": (str,),
}
_VALUES = {key: kind for kind, keys in TABLES["values"].items() for key in keys}
"""The kinds of keywords' values. Read only."""


class Entry(NamedTuple):
    """One schema that must hold, and where it stands."""

    pointer: str
    schema: Any
    numbers: Numbers | None = None
    """A list of numbers in place of a schema."""
    plain: bool = False
    """Made here, without applicators: its "enum" holds strings or Booleans and is taken as it is, and its "not" has a
    "pattern" or "enum" of strings."""

    @property
    def place(self) -> str:
        """The pointer in the document."""
        return self.pointer.partition(MADE)[0]


Conjunction = tuple[Entry, ...]


class Term(NamedTuple):
    """Schemas that must all hold, their applicators already dealt with."""

    entries: Conjunction
    loops: bool = False
    """They lead to one of themselves."""
    types: tuple[str, ...] = ALL_TYPES
    """Types that are left: "fraction" are numbers that are not whole."""

    def also(self, entry: Entry) -> Term:
        names = _types(entry) if "type" in entry.schema else self.types
        types = self.types if names is self.types else tuple(name for name in self.types if name in names)
        return Term((*self.entries, entry), self.loops, types)

    def numbers(self) -> Numbers:
        """Numbers that all of them allow."""
        found = Numbers(integer="fraction" not in self.types)
        for entry in self.entries:
            if entry.numbers is not None or not _BOUNDS.isdisjoint(entry.schema):
                found = found.meet(entry.numbers or of_schema(entry.schema, entry.place))
        if found.listed is not None and "integer" not in self.types:
            found = replace(found, listed=tuple(item for item in found.listed if item[0].denominator != 1))
        return found

    def where(self) -> str:
        """The pointer of the schema that speaks of numbers last."""
        return next((e.pointer for e in reversed(self.entries) if not _BOUNDS.isdisjoint(e.schema)), "")

    def having(self, *keywords: str) -> list[Entry]:
        wanted = frozenset(keywords)
        return [entry for entry in self.entries if not wanted.isdisjoint(entry.schema)]


class Rest(NamedTuple):
    """An `unevaluatedItems` or `unevaluatedProperties` on its way behind all that its schema applies: `entry`, which is
    number `begin` of those done."""

    entry: Entry
    begin: int

    def made(self, done: Conjunction) -> Iterator[Entry]:
        """The demands on the rest, given all that evaluates items and properties. Branches that may hold besides the
        one taken are not looked at: a little less is allowed than might be."""
        own = [one for one in done[self.begin :] if "/not" not in one.pointer.removeprefix(self.entry.pointer)]
        width = max(len(one.schema.get("prefixItems", ())) for one in own)
        names = {kind: {key: True for one in own for key in one.schema.get(kind, ())} for kind in _NAMED}
        for key, others, said in (
            ("unevaluatedProperties", "additionalProperties", names),
            ("unevaluatedItems", "items", {"prefixItems": [True] * width}),
        ):
            all_said = any(others in one.schema for one in own) or any(key in one.schema for one in own[1:])
            if key in self.entry.schema and not all_said:
                at = f"{self.entry.pointer}/{key}{MADE}{'+'.join(one.pointer for one in own)}"
                yield Entry(at, {**said, others: self.entry.schema[key]})


Todo = list["Entry | list[Entry] | Rest"]


class Alternatives:
    """Spreads the choices of one document's schemas, with a bound on the work that all of them together may be.

    `branches`: what of a schema's `oneOf` remains when no two of its branches hold; None: it is read as `anyOf`, and
    what has no opposite is left out, so that more is allowed. `is_empty`: proves that no value is valid under several
    schemas.
    """

    def __init__(
        self, root: dict[str, Any], branches: Callable[[Entry], list[Entry]] | None = None,
        is_empty: Callable[[Conjunction], bool] | None = None, checkpoint: Checkpoint = proceed,
    ) -> None:  # fmt: skip
        self._root = root
        self._branches = branches
        self._is_empty = is_empty
        self._own: dict[str, Entry] = {}
        """The parts of schemas that no applicator adds, by their pointers."""
        self._work = 0
        self._checkpoint = checkpoint

    def of(self, conjunction: Sequence[Entry]) -> list[Term]:
        """In the order of the schema; together they mean what `conjunction` does.

        Raises `GrammarTooLarge` beyond `MAX_TERMS` and `MAX_WORK`, `GrammarUnsupported` for a reference that leads out
        of the document and what has no opposite, `GrammarError` for a malformed schema.
        """
        found: list[Term] = []
        stack: list[tuple[Todo, Term]] = [(list(conjunction), Term(()))]
        while stack:
            todo, term = stack.pop()
            dead = loops = False
            while todo and not dead:
                item, done = todo.pop(0), term.entries
                self._count(item, done)
                if isinstance(item, Rest):
                    todo[:0] = item.made(done)
                elif isinstance(item, list):
                    stack.extend(([option, *todo], term) for option in reversed(item))
                    dead = True
                elif item.schema is False:
                    dead = True
                elif item.pointer in [entry.pointer for entry in done]:
                    loops = True
                elif item.schema is not True:
                    term = term.also(item)
                    dead = self._contradicts(term)
                    if not item.plain and not dead:
                        if "not" in item.schema and self._apart(term.entries, item):
                            item = Entry(item.pointer, {key: said for key, said in item.schema.items() if key != "not"})
                        rest = [Rest(item, len(done))] if any(key in item.schema for key in UNEVALUATED) else []
                        todo[:0] = [*self._applied(item), *rest]
            if not dead:
                found.append(term._replace(loops=loops))
                if len(found) > MAX_TERMS:  # at once: what is left may be a thousand times as much
                    limit = f"a conjunction of choices must not exceed {MAX_TERMS} alternatives"
                    raise GrammarTooLarge("grammar", limit)
        return found

    def followed(self, entry: Entry) -> Entry:
        """The schema that one stands for which is but a reference."""
        seen: list[str] = []
        while isinstance(entry.schema, dict) and "$ref" in entry.schema and entry.pointer not in seen:
            if any(key not in TABLES["about"]["nothing"] for key in entry.schema if key != "$ref"):
                break
            _check(entry)
            seen.append(entry.pointer)
            entry = self._target(entry.pointer, entry.schema)
        return entry

    def _count(self, item: Entry | list[Entry] | Rest, done: Conjunction) -> None:
        self._checkpoint()
        self._work += len(item) + len(done) // 8 if isinstance(item, list) else 1 + len(done) // 8
        if self._work > MAX_WORK:
            raise GrammarTooLarge("grammar", f"its choices and conjunctions must not exceed {MAX_WORK} combinations")
        if isinstance(item, Entry) and not isinstance(item.schema, bool):
            _check(item)

    def _contradicts(self, term: Term) -> bool:
        """No value is valid under the last entry and those before, as far as can be told at once."""
        done, last = term.entries, term.entries[-1]
        if MADE in last.pointer and not {*term.types} - {"integer", "fraction"}:
            numbers = term.numbers()
            return numbers.low is not None and numbers.high is not None and numbers.empty
        if term.types != ("object",) or len(done) == 1 or self._is_empty is None:
            return "type" in last.schema and not term.types
        needed = {name for entry in done for name in entry.schema.get("required", ())}
        for name in needed & {*last.schema.get("required", ()), *last.schema.get("properties", ())}:
            said = [
                Entry(f"{entry.pointer}/properties/{escape(name)}", entry.schema["properties"][name])
                if name in entry.schema.get("properties", ())
                else Entry(f"{entry.pointer}/additionalProperties", entry.schema.get("additionalProperties", True))
                for entry in done
                if "patternProperties" not in entry.schema
            ]
            said = [entry for entry in said if entry.schema is not True]
            said_more = said[1:] or any(not isinstance(one.schema, dict) or "not" in one.schema for one in said)
            if said_more and self._is_empty(tuple(said)):
                return True
        return False

    def _apart(self, done: Conjunction, entry: Entry) -> bool:
        """Whether what `entry` excludes is proved to be excluded by the others."""
        if self._is_empty is None:
            return False
        for one in done:
            if one.pointer not in self._own:
                said = {
                    key: said for key, said in one.schema.items() if key in KEYWORDS or key in TABLES["about"]["own"]
                }
                self._own[one.pointer] = one if one.plain else Entry(f"{one.pointer}{MADE}own", said, plain=True)
        own = [self._own[one.pointer] for one in done]
        return self._is_empty((*own, self.followed(Entry(f"{entry.pointer}/not", entry.schema["not"]))))

    def _applied(self, entry: Entry) -> Iterator[Entry | list[Entry]]:
        """Schemas that the applicators of a schema add: those that must hold too, and choices among schemas."""
        pointer, schema = entry.pointer, entry.schema
        for key, value in schema.items():
            if key == "$ref":
                yield self._target(pointer, schema)
            elif key == "allOf":
                yield from _members(pointer, key, value)
            elif key == "anyOf" or (key == "oneOf" and self._branches is None):
                yield _members(pointer, key, value)
            elif key == "oneOf":
                assert self._branches is not None
                yield self._branches(entry)
            elif key in ("const", "enum"):
                yield _values(f"{pointer}/{key}", [value] if key == "const" else value)
            elif key == "not":
                yield from self._excluding(f"{pointer}/not", value)
            elif key == "if" and ("then" in schema or "else" in schema):
                both = {"allOf": [value, schema.get("then", True)]}
                neither = {"allOf": [{"not": value}, schema.get("else", True)]}
                yield [Entry(f"{pointer}/if{MADE}/then", both), Entry(f"{pointer}/if{MADE}/else", neither)]
            elif key in ("dependentRequired", "dependentSchemas", "dependencies"):
                for name, needed in value.items():
                    rest = {"required": needed} if isinstance(needed, list) else needed
                    at = f"{pointer}/{key}/{escape(name)}"
                    present = {"type": "object", "required": [name], "allOf": [rest]}
                    yield [Entry(f"{at}{MADE}0", {"properties": {name: False}}), Entry(at + MADE, present)]
            elif key in ("$dynamicRef", "$recursiveRef"):
                raise GrammarUnsupported("grammar", [(key, f"{entry.place}/{key}")])

    def _target(self, pointer: str, schema: dict[str, Any]) -> Entry:
        target, place = resolve(self._root, schema), pointer.partition(MADE)[0]
        if not isinstance(target, (dict, bool)):
            raise GrammarUnsupported("grammar", [("$ref", f"{place}/$ref")], "leads nowhere in the schema")
        return Entry(unquote(schema["$ref"].removeprefix("#")), target)

    def _excluding(self, pointer: str, schema: Any) -> Iterator[list[Entry]]:
        """The choice of what is not valid under `schema`."""
        if isinstance(schema, bool):
            yield [Entry(pointer, not schema)]
            return
        place, _, path = pointer.partition(MADE)
        _check(Entry(place, schema))
        found = []
        if "$ref" in schema:
            target = self._target(pointer, schema)
            found.append(Entry(f"{place}{MADE}#{target.pointer}", {"not": target.schema}))
        try:
            for index, (opposite, plain) in enumerate(opposites(schema)):
                found.append(Entry(f"{place}{MADE}{path}/{index}", opposite, plain=plain))
        except NoOpposite as keyword:
            if self._branches is None:
                return
            parts = place.split("/")
            last = next(
                (at for at in range(len(parts) - 1, 0, -1) if parts[at] in TABLES["about"]["negated"]), len(parts) - 1
            )
            detail = f"needs the opposite of {keyword}, which is not enforced"
            raise GrammarUnsupported("grammar", [(parts[last], "/".join(parts[: last + 1]))], detail) from None
        yield found


_NAMED = ("properties", "patternProperties")
UNEVALUATED = ("unevaluatedProperties", "unevaluatedItems")


def _members(pointer: str, key: str, value: Any) -> list[Entry]:
    if not isinstance(value, list) or not value:
        raise GrammarError("grammar", f"{key} at {pointer or '/'} must be a list with at least one schema")
    return [Entry(f"{pointer}/{key}/{index}", member) for index, member in enumerate(value)]


def _check(entry: Entry) -> None:
    """Refuse what is no schema, or has a keyword of another kind than JSON Schema says."""
    schema, at = entry.schema, entry.place or "/"
    if not isinstance(schema, dict):
        raise GrammarError("grammar", f"the schema at {at} must be an object", schema)
    for key in schema.keys() & _VALUES.keys():
        kind = _VALUES[key]
        if not isinstance(schema[key], _KINDS[kind]) and not (entry.plain and key == "not"):
            raise GrammarError("grammar", f"{key} at {at} must be {kind}", schema[key])
    for key, names in [("required", schema.get("required", [])), *schema.get("dependentRequired", {}).items()]:
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise GrammarError("grammar", f"{key} at {at} must be a list of names", names)


def _values(pointer: str, values: list[Any]) -> list[Entry]:
    """A choice: the strings together, the numbers together, anything else one by one."""
    strings = [value for value in values if isinstance(value, str)]
    numbers = [value for value in values if is_number(value)]
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
            found.append(Entry(at, structure(value)))
    return found


def _types(entry: Entry) -> list[str]:
    value = entry.schema["type"]
    names = value if isinstance(value, list) else [value]
    for name in names:
        if name not in (*ALL_TYPES, "number") or (name == "fraction" and not entry.plain):
            raise GrammarError("grammar", f"{entry.place}/type is none of JSON's", name)
    return [*names, "integer", "fraction"] if "number" in names else names
