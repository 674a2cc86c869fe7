"""Grammars made to hurt: too deep, too wide, exponential, circular, impossible, malformed. Each is made when asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncengine.grammar import Grammar


def _circular() -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array"}
    schema["items"] = schema
    return schema


def _nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def _references(count: int, last: dict[str, Any]) -> dict[str, Any]:
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$defs": {**chain, f"d{count}": last}, "$ref": "#/$defs/d0"}


def _unreadable_references(count: int) -> dict[str, Any]:
    """A chain by absolute addresses, which `check_limits` does not follow."""
    chain = {f"d{i}": {"$ref": f"y#/$defs/d{i + 1}"} for i in range(count)}
    return {"$id": "http://x/y", "$defs": {**chain, f"d{count}": {"type": "null"}}, "$ref": "y#/$defs/d0"}


def _doubling(levels: int) -> dict[str, Any]:
    """2 ** levels leaves."""
    defs: dict[str, Any] = {f"d{i}": _pair({"$ref": f"#/$defs/d{i + 1}"}) for i in range(levels)}
    return {"$defs": {**defs, f"d{levels}": {"type": "null"}}, "$ref": "#/$defs/d0"}


def _pair(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"l": item, "r": item}, "required": ["l", "r"]}


REFUSED: dict[str, Callable[[], Any]] = {
    "60,000 nested groups": lambda: Grammar.regex("(" * 60_000 + "a" + ")" * 60_000),
    "a huge count": lambda: Grammar.regex("a{1000000000}"),
    "a back-reference": lambda: Grammar.regex(r"(a)\1"),
    "an enum of 10 MB": lambda: {"enum": [f"{i:0100d}" for i in range(100_000)]},
    "100,000 levels": lambda: _nested(100_000),
    "a circular dict": _circular,
    "10,000 references in a chain": lambda: _references(10_000, {"type": "integer"}),
    "22,000 references that nobody can read": lambda: _unreadable_references(22_000),
    "a reference to itself": lambda: {"$ref": "#"},
    "a reference to elsewhere": lambda: {"$ref": "https://example.com/schema.json"},
    "minimum above maximum": lambda: {"type": "integer", "minimum": 5, "maximum": 4},
    "not json": lambda: Grammar.json_schema("{"),
    "NaN": lambda: {"const": float("nan")},
    "half a surrogate pair": lambda: Grammar.regex("\ud800"),
    "2,000 optional properties": lambda: {
        "type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(2000)},
    },
    "nothing at all": lambda: Grammar.choice([]),
    "no schema": object,
    "Lark without an end": lambda: Grammar.lark('start: "a" start'),
    "Lark that is not": lambda: Grammar.lark("]]] :::"),
    "Lark 10,000 rules deep": lambda: Grammar.lark(
        "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(10_000)) + 'r10000: "a"\n'
    ),
    "Lark with a budget of its own": lambda: Grammar.lark("start: body\nbody[max_tokens=3]: /[a-z]*/"),
}  # fmt: skip
"""Grammars that cannot be served, and must be refused with a typed error that names the field."""

BEARABLE: dict[str, Callable[[], Any]] = {
    "exponential alternation": lambda: Grammar.regex("(a|aa|aaa|b)*(a|ab|aba)*(b|ba|bab)*c"),
    "exponential backtracking": lambda: Grammar.regex("(x+x+)+y"),
    "2 ** 40 states if made deterministic": lambda: Grammar.regex("[ab]*a[ab]{40}"),
    "left recursion": lambda: Grammar.lark('start: start "," "a" | "a"'),
    "mutual left recursion": lambda: Grammar.lark('start: x\nx: y "b" | "a"\ny: x "c"'),
    "an ambiguous grammar": lambda: Grammar.lark('start: start start | "a"'),
    "a billion leaves": lambda: _doubling(30),
    "a wide anyOf": lambda: {"anyOf": [{"const": f"option {i}"} for i in range(3000)]},
    "a reference to itself below": lambda: {"type": "array", "items": {"$ref": "#"}},
    "the least int64": lambda: {"type": "integer", "minimum": -(2**63), "maximum": -(2**63)},
    "the least int64 as a constant": lambda: {"const": {"a": [-(2**63)]}},
    "the least int64 in Lark": lambda: Grammar.lark('start: "a" %json {"enum": [-9223372036854775808]}'),
    "numbers beyond doubles": lambda: {"type": "integer", "minimum": 10**30, "maximum": 10**30 + 1},
    "a count of 10,000": lambda: Grammar.regex("a{0,10000}"),
}  # fmt: skip
"""Grammars that may be served or refused, but within their time and to nobody's harm."""
