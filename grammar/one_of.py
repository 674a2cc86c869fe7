"""Proof that branches of a `oneOf` exclude one another, by types, values, bounds or required keys: it is an `anyOf`."""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

from asyncengine.errors import GrammarError
from asyncengine.grammar.numbers import Numbers
from asyncengine.grammar.schema_members import at, count_of, items_of, property_of
from asyncengine.grammar.schema_terms import Alternatives, Conjunction, Entry, Term
from asyncengine.grammar.schemas import pointed, subschemas

MAX_DEPTH = 16
"""Values inside one another that are looked into."""
MAX_PAIRS = 2_000
"""Pairs of branches that are compared in one document; each takes a tenth of a millisecond."""


def overlapping(schema: dict[str, Any]) -> list[tuple[str, int, int]]:
    """Write each `oneOf` whose branches exclude one another as `anyOf`, in place. Returns the others: the pointer, and
    the indices of two branches that both may hold."""
    root = _read_as_written(schema)
    proof = _Emptiness(root)
    found = []
    for pointer, node in list(subschemas(schema)):
        if not isinstance(node.get("oneOf"), list):
            continue
        said = dict(pointed(root, pointer) or {})
        entries = [Entry(f"{pointer}/oneOf/{index}", branch) for index, branch in enumerate(said.pop("oneOf", ()))]
        around, pairs = Entry(pointer, said), combinations(range(len(entries)), 2)
        both = next((pair for pair in pairs if not proof.apart(around, entries, *pair)), None)
        if both is not None:
            found.append((f"{pointer}/oneOf", *both))
        elif "anyOf" in node:
            node["allOf"] = [*node.get("allOf", ()), {"anyOf": node.pop("oneOf")}]
        else:
            node["anyOf"] = node.pop("oneOf")
    return found


def _read_as_written(schema: dict[str, Any]) -> dict[str, Any]:
    """A copy; up to draft 7 without what stands beside a `$ref`, which says nothing there."""
    root: dict[str, Any] = json.loads(json.dumps(schema))
    for _, node in list(subschemas(root)) if "draft-0" in str(schema.get("$schema")) else ():
        for key in [key for key in node if "$ref" in node and key not in ("$ref", "$defs", "definitions")]:
            del node[key]
    return root


class _Emptiness:
    """Proves that no value satisfies several schemas at once. What it does not prove may be so all the same."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._alternatives = Alternatives(root)
        self._pairs = 0
        self._known: dict[tuple[str, ...], bool] = {}

    def apart(self, around: Entry, branches: list[Entry], one: int, two: int) -> bool:
        self._pairs += 1
        return self._pairs <= MAX_PAIRS and self.is_empty((around, branches[one], branches[two]))

    def is_empty(self, conjunction: Conjunction, depth: int = 0) -> bool:
        key = tuple(entry.pointer for entry in conjunction)
        if key not in self._known:
            self._known[key] = False  # until it is proved: a recursion may end somewhere
            try:
                terms = self._alternatives.of(conjunction) if depth < MAX_DEPTH else [Term(())]
                self._known[key] = all(self._has_none(kind, term, depth) for term in terms for kind in term.types)
            except (GrammarError, TypeError, AttributeError):  # too large, or malformed: whoever compiles it says so
                pass
        return self._known[key]

    def _has_none(self, kind: str, term: Term, depth: int) -> bool:
        """No value of a type satisfies `term`."""
        match kind:
            case "boolean" | "string":
                lists = [entry.schema["enum"] for entry in term.having("enum") if entry.plain]
                values = [value for value in lists[0] if all(value in other for other in lists)] if lists else [kind]
                return not values or _crossed(term, "minLength", "maxLength", kind == "string")
            case "integer" | "fraction":
                return _no_number(term.numbers())
            case "array":
                least = max((count_of(entry, "minItems") or 0 for entry in term.entries), default=0)
                shapes = [items_of(entry) for entry in term.entries]
                width = min(least, 1 + max((len(prefix) for prefix, _ in shapes), default=0))
                items = [tuple(e for prefix, rest in shapes if (e := at(prefix, rest, i))) for i in range(width)]
                return _crossed(term, "minItems", "maxItems") or any(self.is_empty(item, depth + 1) for item in items)
            case "object":
                needed = {key for entry in term.entries for key in entry.schema.get("required", ())}
                members = [
                    tuple(e for entry in term.entries for e in property_of(entry, key)) for key in sorted(needed)
                ]
                return any(self.is_empty(member, depth + 1) for member in members)
        return False


def _crossed(term: Term, low: str, high: str, applies: bool = True) -> bool:
    """The bounds of a count leave none."""
    least = max((count_of(entry, low) or 0 for entry in term.entries), default=0)
    tops = [top for entry in term.entries if (top := count_of(entry, high)) is not None]
    return applies and any(top < least for top in tops)


def _no_number(numbers: Numbers) -> bool:
    """No number at all, of however many digits."""
    if numbers.listed is not None or numbers.integer:
        return numbers.empty
    if numbers.low is None or numbers.high is None:
        return False
    return numbers.low > numbers.high or (numbers.low == numbers.high and (numbers.low_open or numbers.high_open))
