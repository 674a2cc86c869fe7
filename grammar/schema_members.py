"""Demands of a conjunction of schemas on single items and properties, and on the names of undeclared properties."""

from __future__ import annotations

import re

from asyncengine.errors import GrammarError, GrammarUnsupported
from asyncengine.grammar.regexes import portable
from asyncengine.grammar.schema_terms import Entry
from asyncengine.grammar.schemas import escape

KEY = r'"(?:[^"\\\x00-\x1f\x7f]|\\["\\bfnrt])*"'
"""An undeclared key: one spelling for each, so that no declared key passes for one."""
PLAIN_KEY = r'"[^"\\\x00-\x1f\x7f]*"'
"""A key that a pattern is matched against: no escapes."""


def count_of(entry: Entry, key: str) -> int | None:
    value = entry.schema.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0 or value != int(value):
        raise GrammarError("grammar", f"{key} at {entry.pointer or '/'} must be a whole number, 0 or more", value)
    return int(value)


def items_of(entry: Entry) -> tuple[list[Entry], Entry | None]:
    """(schemas of the first items, schema of the others). A list of `items` is draft 7's `prefixItems`."""
    pointer, schema = entry.pointer, entry.schema
    key = "items" if isinstance(schema.get("items"), list) else "prefixItems"
    prefix = [Entry(f"{pointer}/{key}/{index}", item) for index, item in enumerate(schema.get(key, ()))]
    others = "additionalItems" if key == "items" else "items"
    return prefix, Entry(f"{pointer}/{others}", schema[others]) if others in schema else None


def at(prefix: list[Entry], others: Entry | None, index: int) -> Entry | None:
    return prefix[index] if index < len(prefix) else others


def property_of(entry: Entry, key: str) -> list[Entry]:
    """Demands of one schema on the property `key`."""
    pointer, schema = entry.pointer, entry.schema
    found = []
    if key in schema.get("properties", {}):
        found.append(Entry(f"{pointer}/properties/{escape(key)}", schema["properties"][key]))
    for pattern, child in schema.get("patternProperties", {}).items():
        if _finds(pattern, key, entry):
            found.append(Entry(f"{pointer}/patternProperties/{escape(pattern)}", child))
    return found or [additional(entry)]


def of_pattern(entry: Entry, pattern: str) -> Entry:
    named = entry.schema.get("patternProperties", {})
    if pattern in named:
        return Entry(f"{entry.pointer}/patternProperties/{escape(pattern)}", named[pattern])
    return additional(entry)


def additional(entry: Entry) -> Entry:
    return Entry(f"{entry.pointer}/additionalProperties", entry.schema.get("additionalProperties", True))


def _finds(pattern: str, key: str, entry: Entry) -> bool:
    try:
        return re.search(pattern, key) is not None
    except (re.error, RecursionError, OverflowError):
        raise _no_pattern(pattern, [entry]) from None


def key_pattern(pattern: str, entries: list[Entry]) -> str:
    """Whole keys in which `pattern` is found; it may be anchored at its ends."""
    start, end = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    core = pattern[start : len(pattern) - end]
    try:
        if (start or end) and portable(core) and "|" in re.sub(r"\\.|\[[^\]]*\]|\([^()]*\)", "", core):
            raise _no_pattern(pattern, entries)
        core = portable(core)
    except GrammarUnsupported:
        raise _no_pattern(pattern, entries) from None
    anything = '[^"]*'
    return f"{'' if start else anything}(?:{core}){'' if end else anything}"


def _no_pattern(pattern: str, entries: list[Entry]) -> GrammarUnsupported:
    at = next(e.pointer for e in entries if pattern in e.schema.get("patternProperties", {}))
    place = f"{at}/patternProperties/{escape(pattern)}"
    return GrammarUnsupported("grammar", [("patternProperties", place)], "too rich a pattern beside bounds of numbers")
