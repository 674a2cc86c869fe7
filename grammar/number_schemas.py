"""Schemas as rules of ours, and what of their numbers llguidance may see."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from asyncengine.errors import GrammarTooLarge, GrammarUnsupported
from asyncengine.grammar.numbers import KEYWORDS, SAFE, of_schema
from asyncengine.grammar.rules import Rules
from asyncengine.grammar.schema_rules import schema_grammar
from asyncengine.grammar.schemas import pointed

MAX_RETRIES = 64
"""Keywords that are left out one after the other where that is allowed."""
MAX_FACTOR = 1 << 15
"""The largest lone `multipleOf` that is left to the library, whose arithmetic has 32 bits."""


def without_bounds(schema: Any) -> Any:
    """A copy for the library to complain about: no bounds, no large numbers, everything else as it is."""
    copy = json.loads(json.dumps(schema))
    for node in _dicts(copy):
        for key, value in list(node.items()):
            if _is_bound(key, value):
                del node[key]
            elif _unsafe(value):
                node[key] = _small(value)
    return copy


def lowered(
    schema: dict[str, Any], options: dict[str, Any], lenient: bool, library: Callable[[dict[str, Any]], str]
) -> tuple[str, tuple[Rules, str] | None]:
    """Lark for `schema`, with the rules that it was written from and the first one's name; or, where its structure is
    beyond us and its numbers are small and whole, what `library` makes of it with closed bounds. If `lenient`, keywords
    that stand in the way are left out. Raises as `schema_grammar`."""
    for left in range(MAX_RETRIES, -1, -1):
        try:
            rules, start = schema_grammar(schema, options)
            return rules.lark(start), (rules, start)
        except (GrammarUnsupported, GrammarTooLarge) as error:
            safe = with_closed_bounds(schema)
            if safe is not None:
                return library(safe), None
            if not left or not lenient or not isinstance(error, GrammarUnsupported):
                raise
            if not sum(_drop(schema, pointer) for _, pointer in error.features):
                raise
    raise AssertionError("it was raised")


def with_closed_bounds(schema: dict[str, Any]) -> dict[str, Any] | None:
    """A copy with inclusive bounds of whole numbers, which the library keeps exactly; None if there are others."""
    copy: dict[str, Any] = json.loads(json.dumps(schema))
    factors = 0
    for node in _dicts(copy):
        if any(_unsafe(value) for value in node.values()):
            return None
        bounds = {key: value for key, value in node.items() if _is_bound(key, value)}
        if not bounds:
            continue
        if node.get("type") != "integer" or not all(
            isinstance(value, (bool, int)) and abs(value) < SAFE for value in bounds.values()
        ):
            return None
        factors += "multipleOf" in bounds
        if factors > 1 or not 0 < bounds.get("multipleOf", 1) <= MAX_FACTOR:
            return None
        low, high = of_schema(bounds, "", integer=True).ends()
        for key in bounds:
            if key != "multipleOf":
                del node[key]
        node.update({key: end for key, end in (("minimum", low), ("maximum", high)) if end is not None})
    return copy


def _dicts(schema: Any) -> Iterator[dict[str, Any]]:
    """Every JSON object in it: a reference may lead anywhere."""
    stack = [schema]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            yield node
            stack += node.values()
        elif isinstance(node, list):
            stack += node


def _is_bound(key: str, value: Any) -> bool:
    return key in KEYWORDS and isinstance(value, (int, float))


def _unsafe(value: Any) -> bool:
    """A number the library would round, or a list with one."""
    if isinstance(value, list):
        return any(map(_unsafe, value))
    return isinstance(value, (int, float)) and abs(value) > SAFE


def _small(value: Any) -> Any:
    """The same without such numbers."""
    if isinstance(value, list):
        return [_small(item) for item in value]
    return 0 if _unsafe(value) else value


def _drop(schema: dict[str, Any], pointer: str) -> bool:
    """Delete what `pointer` leads to; False if that is nothing."""
    around, _, last = pointer.rpartition("/")
    here = pointed(schema, around)
    return isinstance(here, dict) and here.pop(last.replace("~1", "/").replace("~0", "~"), None) is not None
