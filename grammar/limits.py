"""Bounds on a grammar's size and nesting, checked on the caller's thread before any library sees it.

Where llguidance 1.9.1 overflows its stack without them, measured on x86-64 Linux:

| input | stack of 8 MiB | 1 MiB | 512 KiB |
| --- | --- | --- | --- |
| rules `r0: r1`, `r1: r2`, ... | SIGSEGV at 2,600 to 3,200 | 300 to 500 | 150 to 200 |
| terminals likewise | 3,200 to 4,000 | 300 to 500 | 200 to 300 |
| `$ref` to `$ref` | 2,000 to 2,600 | 200 to 300 | 100 to 150 |
| `$ref` through `items` or `anyOf` (2 schemas each) | 800 to 1,100 | 100 to 150 | 50 to 100 |

Nesting in the text itself is refused by the library: regex groups from 250, brackets of a schema from 127, Lark
parentheses from about 30. Time: a forced text (literal, `const`, `a{n}`) of 65,536 characters takes 38 ms at its first
mask, of 200,000 145 ms, of more ends with "too many expressions" in mid-output; `multipleOf` 100,003 takes 0.15 s,
999,983 6 s and 413 MB. Width is slow but bounded: 50,000 Lark alternatives 1.4 s, 5,000 optional properties 1.2 s.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from asyncengine.errors import GrammarTooLarge
from asyncengine.grammar.lark import tokenize
from asyncengine.grammar.regexes import scan
from asyncengine.grammar.schemas import children, resolve, subschemas
from asyncengine.grammar.spec import Grammar, parse_json

MAX_CHAIN = 256
"""Most rules or schemas open at once, counted through references: a seventh of what overflows 8 MiB."""
MAX_LEVELS = 16_000
"""Most rules and groups in one Lark text, all of which might be open at once: then three quarters of a compiling
thread's stack (`service.STACK_BYTES`) are used."""
MAX_REPEAT = 10_000
"""Largest count in `{m,n}`, `minItems` and `minProperties`."""
MAX_OPTIONAL = 2_000
"""Most optional properties of one object; 10,000 keep a worker busy for 39 s."""
MAX_PATTERNS = 250
"""Most patterns in the `patternProperties` of one object: each is written with all others excluded, so that 1,000 keep
a worker busy for 5 s, in which the library cannot be stopped, and 4,000 for 80."""
MAX_LEFT_OUT = 2_000
"""Most optional or repeated items of one pattern or one Lark text: of 20,000 in a row (`a?a?...`) a mask takes 20 s and
1.6 GB, in the thread that all outputs wait for, of 5,000 2 s; 2,000 are refused by the library in 0.3 s."""
MAX_ALTERNATIVES = 20_000
"""Most bars in one Lark text; 50,000 keep a worker busy for 8 s."""
MAX_LITERAL = 64 << 10
"""Longest forced text (a literal, a key, a `const`, the shortest match of a pattern), and largest `minLength`: the
library searches a forced text of 10**6 characters for a second and does not reach its end."""
MAX_MULTIPLE = 100_000
"""Largest common multiple of a schema's `multipleOf` (powers of ten are cheap and exempt)."""

_SHORT = {"*": "0", "?": "0", "+": "1"}
"""The least count of the short repetitions."""
_LEAST = (("minLength", MAX_LITERAL), ("minItems", MAX_REPEAT), ("minProperties", MAX_REPEAT))


def check_limits(
    grammar: Grammar, *, max_bytes: int = 1 << 20, max_depth: int = 64, max_regex: int = 64 << 10,
    max_regex_depth: int = 64, max_choices: int = 10_000,
) -> None:  # fmt: skip
    """Raise `GrammarTooLarge` naming the limit. Linear in the text, no recursion; safe for hostile input.

    `max_bytes`: UTF-8 bytes of the text. `max_depth`: brackets of JSON, parentheses of Lark. `max_regex` and
    `max_regex_depth`: characters and groups of each pattern. `max_choices`: options of a choice.
    """
    text = grammar.text
    if len(text) > max_bytes or len(text.encode("utf-8", "replace")) > max_bytes:
        raise _too_large("its text", f"{max_bytes} bytes (max_grammar_bytes)", len(text))
    check = PatternLimits(max_regex, max_regex_depth)
    if grammar.kind == "regex":
        check.pattern(text)
    elif grammar.kind == "choice":
        options = parse_json(text)
        if len(options) > max_choices:
            raise _too_large("a choice", f"{max_choices} options", len(options))
        if len(text) > MAX_LITERAL:
            check.literal(max(options, key=len))
    elif grammar.kind == "json_schema":
        _check_schema(text, max_depth, check)
    else:
        _check_lark(text, max_depth, check)


def _too_large(what: str, limit: str, value: object = None) -> GrammarTooLarge:
    return GrammarTooLarge("grammar", f"{what} must not exceed {limit}", value)


class PatternLimits:
    """Checks patterns and literals against `max_regex` characters and `max_depth` nested groups."""

    def __init__(self, max_regex: int, max_depth: int) -> None:
        self._max_regex = max_regex
        self._max_depth = max_depth

    def literal(self, text: str) -> None:
        if len(text) > MAX_LITERAL:
            raise _too_large("a literal text", f"{MAX_LITERAL} characters", len(text))

    def pattern(self, pattern: str, fewest: int = 0) -> int:
        """Check size, nesting and counts, and return the length of the shortest match, in which the longest alternative
        counts. `fewest`: the times that optional items count. Raises `GrammarTooLarge`."""
        if len(pattern) > self._max_regex:
            raise _too_large("a pattern", f"{self._max_regex} characters", len(pattern))
        # Per open group: (longest alternative so far, this alternative so far, its last item).
        groups = [(0, 0, 0)]
        left_out = 0
        for kind, token in scan(pattern):
            best, done, last = groups[-1]
            if kind == "open":
                groups.append((0, 0, 0))
                if len(groups) > self._max_depth + 1:
                    raise _too_large("a pattern", f"{self._max_depth} nested groups", len(groups) - 1)
            elif kind == "close" and len(groups) > 1:
                length = max(best, done + last)
                groups.pop()
                best, done, last = groups[-1]
                groups[-1] = (best, done + last, length)
            elif kind == "bar":
                groups[-1] = (max(best, done + last), 0, 0)
            elif kind == "quant":
                low, _, high = _SHORT.get(token[0], token.rstrip("?+").strip("{}")).partition(",")
                _count(high or "0")
                least = _count(low or "0")
                left_out += not least
                groups[-1] = (best, done, last * max(least, fewest))
            elif kind != "flags" and token not in ("^", "$"):
                groups[-1] = (best, done + last, 1)
            if groups[-1][1] + groups[-1][2] > MAX_LITERAL:
                raise _too_large("the shortest match of a pattern", f"{MAX_LITERAL} characters")
        if left_out > MAX_LEFT_OUT:
            raise _too_large("a pattern", f"{MAX_LEFT_OUT} items that may be left out", left_out)
        best, done, last = groups[0]
        return max(best, done + last)


def _count(digits: str) -> int:
    if len(digits) > 9 or int(digits) > MAX_REPEAT:
        raise _too_large("a repetition", f"{MAX_REPEAT} times", digits)
    return int(digits)


def _check_schema(text: str, max_depth: int, check: PatternLimits) -> None:
    schema = parse_json(text)
    _check_tree(schema, max_depth, check, long=len(text) > MAX_LITERAL)
    multiple = 1
    for _, node in subschemas(schema):
        values = (node.get(key) for key in ("patternProperties", "properties", "x-guidance"))
        keys, properties, options = (value if isinstance(value, dict) else {} for value in values)
        for pattern in (node.get("pattern"), *keys, *options.values()):
            if isinstance(pattern, str):
                check.pattern(pattern)
        if "multipleOf" in node:
            multiple = _multiple(multiple, node["multipleOf"])
        for keyword, most in _LEAST:
            least = node.get(keyword)
            if isinstance(least, (int, float)) and least > most:
                raise _too_large(keyword, str(most), least)
        if len(keys) > MAX_PATTERNS:
            raise _too_large("an object", f"{MAX_PATTERNS} patternProperties", len(keys))
        required = node.get("required")
        if (optional := len(properties) - (len(required) if isinstance(required, list) else 0)) > MAX_OPTIONAL:
            raise _too_large("an object", f"{MAX_OPTIONAL} optional properties", optional)

    def successors(node: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
        """(key, schema) of those that a recursive reader enters from `node`. Definitions count where referred to."""
        target = resolve(schema, node)
        found = [target] if isinstance(target, dict) and target is not node else []
        found += [child for step, child in children(node) if not step.startswith(("/$defs/", "/definitions/"))]
        return [(id(child), child) for child in found]

    if isinstance(schema, dict) and '"$ref"' in text and text.count("{") >= MAX_CHAIN < _chain(schema, successors):
        raise _too_large("nesting through $ref", f"{MAX_CHAIN} schemas")


def _multiple(so_far: int, value: Any) -> int:
    """The common multiple with the numerator of `value`: the states of an automaton for both at once."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        return so_far
    numerator = Fraction(str(value) if isinstance(value, float) else value).numerator
    if re.fullmatch("10*", str(numerator) if numerator < 10**400 else "0"):
        return so_far
    common = math.lcm(so_far, numerator)
    if common > MAX_MULTIPLE:
        raise _too_large("the common multiple of multipleOf", str(MAX_MULTIPLE), value)
    return common


def _check_tree(value: Any, max_depth: int, check: PatternLimits, long: bool) -> None:
    """Check the nesting and, of a `long` text, the length of keys and of strings in const and enum."""
    stack = [(value, 1, False)]
    while stack:
        node, depth, forced = stack.pop()
        if forced and isinstance(node, str):
            check.literal(node)
        if not isinstance(node, (dict, list)):
            continue
        if depth > max_depth:
            raise _too_large("JSON", f"{max_depth} levels of nesting (max_grammar_depth)", depth)
        if isinstance(node, list):
            stack.extend([(child, depth + 1, forced) for child in node])
            continue
        for key in node if long else ():
            check.literal(key)
        stack.extend([(child, depth + 1, forced or key in ("const", "enum")) for key, child in node.items()])


def _check_lark(text: str, max_depth: int, check: PatternLimits) -> None:
    tokens = [(kind, token) for kind, token, _ in tokenize(text)]
    if (alternatives := sum(token == "|" for _, token in tokens)) > MAX_ALTERNATIVES:
        raise _too_large("Lark", f"{MAX_ALTERNATIVES} alternatives", alternatives)
    left_out = sum(token in ("?", "*", "[") for kind, token in tokens if kind == "other")
    if left_out > MAX_LEFT_OUT:
        raise _too_large("Lark", f"{MAX_LEFT_OUT} items that may be left out", left_out)
    depth = 0
    mentioned: list[str] = []  # names, in order, in the rule that is read
    rules = {"start": mentioned}
    texts = [token for _, token in tokens]
    for previous, (kind, token), following in zip(["", *texts], tokens, [*texts[1:], ""], strict=False):
        if kind == "json":
            _check_schema(token, max_depth, check)
        elif kind == "regex":
            check.pattern(token[1:].rpartition("/")[0])
        elif kind == "string":
            check.literal(token)
        elif kind == "number" and previous in ("{", ",", "~"):
            _count(token)
        elif kind == "name" and following == ":":
            mentioned = rules.setdefault(token, [])
        elif kind == "name":
            mentioned.append(token)
        elif kind == "other":
            depth += (token in "([{") - (token in ")]}")
            if depth > max_depth:
                raise _too_large("Lark", f"{max_depth} levels of nesting (max_grammar_depth)", depth)
    if (levels := len(rules) + sum(token in ("(", "[") for _, token in tokens)) > MAX_LEVELS:
        raise _too_large("Lark", f"{MAX_LEVELS} rules and groups", levels)
    if _chain("start", lambda name: [(other, other) for other in rules.get(name, ())]) > MAX_CHAIN:
        raise _too_large("rules that begin one another", f"{MAX_CHAIN} rules in a chain")


def _chain(start: Any, successors: Callable[[Any], Sequence[tuple[Any, Any]]]) -> int:
    """Depth of a depth-first walk that enters each node (by key) once, in the worse of two orders: the depth to which
    the library recurses through references. `a: b`, `b: c`, ... nests nowhere in the text and is one call per rule."""
    longest = 1
    known: dict[Any, Sequence[tuple[Any, Any]]] = {}
    for order in (1, -1):
        seen = set[Any]()
        stack = [iter(successors(start)[::order])]
        while stack:
            for key, node in stack[-1]:
                if key not in seen:
                    seen.add(key)
                    if key not in known:
                        known[key] = successors(node)
                    stack.append(iter(known[key][::order]))
                    longest = max(longest, len(stack))
                    break
            else:
                stack.pop()
    return longest
