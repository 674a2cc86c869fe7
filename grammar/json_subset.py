"""JSON schemas that a regular expression can express exactly; all others are refused by name.

Not `outlines_core.json_schema`: of 43 probes it gets 34 wrong, most of them silently. Only the keywords below are
taken; each means what JSON Schema 2020-12 says. The texts are a subset of the valid ones in three ways: properties
come in the schema's order, an integer has no fraction or exponent, and the letters of names, `enum` and `const` are
not escaped without need. Every valid value has a text but for duplicate or reordered keys.
"""

from __future__ import annotations

import json
import math
from typing import Any
from urllib.parse import unquote

from asyncengine.errors import GrammarError, GrammarImpossible, GrammarTooLarge, GrammarUnsupported
from asyncengine.grammar import numbers
from asyncengine.grammar.json_values import IS_TYPE, count, is_number, limits, same, types
from asyncengine.grammar.patterns import either, literal
from asyncengine.grammar.schemas import escape, resolve

ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "$defs", "definitions", "$schema", "$comment")
)  # say nothing about what is valid
KEYWORDS = frozenset((
    "type", "properties", "required", "additionalProperties", "enum", "const", "items", "minItems", "maxItems", "anyOf",
    "$ref", "minLength", "maxLength", *numbers.KEYWORDS,
))  # fmt: skip
MAX_PATTERN = 1 << 20
"""Characters. References may be expanded exponentially often."""
MAX_DEPTH = 64
MAX_INDENTATION = 40

HEX = "[0-9a-fA-F]"
HIGH = f"[dD][89abAB]{HEX}{{2}}"
LOW = f"[dD][c-fC-F]{HEX}{{2}}"
BASIC = f"(?:[0-9abcefABCEF]{HEX}{{3}}|[dD][0-7]{HEX}{{2}})"
CHAR = rf'(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u{BASIC}|\\u{HIGH}\\u{LOW})'
"""One character of a JSON string (RFC 8259); surrogates only in pairs, which count as one character."""

Pattern = str | None
"""None: no text matches."""


def schema_pattern(schema: Any, whitespace: str = "flexible") -> str:
    """The texts of the JSON values that are valid under `schema`. `whitespace` as in `Grammar`; "flexible" allows up
    to four blanks of indentation per level, 40 at most, and none before commas and colons.

    Raises `GrammarUnsupported` naming every keyword it does not know with its JSON pointer, `GrammarImpossible`,
    `GrammarTooLarge`, and `GrammarError` for a malformed schema.
    """
    builder = Builder(schema, whitespace)
    pattern = builder.build(schema, "", 0, ())
    if builder.unsupported:
        advice = "outlines_core takes few keywords; schemas need a type, objects additionalProperties: false"
        raise GrammarUnsupported("grammar", builder.unsupported, advice)
    if pattern is None:
        detail = f"; there is no {builder.empty[0]}" if builder.empty else ""
        raise GrammarImpossible("grammar", f"no JSON value is valid under this schema{detail}")
    return pattern


class Builder:
    """One schema on its way to a pattern. What is not supported is collected, so that all of it is named at once."""

    def __init__(self, root: Any, whitespace: str) -> None:
        self.root = root
        self.whitespace = whitespace
        self.unsupported: list[tuple[str, str]] = []
        self.empty: list[str] = []
        """Bounds that no number keeps."""
        self._known: dict[tuple[str, int], Pattern] = {}

    def build(self, schema: Any, at: str, depth: int, refs: tuple[str, ...]) -> Pattern:
        """`at`: JSON pointer of `schema`; `depth`: of its value; `refs`: references being expanded."""
        if depth > MAX_DEPTH:
            raise GrammarTooLarge("grammar", f"its nesting exceeds {MAX_DEPTH} levels")
        if isinstance(schema, bool):
            return self._refuse("true" if schema else "false", at)
        if not isinstance(schema, dict):
            raise GrammarError("grammar", f"the schema at {at or '/'} must be an object", schema)
        unknown = [key for key in schema if key not in KEYWORDS | ANNOTATIONS]
        for key in unknown:
            self._refuse(key, f"{at}/{escape(key)}")
        for key, method in (("$ref", self._ref), ("anyOf", self._any_of)):
            if key in schema:
                others = [other for other in schema if other in KEYWORDS and other != key]
                for other in others:
                    self._refuse(other, f"{at}/{escape(other)}")  # both must hold: no regular expression says that
                return None if others else method(schema, at, depth, refs)
        if "enum" in schema or "const" in schema:
            return self._values(schema, at, depth)
        if "type" not in schema:
            return None if unknown else self._refuse("type", at)
        found = [self._of_type(name, schema, at, depth, refs) for name in types(schema, at)]
        return self._either(found)

    def _refuse(self, keyword: str, pointer: str) -> Pattern:
        if (keyword, pointer) not in self.unsupported:
            self.unsupported.append((keyword, pointer))
        return None

    def _ref(self, schema: dict[str, Any], at: str, depth: int, refs: tuple[str, ...]) -> Pattern:
        ref = schema["$ref"]
        if not isinstance(ref, str):
            raise GrammarError("grammar", f"$ref at {at or '/'} must be text", ref)
        if ref in refs or not (ref == "#" or ref.startswith("#/")):
            return self._refuse("$ref", f"{at}/$ref")  # recursive, or in another document
        key = (ref, self._indentation(depth))
        if key not in self._known:
            target = resolve(self.root, schema)
            if target is None:
                raise GrammarError("grammar", f"$ref {ref!r} points nowhere")
            self._known[key] = self.build(target, unquote(ref[1:]), depth, (*refs, ref))
        return self._known[key]

    def _any_of(self, schema: dict[str, Any], at: str, depth: int, refs: tuple[str, ...]) -> Pattern:
        branches = schema["anyOf"]
        if not isinstance(branches, list) or not branches:
            raise GrammarError("grammar", f"anyOf at {at or '/'} must be a list with at least one schema", branches)
        return self._either([self.build(b, f"{at}/anyOf/{i}", depth, refs) for i, b in enumerate(branches)])

    def _values(self, schema: dict[str, Any], at: str, depth: int) -> Pattern:
        for key in schema:
            if key in KEYWORDS and key not in ("enum", "const", "type", *numbers.KEYWORDS):
                self._refuse(key, f"{at}/{escape(key)}")
        values = schema.get("enum", [schema.get("const")])
        if not isinstance(values, list):
            raise GrammarError("grammar", f"enum at {at or '/'} must be a list", values)
        if "const" in schema:
            values = [value for value in values if same(value, schema["const"])]
        if "type" in schema:
            names = types(schema, at)
            values = [value for value in values if any(IS_TYPE[name](value) for name in names)]
        bounds = numbers.of_schema(schema, at)
        values = [value for value in values if not is_number(value) or bounds.holds(numbers.exact(value, at))]
        return self._either([self._literal(value, depth) for value in values])

    def _literal(self, value: Any, depth: int) -> str:
        if isinstance(value, dict):
            members = [self._member(key, self._literal(item, depth + 1)) for key, item in value.items()]
            return self._enclosed("{", self._comma(depth + 1).join(members), "}", depth)
        if isinstance(value, list):
            items = [self._literal(item, depth + 1) for item in value]
            return self._enclosed("[", self._comma(depth + 1).join(items), "]", depth)
        if isinstance(value, float) and not math.isfinite(value):
            raise GrammarError("grammar", "numbers in enum and const must be finite", value)
        return literal(json.dumps(value, ensure_ascii=False))

    def _of_type(self, name: str, schema: dict[str, Any], at: str, depth: int, refs: tuple[str, ...]) -> Pattern:
        if name == "object":
            return self._object(schema, at, depth, refs)
        if name == "array":
            return self._array(schema, at, depth, refs)
        if name == "string":
            bounds = limits(schema, "minLength", "maxLength", at)
            return None if bounds is None else f'"{CHAR}{bounds}"'
        if name in ("integer", "number"):
            return self._number(numbers.of_schema(schema, at, integer=name == "integer"), at)
        return {"boolean": "(?:true|false)", "null": "null"}[name]

    def _number(self, wanted: numbers.Numbers, at: str) -> Pattern:
        if wanted.empty:
            self.empty.append(f"{wanted} (at {at or '/'})")
            return None
        # outlines_core 0.2.14 visits a chain of counted digits 2**n times: numbers without bounds stay without
        patterns = wanted.spelling(at, None).patterns
        return patterns[0] if len(patterns) == 1 else self._refuse("multipleOf", f"{at}/multipleOf")

    def _array(self, schema: dict[str, Any], at: str, depth: int, refs: tuple[str, ...]) -> Pattern:
        bounds = limits(schema, "minItems", "maxItems", at)
        if "items" not in schema:
            return self._refuse("items", at)
        item = self.build(schema["items"], f"{at}/items", depth + 1, refs)
        if bounds is None:
            return None
        least, most = count(schema, "minItems", at) or 0, count(schema, "maxItems", at)
        empty = self._enclosed("[", "", "]", depth)
        if item is None or most == 0:
            return empty if least == 0 else None
        more = f"{{{max(0, least - 1)},{'' if most is None else most - 1}}}"
        filled = self._enclosed("[", f"{item}(?:{self._comma(depth + 1)}{item}){more}", "]", depth)
        return self._either([empty, filled]) if least == 0 else filled

    def _object(self, schema: dict[str, Any], at: str, depth: int, refs: tuple[str, ...]) -> Pattern:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise GrammarError("grammar", f"properties and required at {at or '/'} must be an object and a list")
        if schema.get("additionalProperties") is not False:
            self._refuse("additionalProperties", at)
        if any(name not in properties for name in required):
            self._refuse("required", f"{at}/required")  # asks for what additionalProperties forbids
        members: list[tuple[str, bool]] = []
        for name, value in properties.items():
            inner = self.build(value, f"{at}/properties/{escape(name)}", depth + 1, refs)
            if inner is not None:
                members.append((self._member(name, inner), name in required))
            elif name in required:
                return None
        empty = self._enclosed("{", "", "}", depth)
        if not members:
            return empty
        filled = self._enclosed("{", in_order(members, self._comma(depth + 1)), "}", depth)
        return filled if any(needed for _, needed in members) else self._either([empty, filled])

    def _member(self, name: str, value: str) -> str:
        colon = {"flexible": ": ?", "single_space": ": ", "compact": ":"}[self.whitespace]
        return literal(json.dumps(name, ensure_ascii=False)) + colon + value

    def _comma(self, depth: int) -> str:
        return ", " if self.whitespace == "single_space" else "," + self._blank(depth)

    def _blank(self, depth: int) -> str:
        """The space that may stand before a value, a name or a closing bracket on its own line at `depth`."""
        if self.whitespace != "flexible":
            return ""
        return rf"(?: |\n[ \t]{{0,{self._indentation(depth)}}})?"

    def _indentation(self, depth: int) -> int:
        return min(4 * depth, MAX_INDENTATION)

    def _enclosed(self, left: str, inner: str, right: str, depth: int) -> str:
        before = self._blank(depth + 1) if inner else ""
        pattern = f"{literal(left)}{before}{inner}{self._blank(depth)}{literal(right)}"
        if len(pattern) > MAX_PATTERN:
            raise self._too_large()
        return pattern

    def _either(self, patterns: list[Pattern]) -> Pattern:
        found = [pattern for pattern in patterns if pattern is not None]
        pattern = either(found) if found else None
        if pattern is not None and len(pattern) > MAX_PATTERN:
            raise self._too_large()
        return pattern

    def _too_large(self) -> GrammarTooLarge:
        return GrammarTooLarge("grammar", f"its pattern for outlines_core exceeds {MAX_PATTERN:,} characters")


def in_order(members: list[tuple[str, bool]], comma: str) -> str:
    """At least one of the members, those marked always, in order with commas between.

    Each occurs twice at most: an automaton that is not minimized has a state for every occurrence.
    """
    found = ""
    certain = False  # a member that is always there was met
    for text, needed in members:
        if not found:
            found = text
        elif certain:
            found += f"{comma}{text}" if needed else f"(?:{comma}{text})?"
        elif needed:
            found = f"(?:{found}{comma})?{text}"
        else:
            found = f"(?:{found}(?:{comma}{text})?|{text})"
        certain = certain or needed
    return found
