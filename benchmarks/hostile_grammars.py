"""Grammars made to hurt whoever compiles or follows them: data only. `CASES` maps names to functions that make one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncengine.grammar import Grammar

EXPONENTIAL = r"(a|a|aa|b?)*" * 20 + "c"
"""Ways to match a text grow exponentially with its length; a backtracking matcher never ends."""


def refs(count: int) -> dict[str, Any]:
    """Definitions, each referring to the next."""
    definitions: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{count}": {"type": "integer"}}}


def doubling(count: int) -> dict[str, Any]:
    """Each definition holds the next one twice, so that an expansion has two to the power of `count` parts."""
    definitions: dict[str, Any] = {}
    for i in range(count):
        both = {key: {"$ref": f"#/$defs/d{i + 1}"} for key in ("left", "right")}
        definitions[f"d{i}"] = {"type": "object", "properties": both, "required": ["left", "right"]}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{count}": {"type": "integer"}}}


def nested(depth: int) -> dict[str, Any]:
    here: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        here = {"type": "array", "items": here}
    return here


def enum(size: int) -> dict[str, Any]:
    return {"enum": [f"x{i:09}" * 10 for i in range(size // 100)]}


def optional(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}


def crossed(count: int) -> dict[str, Any]:
    """Patterns whose conjunction has as many states as the product of theirs."""
    primes = (7, 11, 13, 17, 19, 23, 29, 31, 37, 41)[:count]
    return {"allOf": [{"type": "string", "pattern": f"^(a{{{prime}}})+$"} for prime in primes]}


CASES: dict[str, Callable[[], Any]] = {
    "60,000 nested groups": lambda: Grammar.regex("(" * 60_000 + "a" + ")" * 60_000),
    "60,000 nested groups in Lark": lambda: Grammar.lark("start: " + "(" * 60_000 + '"a"' + ")" * 60_000),
    "60 nested groups, each repeated": lambda: Grammar.regex("(" * 60 + "a" + ")*" * 60),
    "ambiguous (a|a|aa|b?)* x 20": lambda: Grammar.regex(EXPONENTIAL),
    "ambiguous (a|a|aa|b?)*{30}": lambda: Grammar.regex("(?:(?:a|a|aa|b?)*){30}c"),
    "ambiguous, repeated 10,000 times": lambda: Grammar.regex("(a|a|aa|b?){10000}"),
    "exponential automaton .*a.{40}": lambda: Grammar.regex(".*a.{40}"),
    "exponential automaton .*a.{2000}": lambda: Grammar.regex(".*a.{2000}b"),
    "repetition of repetitions": lambda: Grammar.regex("((a{100}){100}){100}"),
    "optional repetitions (a{0,1000}){0,1000}": lambda: Grammar.regex("(?:a{0,1000}){0,1000}"),
    "enum of 10 MB": lambda: Grammar.json_schema(enum(10 << 20)),
    "enum of 10 MB, as a dict": lambda: enum(10 << 20),
    "enum of 900 kB": lambda: Grammar.json_schema(enum(900_000)),
    "enum of 900 kB, as a dict": lambda: enum(900_000),
    "$ref chain of 15,000": lambda: Grammar.json_schema(refs(15_000)),
    "$ref chain of 250": lambda: Grammar.json_schema(refs(250)),
    "$ref doubling, 30 levels": lambda: Grammar.json_schema(doubling(30)),
    "$ref doubling, 12 levels": lambda: Grammar.json_schema(doubling(12)),
    "arrays in arrays, 400 deep": lambda: nested(400),
    "arrays in arrays, 30 deep": lambda: Grammar.json_schema(nested(30)),
    "10,000 optional properties": lambda: Grammar.json_schema(optional(10_000)),
    "crossed patterns": lambda: Grammar.json_schema(crossed(10)),
    "multipleOf of large primes": lambda: Grammar.json_schema({"allOf": [{"multipleOf": p} for p in (997, 991, 983)]}),
    "Lark: 50,000 alternatives": lambda: Grammar.lark("start: " + " | ".join(f'"a{i}"' for i in range(50_000))),
    "Lark: ambiguous s: s s | s s s | 'a' |": lambda: Grammar.lark('start: s "c"\ns: s s | s s s | "a" |\n'),
    "Lark: endless s: s": lambda: Grammar.lark("start: s\ns: s\n"),
    "no output: minLength 5, maxLength 3": lambda: Grammar.json_schema(
        {"type": "string", "minLength": 5, "maxLength": 3}
    ),
}
"""Some are harmless after all: what matters is that none takes long or takes others down."""
