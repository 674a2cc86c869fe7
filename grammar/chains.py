"""The depth to which a grammar library recurses through references, found without recursing ourselves.

Text that nests nowhere can still overflow the library's stack: `a: b`, `b: c`, ... is one call per rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from asyncengine.grammar.schemas import children, resolve

Node = Any


def depth_first(start: Node, neighbours: Callable[[Node], Iterable[tuple[Any, Node]]]) -> int:
    """Length of the longest stack of a depth-first walk that enters each node (by key) once."""
    seen: dict[Any, bool] = {}
    stack = [iter(neighbours(start))]
    longest = 1
    while stack:
        for key, node in stack[-1]:
            if key not in seen:
                seen[key] = True
                stack.append(iter(neighbours(node)))
                longest = max(longest, len(stack))
                break
        else:
            stack.pop()
    return longest


def schema_chain(schema: dict[str, Any]) -> int:
    """Most schemas open at once: nesting and local references together. The worse of two orders of visiting.

    Definitions count where something refers to them.
    """

    def steps(node: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
        target = resolve(schema, node)
        found = [target] if isinstance(target, dict) and target is not node else []
        found += [child for step, child in children(node) if not step.startswith(("/$defs/", "/definitions/"))]
        return [(id(child), child) for child in found]

    return max(depth_first(schema, steps), depth_first(schema, lambda node: reversed(steps(node))))


def rule_chain(rules: Mapping[str, Sequence[str]]) -> int:
    """Most Lark rules open at once, from `start`. `rules`: name -> names in its text."""

    def steps(name: str) -> list[tuple[str, str]]:
        return [(other, other) for other in rules.get(name, ())]

    return max(depth_first("start", steps), depth_first("start", lambda name: reversed(steps(name))))


def lark_rules(tokens: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Rule name -> names it mentions, in order, from a Lark text's tokens. A rule begins `name:` or `name[...]:`."""
    rules: dict[str, list[str]] = {}
    current = rules.setdefault("start", [])
    pending = ""
    for kind, token in tokens:
        if kind == "name":
            if pending:
                current.append(pending)
            pending = token
        elif pending and kind == "other" and token == ":":
            current = rules.setdefault(pending, [])
            pending = ""
        elif pending and not (kind == "other" and token == "["):
            current.append(pending)
            pending = ""
    if pending:
        current.append(pending)
    return rules
