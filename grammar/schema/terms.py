"""A schema, or a conjunction of several, in disjunctive normal form: references followed, choices spread.

Schemas are addressed by JSON pointer, so that the conjunction that holds for a child (one pointer for each schema that
mentions it) has a key, and a recursive schema comes to an end.
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
"""Most alternatives of one conjunction: its choices multiply them."""
MAX_WORK = 200_000
"""Schemas looked at in one document, counted again in every alternative that they are part of; three
seconds at worst."""
DERIVED = "\0"
"""Separates, in a pointer, the schema in the document from what was derived of it. No name in a schema has it."""
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "an object": (dict,),
    "a schema": (dict, bool),
    "a list": (list,),
    "a string": (str,),
}
_VALUE_TYPES = {key: kind for kind, keys in TABLES["values"].items() for key in keys}
"""The type that each keyword's value must have, a key of `_PYTHON_TYPES`. Read only."""


class Entry(NamedTuple):
    """One schema that must hold, with its JSON pointer."""

    pointer: str
    schema: Any
    numbers: Numbers | None = None
    """A list of numbers in place of a schema."""
    plain: bool = False
    """Derived here, without applicators: its "enum" lists strings or Booleans and is not expanded, and its "not" has a
    "pattern" or an "enum" of strings."""

    @property
    def location(self) -> str:
        """The pointer in the document."""
        return self.pointer.partition(DERIVED)[0]


Conjunction = tuple[Entry, ...]


class Term(NamedTuple):
    """A conjunction of schemas whose applicators have been expanded."""

    entries: Conjunction
    loops: bool = False
    """One of them applies one of them again."""
    types: tuple[str, ...] = ALL_TYPES
    """The JSON types that are left; "fraction" is a number that is not whole."""

    def also(self, entry: Entry) -> Term:
        names = _types(entry) if "type" in entry.schema else self.types
        types = self.types if names is self.types else tuple(name for name in self.types if name in names)
        return Term((*self.entries, entry), self.loops, types)

    def numbers(self) -> Numbers:
        """The numbers that all of them allow."""
        numbers = Numbers(integer="fraction" not in self.types)
        for entry in self.entries:
            if entry.numbers is not None or not _BOUNDS.isdisjoint(entry.schema):
                numbers = numbers.meet(entry.numbers or of_schema(entry.schema, entry.location))
        if numbers.listed is not None and "integer" not in self.types:
            numbers = replace(numbers, listed=tuple(item for item in numbers.listed if item[0].denominator != 1))
        return numbers

    def where(self) -> str:
        """The pointer of the last schema with a keyword for numbers."""
        return next((e.pointer for e in reversed(self.entries) if not _BOUNDS.isdisjoint(e.schema)), "")

    def having(self, *keywords: str) -> list[Entry]:
        wanted = frozenset(keywords)
        return [entry for entry in self.entries if not wanted.isdisjoint(entry.schema)]


class Unevaluated(NamedTuple):
    """The `unevaluatedItems` or `unevaluatedProperties` of `entry`, to be expanded after all that its schema applies,
    which are the entries from number `begin` on."""

    entry: Entry
    begin: int

    def entries(self, done: Conjunction) -> Iterator[Entry]:
        """The schemas of unevaluated items and properties, given the entries that evaluate the others. Branches that
        may hold besides the chosen one are not looked at, so that a little less is allowed than might be."""
        applied = [one for one in done[self.begin :] if "/not" not in one.pointer.removeprefix(self.entry.pointer)]
        width = max(len(one.schema.get("prefixItems", ())) for one in applied)
        names = {keyword: {key: True for one in applied for key in one.schema.get(keyword, ())} for keyword in _NAMED}
        for key, rest, evaluated in (
            ("unevaluatedProperties", "additionalProperties", names),
            ("unevaluatedItems", "items", {"prefixItems": [True] * width}),
        ):
            all_evaluated = any(rest in one.schema for one in applied) or any(key in one.schema for one in applied[1:])
            if key in self.entry.schema and not all_evaluated:
                pointer = f"{self.entry.pointer}/{key}{DERIVED}{'+'.join(one.pointer for one in applied)}"
                yield Entry(pointer, {**evaluated, rest: self.entry.schema[key]})


Pending = list["Entry | list[Entry] | Unevaluated"]


class Alternatives:
    """Spreads the choices of one document's schemas, with a bound on the work of all of them together.

    `branches`: the branches of a schema's `oneOf`, made exclusive; None: `oneOf` is read as `anyOf`, and a `not` that
    cannot be written is left out: more is allowed. `is_empty`: proves that no value is valid under several schemas.
    """

    def __init__(
        self, root: dict[str, Any], branches: Callable[[Entry], list[Entry]] | None = None,
        is_empty: Callable[[Conjunction], bool] | None = None, checkpoint: Checkpoint = proceed,
    ) -> None:  # fmt: skip
        self._root = root
        self._branches = branches
        self._is_empty = is_empty
        self._plain_parts: dict[str, Entry] = {}
        """Schemas without their applicators, by the pointer of the whole schema."""
        self._work = 0
        self._checkpoint = checkpoint

    def of(self, conjunction: Sequence[Entry]) -> list[Term]:
        """The terms whose union is what `conjunction` allows, in the order of the schema.

        Raises `GrammarTooLarge` beyond `MAX_TERMS` and `MAX_WORK`, `GrammarUnsupported` for a reference that leads out
        of the document and a negation that cannot be written, `GrammarError` for a malformed schema.
        """
        terms: list[Term] = []
        stack: list[tuple[Pending, Term]] = [(list(conjunction), Term(()))]
        while stack:
            pending, term = stack.pop()
            impossible = loops = False
            while pending and not impossible:
                item, entries = pending.pop(0), term.entries
                self._count_work(item, entries)
                if isinstance(item, Unevaluated):
                    pending[:0] = item.entries(entries)
                elif isinstance(item, list):
                    stack.extend(([option, *pending], term) for option in reversed(item))
                    impossible = True
                elif item.schema is False:
                    impossible = True
                elif item.pointer in [entry.pointer for entry in entries]:
                    loops = True
                elif item.schema is not True:
                    term = term.also(item)
                    impossible = self._contradicts(term)
                    if not item.plain and not impossible:
                        if "not" in item.schema and self._is_excluded_already(term.entries, item):
                            item = Entry(item.pointer, {k: v for k, v in item.schema.items() if k != "not"})
                        rest = [Unevaluated(item, len(entries))] if item.schema.keys() & {*UNEVALUATED} else []
                        pending[:0] = [*self._applied(item), *rest]
            if not impossible:
                terms.append(term._replace(loops=loops))
                if len(terms) > MAX_TERMS:  # at once: what is left may be a thousand times as much
                    limit = f"a conjunction of choices must not exceed {MAX_TERMS} alternatives"
                    raise GrammarTooLarge("grammar", limit)
        return terms

    def followed(self, entry: Entry) -> Entry:
        """The target of a schema that is nothing but a reference; any other schema itself."""
        seen: list[str] = []
        while isinstance(entry.schema, dict) and "$ref" in entry.schema and entry.pointer not in seen:
            if any(key not in TABLES["about"]["nothing"] for key in entry.schema if key != "$ref"):
                break
            _check(entry)
            seen.append(entry.pointer)
            entry = self._target(entry.pointer, entry.schema)
        return entry

    def _count_work(self, item: Entry | list[Entry] | Unevaluated, entries: Conjunction) -> None:
        self._checkpoint()
        self._work += len(item) + len(entries) // 8 if isinstance(item, list) else 1 + len(entries) // 8
        if self._work > MAX_WORK:
            raise GrammarTooLarge("grammar", f"its choices and conjunctions must not exceed {MAX_WORK} combinations")
        if isinstance(item, Entry) and not isinstance(item.schema, bool):
            _check(item)

    def _contradicts(self, term: Term) -> bool:
        """Whether a quick check proves that no value is valid under all entries. Only the last is new to it."""
        entries, last = term.entries, term.entries[-1]
        if DERIVED in last.pointer and not {*term.types} - {"integer", "fraction"}:
            numbers = term.numbers()
            return numbers.low is not None and numbers.high is not None and numbers.empty
        if term.types != ("object",) or len(entries) == 1 or self._is_empty is None:
            return "type" in last.schema and not term.types
        needed = {name for entry in entries for name in entry.schema.get("required", ())}
        for name in needed & {*last.schema.get("required", ()), *last.schema.get("properties", ())}:
            children = [
                Entry(f"{entry.pointer}/properties/{escape(name)}", entry.schema["properties"][name])
                if name in entry.schema.get("properties", ())
                else Entry(f"{entry.pointer}/additionalProperties", entry.schema.get("additionalProperties", True))
                for entry in entries
                if "patternProperties" not in entry.schema
            ]
            children = [entry for entry in children if entry.schema is not True]
            restricted = children[1:] or any(not isinstance(e.schema, dict) or "not" in e.schema for e in children)
            if restricted and self._is_empty(tuple(children)):
                return True
        return False

    def _is_excluded_already(self, entries: Conjunction, entry: Entry) -> bool:
        """Whether the others provably exclude what the `not` of `entry` does: then that needs no alternatives."""
        if self._is_empty is None:
            return False
        for prior in entries:
            if prior.pointer not in self._plain_parts:
                kept = {k: v for k, v in prior.schema.items() if k in KEYWORDS or k in TABLES["about"]["own"]}
                entry_kept = Entry(f"{prior.pointer}{DERIVED}own", kept, plain=True)
                self._plain_parts[prior.pointer] = prior if prior.plain else entry_kept
        plain_parts = [self._plain_parts[prior.pointer] for prior in entries]
        return self._is_empty((*plain_parts, self.followed(Entry(f"{entry.pointer}/not", entry.schema["not"]))))

    def _applied(self, entry: Entry) -> Iterator[Entry | list[Entry]]:
        """The schemas that a schema applies: an entry must hold as well, of a list of entries one."""
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
                yield [Entry(f"{pointer}/if{DERIVED}/then", both), Entry(f"{pointer}/if{DERIVED}/else", neither)]
            elif key in ("dependentRequired", "dependentSchemas", "dependencies"):
                for name, needed in value.items():
                    rest = {"required": needed} if isinstance(needed, list) else needed
                    base = f"{pointer}/{key}/{escape(name)}"
                    present = {"type": "object", "required": [name], "allOf": [rest]}
                    yield [Entry(f"{base}{DERIVED}0", {"properties": {name: False}}), Entry(base + DERIVED, present)]
            elif key in ("$dynamicRef", "$recursiveRef"):
                raise GrammarUnsupported("grammar", [(key, f"{entry.location}/{key}")])

    def _target(self, pointer: str, schema: dict[str, Any]) -> Entry:
        target, location = resolve(self._root, schema), pointer.partition(DERIVED)[0]
        if not isinstance(target, (dict, bool)):
            raise GrammarUnsupported("grammar", [("$ref", f"{location}/$ref")], "leads nowhere in the schema")
        return Entry(unquote(schema["$ref"].removeprefix("#")), target)

    def _excluding(self, pointer: str, schema: Any) -> Iterator[list[Entry]]:
        """A choice that covers the values which are not valid under `schema`."""
        if isinstance(schema, bool):
            yield [Entry(pointer, not schema)]
            return
        location, _, suffix = pointer.partition(DERIVED)
        _check(Entry(location, schema))
        choice = []
        if "$ref" in schema:
            target = self._target(pointer, schema)
            choice.append(Entry(f"{location}{DERIVED}#{target.pointer}", {"not": target.schema}))
        try:
            for index, (opposite, plain) in enumerate(opposites(schema)):
                choice.append(Entry(f"{location}{DERIVED}{suffix}/{index}", opposite, plain=plain))
        except NoOpposite as keyword:
            if self._branches is None:
                return
            path = location.split("/")
            negating = (i for i, key in enumerate(path) if i and key in TABLES["about"]["negated"])
            last = max(negating, default=len(path) - 1)
            detail = f"needs the opposite of {keyword}, which is not enforced"
            raise GrammarUnsupported("grammar", [(path[last], "/".join(path[: last + 1]))], detail) from None
        yield choice


_NAMED = ("properties", "patternProperties")
UNEVALUATED = ("unevaluatedProperties", "unevaluatedItems")


def _members(pointer: str, key: str, value: Any) -> list[Entry]:
    if not isinstance(value, list) or not value:
        raise GrammarError("grammar", f"{key} at {pointer or '/'} must be a list with at least one schema")
    return [Entry(f"{pointer}/{key}/{index}", member) for index, member in enumerate(value)]


def _check(entry: Entry) -> None:
    """Raise `GrammarError` for a value that is no schema, or has a keyword with a value of the wrong type."""
    schema, location = entry.schema, entry.location or "/"
    if not isinstance(schema, dict):
        raise GrammarError("grammar", f"the schema at {location} must be an object", schema)
    for key in schema.keys() & _VALUE_TYPES.keys():
        expected = _VALUE_TYPES[key]
        if not isinstance(schema[key], _PYTHON_TYPES[expected]) and not (entry.plain and key == "not"):
            raise GrammarError("grammar", f"{key} at {location} must be {expected}", schema[key])
    for key, names in [("required", schema.get("required", [])), *schema.get("dependentRequired", {}).items()]:
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise GrammarError("grammar", f"{key} at {location} must be a list of names", names)


def _values(pointer: str, values: list[Any]) -> list[Entry]:
    """The choice that `enum` or `const` is: an entry for all strings, one for all numbers, one for each other value."""
    strings = [value for value in values if isinstance(value, str)]
    numbers = [value for value in values if is_number(value)]
    entries = []
    if strings:
        entries.append(Entry(f"{pointer}/strings", {"type": "string", "enum": strings}, plain=True))
    if numbers:
        listed = {exact(value, pointer): number_text(value) for value in numbers}
        entries.append(Entry(f"{pointer}/numbers", {"type": "number"}, Numbers(listed=tuple(listed.items())), True))
    for index, value in enumerate(values):
        entry_pointer = f"{pointer}/{index}"
        if value is None:
            entries.append(Entry(entry_pointer, {"type": "null"}, plain=True))
        elif isinstance(value, bool):
            entries.append(Entry(entry_pointer, {"type": "boolean", "enum": [value]}, plain=True))
        elif isinstance(value, (list, dict)):
            entries.append(Entry(entry_pointer, structure(value)))
    return entries


def _types(entry: Entry) -> list[str]:
    value = entry.schema["type"]
    names = value if isinstance(value, list) else [value]
    for name in names:
        if name not in (*ALL_TYPES, "number") or (name == "fraction" and not entry.plain):
            raise GrammarError("grammar", f"{entry.location}/type is none of JSON's", name)
    return [*names, "integer", "fraction"] if "number" in names else names
