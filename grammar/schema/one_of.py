"""The branches of a `oneOf`, made exclusive: each without what others allow too, unless it provably allows no such."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from asyncengine.errors import GrammarError, GrammarUnsupported
from asyncengine.grammar.schema.members import bounds_of, items_of, nth, property_of
from asyncengine.grammar.schema.numbers import Numbers
from asyncengine.grammar.schema.terms import DERIVED, Alternatives, Conjunction, Entry, Term

MAX_DEPTH = 16
"""Levels of nested values that a proof looks into."""
MAX_PROOFS = 4_000
"""Conjunctions that are examined in one document; each takes a tenth of a millisecond."""
OVERLAP = "branches {} and {} may both hold; anyOf, or a required const of its own in each, can be enforced"
MAX_OTHERS = 12
"""Most branches that may overlap with one and are subtracted from it."""


class Branches:
    """Makes the branches of one document's `oneOf`s exclusive.

    It proves, where it can, that no value satisfies two of them. A proof may be missing for branches that exclude one
    another: then each is combined with the negation of the other, which costs alternatives and changes nothing.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self._alternatives = Alternatives(root)
        self._known: dict[tuple[str, ...], bool] = {}

    def of(self, entry: Entry) -> list[Entry]:
        """The exclusive branches. Raises `GrammarUnsupported` where more than `MAX_OTHERS` may overlap with one."""
        pointer, branches = f"{entry.pointer}/oneOf", entry.schema["oneOf"]
        if not isinstance(branches, list) or not branches:
            raise GrammarError("grammar", f"oneOf at {entry.location or '/'} must be a list with at least one schema")
        around = Entry(entry.pointer, {key: value for key, value in entry.schema.items() if key != "oneOf"})
        entries = [Entry(f"{pointer}/{index}", branch) for index, branch in enumerate(branches)]
        overlaps: dict[int, list[int]] = {index: [] for index in range(len(entries))}
        for i, j in combinations(range(len(entries)), 2):
            if not self.is_empty((around, entries[i], entries[j])):
                overlaps[i].append(j)
                overlaps[j].append(i)
                if len(overlaps[i]) > MAX_OTHERS:
                    raise GrammarUnsupported("grammar", [("oneOf", f"{entry.location}/oneOf")], OVERLAP.format(i, j))
        return [
            Entry(branch.pointer + DERIVED, {"allOf": [branch.schema, *({"not": branches[i]} for i in others)]})
            if (others := overlaps[index])
            else branch
            for index, branch in enumerate(entries)
        ]

    def is_empty(self, conjunction: Conjunction, depth: int = 0) -> bool:
        key = tuple(entry.pointer for entry in conjunction)
        if key not in self._known:
            self._known[key] = False  # for a recursive schema, which meets itself: some value of it may be finite
            try:
                terms = [Term(())]
                if depth < MAX_DEPTH and len(self._known) <= MAX_PROOFS:
                    terms = [] if self._is_tagged(conjunction) else self._alternatives.of(conjunction)
                self._known[key] = all(self._has_none(name, term, depth) for term in terms for name in term.types)
            except (GrammarError, TypeError, AttributeError):  # too large or malformed: compiling it raises the error
                pass
        return self._known[key]

    def _is_tagged(self, conjunction: Conjunction) -> bool:
        """Whether two require different strings under the same name: the usual way to tag branches, proved at once."""
        tags: dict[str, set[str]] = {}
        for schema in (self._alternatives.followed(entry).schema for entry in conjunction):
            is_object = isinstance(schema, dict) and schema.get("type") == "object"
            for key in schema.get("required", ()) if is_object else ():
                child = schema.get("properties", {}).get(key)
                values: list[Any] = child.get("enum", [child.get("const")]) if isinstance(child, dict) else [None]
                if all(isinstance(text, str) for text in values):
                    tags[key] = tags.get(key, {*values}).intersection(values)
        return not all(tags.values())

    def _has_none(self, name: str, term: Term, depth: int) -> bool:
        """Whether `term` provably allows no value of the type `name`."""
        match name:
            case "boolean" | "string":
                lists = [entry.schema["enum"] for entry in term.having("enum") if entry.plain]
                excluded = [value for entry in term.having("not") for value in entry.schema["not"].get("enum", ())]
                allowed = [value for value in lists[0] if all(value in other for other in lists)] if lists else [name]
                values = [value for value in allowed if value not in excluded or not lists]
                return not values or _crossed(term, "minLength", "maxLength", name == "string")
            case "integer" | "fraction":
                return _no_number(term.numbers())
            case "array":
                least, _ = bounds_of(term.entries, "minItems", "maxItems")
                item_lists = [items_of(entry) for entry in term.entries]
                width = min(least, 1 + max((len(first) for first, _ in item_lists), default=0))
                items = [tuple(one for first, rest in item_lists if (one := nth(first, rest, i))) for i in range(width)]
                return _crossed(term, "minItems", "maxItems") or any(self.is_empty(one, depth + 1) for one in items)
            case "object":
                needed = {key for entry in term.entries for key in entry.schema.get("required", ())}
                relevant = term.having("properties", "patternProperties", "additionalProperties")
                for key in sorted(needed):
                    about = [e for e in relevant if e.schema.keys() != {"properties"} or key in e.schema["properties"]]
                    member = tuple(child for entry in about for child in property_of(entry, key))
                    if member and self.is_empty(member, depth + 1):
                        return True
        return False


def _crossed(term: Term, low: str, high: str, applies: bool = True) -> bool:
    """Whether the lower bound of a count exceeds the upper one."""
    least, most = bounds_of(term.entries, low, high)
    return applies and most is not None and most < least


def _no_number(numbers: Numbers) -> bool:
    """Whether the set is empty with any number of digits, which `Numbers.empty` limits."""
    if numbers.listed is not None or numbers.integer:
        return numbers.empty
    if numbers.low is None or numbers.high is None:
        return False
    return numbers.low > numbers.high or (numbers.low == numbers.high and (numbers.low_open or numbers.high_open))
