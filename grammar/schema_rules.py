"""A JSON schema as Lark, whose numbers and nesting llguidance would not hold to.

llguidance 1.9.1 counts in doubles: bounds beyond 2**53 are rounded, exclusive decimal bounds are not kept, and the
least int64 makes it recurse without end. Numbers without bounds and values inside one another have no end with it. Its
JSON compiler takes no pattern for a number, so what surrounds the numbers is written here as well: objects, arrays,
choices, references. Strings stay `%json`.

As in its own compiler, properties come in the order of the schema, undeclared keys after them (they may repeat).
"""

from __future__ import annotations

import json
from typing import Any

from asyncengine.errors import GrammarImpossible, GrammarTooLarge, GrammarUnsupported
from asyncengine.grammar.canonical import canonical_json
from asyncengine.grammar.lark import literal, regex
from asyncengine.grammar.numbers import KEYWORDS
from asyncengine.grammar.rules import MAX_RULES, Repeat, Rules, Symbol
from asyncengine.grammar.schema_members import (
    KEY,
    PLAIN_KEY,
    additional,
    at,
    count_of,
    items_of,
    key_pattern,
    of_pattern,
    property_of,
)
from asyncengine.grammar.schema_terms import Alternatives, Conjunction, Entry, Term

STRING = ("minLength", "maxLength", "pattern", "format", "enum", "const")
ARRAY = ("items", "prefixItems", "additionalItems", "minItems", "maxItems")
OBJECT = (
    "properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties",
)  # fmt: skip
LEAF_OPTIONS = ("json_allowed_escapes", "json_allow_general_unicode_escapes", "lenient")
"""Options of llguidance that say something about a string."""
MAX_PREFIX = 100
"""Items with a schema of their own."""
Member = tuple[str, bool]
"""(rule of one member, or of all undeclared ones; needed)"""


def schema_grammar(schema: dict[str, Any], options: dict[str, Any]) -> tuple[Rules, str]:
    """Rules of the JSON values valid under `schema`, and the name of the one for the whole value; `options` as
    llguidance's JSON compiler takes them.

    Raises `GrammarImpossible` naming the bounds that no number keeps, `GrammarUnsupported` for what cannot be written
    beside such numbers, `GrammarTooLarge`, and `GrammarError` for a malformed schema.
    """
    return _Builder(schema, options).build()


class _Builder:
    def __init__(self, root: dict[str, Any], options: dict[str, Any]) -> None:
        self.root = root
        self.rules = Rules()
        self._alternatives = Alternatives(root)
        self._known: dict[tuple[str, ...], str] = {}
        self._todo: list[tuple[str, Conjunction]] = []
        self._empty: list[str] = []
        # without that, llguidance 1.9.1 takes any blanks before some of them
        self._leaf_options = {
            "whitespace_flexible": False,
            **{key: options[key] for key in LEAF_OPTIONS if options.get(key)},
        }
        usual = None if options.get("whitespace_flexible") is False else r"[ \t\n\r]+"
        blank = usual if (given := options.get("whitespace_pattern")) is None else given
        self._blank: list[Symbol] = [self.rules.text(f"{regex(blank)}?")] if blank else []
        self._comma = self._separator(options.get("item_separator", ","))
        self._colon = self._separator(options.get("key_separator", ":"))

    def _separator(self, text: str) -> list[Symbol]:
        return [*self._blank, self.rules.terminal(regex(text)), *self._blank]

    def build(self) -> tuple[Rules, str]:
        start = self.node((Entry("", self.root),))
        while self._todo:
            name, conjunction = self._todo.pop()
            for term in self._alternatives.of(conjunction):
                self._term(name, term)
            if len(self.rules.alternatives) > MAX_RULES:
                raise GrammarTooLarge("grammar", f"a schema with bounds of numbers must not exceed {MAX_RULES} rules")
        self.rules.prune()
        if not self.rules.alternatives[start]:
            detail = f"; there is no {self._empty[0]}" if self._empty else ""
            raise GrammarImpossible("grammar", f"no JSON value is valid under this schema{detail}")
        return self.rules, start

    def node(self, conjunction: Conjunction) -> str:
        """The rule of what must satisfy all of `conjunction`."""
        entries = {entry.pointer: entry for entry in conjunction if entry.schema is not True}
        key = tuple(entries)
        if key not in self._known:
            self._known[key] = self.rules.new()
            self._todo.append((self._known[key], tuple(entries.values())))
        return self._known[key]

    def _term(self, name: str, term: Term) -> None:
        if term.entries and not term.having(*_SAYING):
            if len(term.having("$ref", "allOf", "anyOf", "oneOf")) < len(term.entries):  # else it only leads to itself
                self.rules.add(name, [self.node(())])
            return
        kinds = term.types
        for kind in kinds:
            if kind in ("null", "boolean"):
                self._constant(name, term, ("null",) if kind == "null" else ("true", "false"))
            elif kind == "integer" or (kind == "fraction" and "integer" not in kinds):
                self._number(name, term)
            elif kind == "string":
                self._string(name, term)
            elif kind == "array":
                self._array(name, term)
            elif kind == "object":
                self._object(name, term)

    def _json(self, schema: dict[str, Any]) -> str:
        return self.rules.text("%json " + canonical_json({"x-guidance": self._leaf_options, **schema}))

    def _constant(self, name: str, term: Term, texts: tuple[str, ...]) -> None:
        for text in texts:
            listed = term.having("enum") if text != "null" else []
            if all(json.loads(text) in entry.schema["enum"] for entry in listed if entry.plain):
                self.rules.add(name, [f'"{text}"'])

    # ---------------------------------------------------------------- scalars

    def _number(self, name: str, term: Term) -> None:
        numbers = term.numbers()
        if numbers.empty:
            self._empty.append(f"{numbers} (at {term.where() or '/'})")
            return
        spelling = numbers.spelling(term.where())
        if spelling.schema is not None:
            self.rules.add(name, [self._json(spelling.schema)])
        else:
            self.rules.add(name, [self.rules.terminal(" & ".join(map(regex, spelling.patterns)))])

    def _string(self, name: str, term: Term) -> None:
        parts = []
        for entry in term.entries:
            said = {key: entry.schema[key] for key in STRING if key in entry.schema}
            if not entry.plain:  # their values have become entries of their own
                said.pop("enum", None)
                said.pop("const", None)
            if said and said not in parts:
                parts.append(said)
        least = max((part.get("minLength", 0) for part in parts), default=0)
        if any(least > part["maxLength"] for part in parts if "maxLength" in part):
            return
        if len(parts) <= 1:
            self.rules.add(name, [self._json({"type": "string", **(parts[0] if parts else {})})])
        else:
            self.rules.add(name, [self._json({"allOf": [{"type": "string", **part} for part in parts]})])

    # ---------------------------------------------------------------- arrays

    def _array(self, name: str, term: Term) -> None:
        shapes = [items_of(entry) for entry in term.having(*ARRAY)]
        least = max((count_of(entry, "minItems") or 0 for entry in term.entries), default=0)
        tops = [count_of(entry, "maxItems") for entry in term.entries]
        most = min((top for top in tops if top is not None), default=None)
        width = max((len(prefix) for prefix, _ in shapes), default=0)
        if width > MAX_PREFIX:
            raise GrammarTooLarge("grammar", f"prefixItems beside bounds of numbers must not exceed {MAX_PREFIX}")
        if most is not None and least > most:
            return
        open_, close = ['"["', *self._blank], [*self._blank, '"]"']
        if least == 0:
            self.rules.add(name, ['"["', *self._blank, '"]"'])
        if most == 0:
            return
        rest = self.node(tuple(items for _, items in shapes if items is not None))
        if width == 0:
            more = self.rules.new([*self._comma, rest])
            self.rules.add(name, [*open_, rest, *_repeat(more, max(0, least - 1), most, 1), *close])
            return
        items = [self.node(tuple(e for prefix, tail in shapes if (e := at(prefix, tail, i)))) for i in range(width)]
        tail: list[Symbol] = _repeat(self.rules.new([*self._comma, rest]), max(0, least - width), most, width)
        for index in range(width - 1, 0, -1):
            here = self.rules.new()
            if index >= least:
                self.rules.add(here, [])
            if most is None or index < most:
                self.rules.add(here, [*self._comma, items[index], *tail])
            tail = [here]
        self.rules.add(name, [*open_, items[0], *tail, *close])

    # ---------------------------------------------------------------- objects

    def _object(self, name: str, term: Term) -> None:
        entries = term.having(*OBJECT)
        required = dict.fromkeys(key for entry in entries for key in entry.schema.get("required", ()))
        declared = dict.fromkeys(key for entry in entries for key in entry.schema.get("properties", {}))
        members: list[Member] = []
        for key in (*declared, *(key for key in required if key not in declared)):
            value = self.node(tuple(child for entry in entries for child in property_of(entry, key)))
            pair = self.rules.new([literal(json.dumps(key, ensure_ascii=False)), *self._colon, value])
            members.append((pair, key in required))
        least, most = self._counts(entries, members, len(required))
        free = self._free(entries, [*declared, *(key for key in required if key not in declared)])
        if most is not None and most < least:
            return
        if free is not None and most != 0:
            more = self.rules.new([*self._comma, free])
            tail = self.rules.new([free, *_repeat(more, max(0, least - 1), most, 1)])
            members.append((tail, least > 0))
        elif least > (0 if required else 1):
            return
        if least == 0 and not required:
            self.rules.add(name, ['"{"', *self._blank, '"}"'])
        if not members:
            return
        single = most == 1 and not required
        alone: list[list[Symbol]] = [[member] for member, _ in members]
        inner = self.rules.new(*alone) if single else self._some(members)
        self.rules.add(name, ['"{"', *self._blank, inner, *self._blank, '"}"'])

    def _some(self, members: list[Member]) -> str:
        """At least one of the members, those needed always, in order. Halves, so that rules do not nest deeply."""
        if len(members) == 1:
            return members[0][0]
        half = len(members) // 2
        left, right = members[:half], members[half:]
        one, two = self._some(left), self._some(right)
        follows: list[Symbol] = [*self._comma, two]
        if not any(needed for _, needed in right):
            follows = [self.rules.new([], follows)]  # not an alternative of its own: those that may begin are limited
        found = self.rules.new([one, *follows])
        if not any(needed for _, needed in left):
            self.rules.add(found, [two])
        return found

    def _counts(self, entries: list[Entry], members: list[Member], needed: int) -> tuple[int, int | None]:
        """Bounds of the number of members beside the required ones."""
        least = max((count_of(entry, "minProperties") or 0 for entry in entries), default=0)
        tops = [count_of(entry, "maxProperties") for entry in entries]
        most = min((top for top in tops if top is not None), default=None)
        one_at_most = not needed and least <= 1 and most in (None, 1)
        if (least > needed or most is not None) and len(members) > needed and not one_at_most:
            keys = ("minProperties", "maxProperties")
            places = [(key, f"{entry.pointer}/{key}") for entry in entries for key in keys if key in entry.schema]
            raise GrammarUnsupported("grammar", places, "only where all properties are required")
        return max(0, least - needed), None if most is None else most - needed

    def _free(self, entries: list[Entry], declared: list[str]) -> str | None:
        """The rule of one undeclared member."""
        patterns = dict.fromkeys(key for entry in entries for key in entry.schema.get("patternProperties", {}))
        written = {pattern: regex(f'"{key_pattern(pattern, entries)}"') for pattern in patterns}
        names = [literal(json.dumps(key, ensure_ascii=False)) for key in declared]
        others = f" & ~({' | '.join(names)})" if names else ""
        found = self.rules.new()
        for pattern, text in written.items():
            value = self.node(tuple(of_pattern(entry, pattern) for entry in entries))
            key = self.rules.terminal(f"{regex(PLAIN_KEY)} & {text}{others}")
            self.rules.add(found, [key, *self._colon, value])
        rest = tuple(additional(entry) for entry in entries)
        if not any(entry.schema is False for entry in rest):
            key = self._json({"type": "string"})
            if names or patterns:
                plain = PLAIN_KEY if patterns else KEY
                key = self.rules.terminal(regex(plain) + others + "".join(f" & ~{text}" for text in written.values()))
            self.rules.add(found, [key, *self._colon, self.node(rest)])
        return found if self.rules.alternatives[found] else None


_SAYING = (*KEYWORDS, *STRING, *ARRAY, *OBJECT, "type")


def _repeat(rule: str, least: int, most: int | None, taken: int) -> list[Symbol]:
    """`rule` from `least` times on, `most` being the limit of a list that has `taken` already."""
    top = None if most is None else most - taken
    return [] if top is not None and top <= 0 else [Repeat(rule, least, top)]
