"""Demands of a conjunction of schemas on single items and properties, and on the names of undeclared properties."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from llguidance import LLMatcher

from asyncengine.errors import GrammarError, GrammarTooLarge, GrammarUnsupported
from asyncengine.grammar.lark import literal, regex
from asyncengine.grammar.regexes import quoted, searched, words
from asyncengine.grammar.schema.terms import Entry, Term
from asyncengine.grammar.schemas import TABLES, escape
from asyncengine.grammar.spec import canonical_json

LENGTHS = ("minLength", "maxLength")
STRING, ARRAY, OBJECT = (TABLES["about"][kind] for kind in ("strings", "arrays", "objects"))
LEAF_OPTIONS = ("json_allowed_escapes", "json_allow_general_unicode_escapes", "lenient")
"""Options of llguidance's JSON compiler that concern strings."""

MAX_EXCLUDED = 10_000
"""Most texts excluded from a string: the library takes 0.8 s for this many, 37 s for eight times as many."""
MAX_HITTING = 256
"""Most sets of `hitting_sets`, each of which becomes an alternative of its object."""
KEY = r'"(?:[^"\\\x00-\x1f\x7f]|\\["\\bfnrt])*"'
"""An undeclared key, in its one spelling: otherwise an escaped declared key would pass for an undeclared one."""
TEXT = r'"(?:[^"\\\x00-\x1f\x7f]|\\(?:["\\bfnrt]|u00(?:[01][0-9A-Fa-f]|7[Ff])))*"'
"""A JSON string as llguidance 1.9.1 writes it without options such as `json_allowed_escapes`."""
PLAIN_KEY = r'"[^"\\\x00-\x1f\x7f]*"'
"""A key that a pattern is matched against: no escapes."""


def count_of(entry: Entry, key: str) -> int | None:
    if key not in entry.schema:
        return None
    value = entry.schema[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0 or value != int(value):
        raise GrammarError("grammar", f"{key} at {entry.pointer or '/'} must be a whole number, 0 or more", value)
    return int(value)


def bounds_of(entries: Iterable[Entry], low: str, high: str) -> tuple[int, int | None]:
    """(largest lower bound, smallest upper bound or None) of several schemas."""
    tops = [top for entry in entries if (top := count_of(entry, high)) is not None]
    return max((count_of(entry, low) or 0 for entry in entries), default=0), min(tops, default=None)


def items_of(entry: Entry) -> tuple[list[Entry], Entry | None]:
    """(schemas of the first items, schema of the others or None). A list of `items` is draft 7's `prefixItems`."""
    pointer, schema = entry.pointer, entry.schema
    key = "items" if isinstance(schema.get("items"), list) else "prefixItems"
    prefix = [Entry(f"{pointer}/{key}/{index}", item) for index, item in enumerate(schema.get(key, ()))]
    others = "additionalItems" if key == "items" else "items"
    return prefix, Entry(f"{pointer}/{others}", schema[others]) if others in schema else None


def nth(prefix: list[Entry], others: Entry | None, index: int) -> Entry | None:
    return prefix[index] if index < len(prefix) else others


def property_of(entry: Entry, key: str) -> list[Entry]:
    """Demands of one schema on the property `key`."""
    pointer, schema = entry.pointer, entry.schema
    entries = []
    if key in schema.get("properties", {}):
        entries.append(Entry(f"{pointer}/properties/{escape(key)}", schema["properties"][key]))
    for pattern, child in schema.get("patternProperties", {}).items():
        path = f"patternProperties/{escape(pattern)}"
        try:
            if re.search(pattern, key):
                entries.append(Entry(f"{pointer}/{path}", child))
        except (re.error, RecursionError, OverflowError):
            raise no_pattern("patternProperties", f"{entry.location}/{path}") from None
    return entries or [additional(entry)]


def of_patterns(entry: Entry, matching: Collection[str]) -> list[Entry]:
    """Demands of one schema on an undeclared property whose name matches the patterns `matching` and no others."""
    schemas = entry.schema.get("patternProperties", {})
    base = f"{entry.pointer}/patternProperties/"
    return [Entry(base + escape(key), schemas[key]) for key in matching if key in schemas] or [additional(entry)]


def additional(entry: Entry) -> Entry:
    return Entry(f"{entry.pointer}/additionalProperties", entry.schema.get("additionalProperties", True))


def written(pattern: str, keyword: str, pointer: str, write: Callable[[str], str] = quoted) -> str:
    """The Lark expression that `write` makes of `pattern`; by default of JSON strings without escapes that match it
    somewhere. Raises `GrammarUnsupported` naming `keyword` and `pointer`."""
    try:
        return write(pattern)
    except GrammarUnsupported:
        raise no_pattern(keyword, pointer) from None


def no_pattern(keyword: str, pointer: str) -> GrammarUnsupported:
    return GrammarUnsupported("grammar", [(keyword, pointer)], "look-around, or an anchor in the middle of the pattern")


@dataclass(frozen=True)
class Texts:
    """A set of strings: those valid under all of `schemas` (keywords on strings) and none of `excluded` (`pattern` or
    `enum`). `location`: the pointer of the first, for messages."""

    schemas: list[dict[str, Any]]
    excluded: list[dict[str, Any]]
    location: str

    @classmethod
    def of(cls, term: Term) -> Texts:
        schemas: list[dict[str, Any]] = []
        excluded: list[dict[str, Any]] = []
        for entry in term.entries:
            if entry.plain and "not" in entry.schema:
                keywords = {**entry.schema["not"]}
                keywords["enum"] = [value for value in keywords.get("enum", ()) if isinstance(value, str)]
                excluded += [keywords] if keywords["enum"] or "pattern" in keywords else []
                continue
            keywords = {key: entry.schema[key] for key in STRING if key in entry.schema}
            keywords.update({key: count for key in LENGTHS if (count := count_of(entry, key)) is not None})
            if not entry.plain:  # their values have become entries of their own
                keywords.pop("enum", None)
                keywords.pop("const", None)
            if keywords and keywords not in schemas:
                schemas.append(keywords)
        return cls(schemas, excluded, next((entry.location for entry in term.entries), ""))

    @property
    def schema(self) -> dict[str, Any]:
        """A JSON schema of the strings, without what is excluded."""
        schemas = [{"type": "string", **schema} for schema in self.schemas or [{}]]
        return schemas[0] if len(schemas) == 1 else {"allOf": schemas}

    @cached_property
    def complaint(self) -> str:
        """The library's complaint about `schema`; empty if it has none, which needs no asking for a pattern alone."""
        patterns = ["pattern" in schema for schema in self.schemas]
        is_simple = not any(patterns) or (len(patterns) == 1 and len(self.schemas[0]) == 1)
        return "" if is_simple else _complaint(canonical_json(self.schema))

    @cached_property
    def bounds(self) -> tuple[int, int | None]:
        """Least and most characters."""
        tops = [schema["maxLength"] for schema in self.schemas if "maxLength" in schema]
        return max((schema.get("minLength", 0) for schema in self.schemas), default=0), min(tops, default=None)

    @cached_property
    def _allowed(self) -> list[frozenset[str]]:
        """The values of each `enum`, as sets: lists would be searched once for each value, in quadratic time."""
        return [frozenset(schema["enum"]) for schema in self.schemas if "enum" in schema]

    @cached_property
    def _refused(self) -> frozenset[str]:
        return frozenset(value for schema in self.excluded for value in schema.get("enum", ()))

    @property
    def listed(self) -> list[str] | None:
        """The strings, if an `enum` lists them; else None."""
        lists = [schema["enum"] for schema in self.schemas if "enum" in schema]
        return [value for value in dict.fromkeys(lists[0]) if self.holds(value)] if lists else None

    def holds(self, text: str) -> bool:
        """Whether `text` is in the set, by Python's regular expressions. Raises `GrammarUnsupported`."""
        low, high = self.bounds
        try:
            matches = [re.search(schema["pattern"], text) is not None for schema in self.schemas if "pattern" in schema]
            wrong = [re.search(schema["pattern"], text) is not None for schema in self.excluded if "pattern" in schema]
        except (re.error, RecursionError, OverflowError):
            raise no_pattern("pattern", f"{self.location}/pattern") from None
        in_bounds = low <= len(text) and (high is None or len(text) <= high) and all(matches) and not any(wrong)
        return in_bounds and text not in self._refused and all(text in values for values in self._allowed)

    @property
    def plain(self) -> str | None:
        """A Lark expression, if there are no patterns and nothing is excluded; None otherwise, and for no strings."""
        if self.excluded or any("pattern" in schema for schema in self.schemas):
            return None
        if (listed := self.listed) is not None:
            return words(map(literal, listed)) if listed else None
        return regex(TEXT.replace("*", self._times))

    @property
    def _times(self) -> str:
        low, high = self.bounds
        return "*" if (low, high) == (0, None) else f"{{{low},{'' if high is None else high}}}"

    def terminal(self, patterns: list[str], failing: list[str], names: list[str]) -> str:
        """A Lark expression of those strings that also match all of `patterns`, match none of `failing` (both Lark) and
        are none of `names`. Raises `GrammarUnsupported` for patterns that cannot be written."""
        required, forbidden = [*patterns, *self._written(self.schemas)], [*failing, *self._written(self.excluded)]
        texts = dict.fromkeys([*names, *(value for schema in self.excluded for value in schema.get("enum", ()))])
        if len(texts) > MAX_EXCLUDED:
            raise GrammarTooLarge("grammar", f"values to be excluded must not exceed {MAX_EXCLUDED}", len(texts))
        base = (PLAIN_KEY if required or forbidden else KEY).replace("*", self._times)
        wrong = [*([words(map(literal, texts))] if texts else []), *forbidden]
        return " & ".join([regex(base), *required, *(f"~{text}" for text in wrong)])

    def _written(self, schemas: list[dict[str, Any]], write: Callable[[str], str] = quoted) -> list[str]:
        pointer = f"{self.location}/pattern"
        return [written(schema["pattern"], "pattern", pointer, write) for schema in schemas if "pattern" in schema]

    def raw(self) -> list[str]:
        """Lark expressions whose intersection is the strings as they are, without quotes. Raises as `terminal`."""
        low, high = self.bounds
        expressions = [f"/(?s:.{{{low},{'' if high is None else high}}})/"]
        expressions += self._written(self.schemas, searched)
        expressions += [f"~{text}" for text in self._written(self.excluded, searched)]
        return [*expressions, f"~{words(self._refused)}"] if self._refused else expressions


@functools.lru_cache(4096)
def _complaint(schema: str) -> str:
    return str(LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema)))


def hitting_sets(choices: Iterable[Sequence[str | None]]) -> list[frozenset[str | None]]:
    """The minimal sets with an element of each of `choices` (hitting sets). Raises `GrammarTooLarge` for more than
    `MAX_HITTING`."""
    sets: list[frozenset[str | None]] = [frozenset()]
    for choice in choices:
        grown = dict.fromkeys(old if not old.isdisjoint(choice) else old | {key} for old in sets for key in choice)
        sets = []
        for chosen in sorted(grown, key=len):
            if not any(smaller <= chosen for smaller in sets):
                sets.append(chosen)
        if len(sets) > MAX_HITTING:
            raise GrammarTooLarge("grammar", f"undeclared members must not be asked for in over {MAX_HITTING} ways")
    return sets
