"""Differences between llguidance 1.9.1 and JSON Schema, one line each.

LOOSE are texts it lets through although the schema forbids them: faults of the library, or limits it documents. NARROW
are texts it will not write although the schema allows them: no harm, but a teacher-forced check must not use them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Difference:
    name: str
    schema: dict[str, Any]
    text: str
    why: str


INTEGER = {"type": "integer"}
STRING = {"type": "string"}
EXTRA = {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": STRING}
BY_PATTERN = {"type": "object", "patternProperties": {"^a": INTEGER}, "additionalProperties": STRING}
COUNTED = {"type": "object", "additionalProperties": INTEGER, "minProperties": 2}
NOT_QUOTE = "a class that excludes a quote or a backslash but no control character lets both through, escaped"
ESCAPED_KEY = "a key written with \\u escapes is not recognised as the declared one"
TWICE = "keys that are not listed in properties may come twice"

LOOSE = [
    Difference("pattern_not_quote", {"type": "string", "pattern": '^[^"]*$'}, r'"a \" b"', NOT_QUOTE),
    Difference("pattern_not_backslash", {"type": "string", "pattern": r"^[^\\]+$"}, r'"a \\ b"', NOT_QUOTE),
    Difference("pattern_file_name", {"type": "string", "pattern": r'^[^/:*?"<>|\\]+$'}, r'"a\"b"', NOT_QUOTE),
    Difference(
        "key_pattern_not_quote",
        {"type": "object", "patternProperties": {'^[^"]+$': INTEGER}, "additionalProperties": False},
        r'{"a\"": 1}',
        NOT_QUOTE,
    ),
    Difference("escaped_key", EXTRA, r'{"\u0061": "x"}', ESCAPED_KEY),
    Difference("escaped_key_after_plain", EXTRA, r'{"a": 1, "\u0061": "x"}', ESCAPED_KEY),
    Difference("escaped_key_of_pattern", BY_PATTERN, r'{"\u0061b": "x"}', ESCAPED_KEY),
    Difference("extra_key_twice", EXTRA, '{"b": "x", "b": "y"}', TWICE),
    Difference("key_twice_to_fill_up", COUNTED, '{"b": 1, "b": 2}', TWICE),
    Difference("leap_day", {"type": "string", "format": "date"}, '"2023-02-29"', "29 February in every year"),
    Difference("leap_day_and_time", {"type": "string", "format": "date-time"}, '"2023-02-29T00:00:00Z"', "29 February"),
    Difference(
        "long_host", {"type": "string", "format": "hostname"}, f'"{".".join(["a" * 60] * 5)}"', "labels count, not all"
    ),
]

TWO = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}}

NARROW = [
    Difference("integer_as_decimal", INTEGER, "1.0", "integers have no fraction"),
    Difference("integer_with_exponent", INTEGER, "1e2", "integers have no exponent"),
    Difference("bounded_exponent", {"type": "number", "minimum": 0}, "1e-06", "bounded numbers have no exponent"),
    Difference("multiple_exponent", {"type": "number", "multipleOf": 0.5}, "1e3", "multiples have no exponent"),
    Difference("constant_as_decimal", {"const": 1}, "1.0", "constants are written as in the schema"),
    Difference("constant_key_order", {"const": {"b": 1, "a": 2}}, '{"a": 2, "b": 1}', "as in the schema"),
    Difference("property_order", TWO, '{"b": 1, "a": 2}', "properties come in the schema's order"),
    Difference("escaped_letter", STRING, r'"\u0041"', "only control characters are escaped as \\u"),
    Difference("escaped_slash", STRING, r'"\/"', "a slash is not escaped"),
    Difference("raw_delete", STRING, '"\x7f"', "DEL is escaped as \\u007f"),
    Difference("space_before", INTEGER, " 1", "no space before the value"),
    Difference("newline_after", TWO, "{}\n", "no space after the value"),
    Difference("two_spaces", TWO, '{"a":  1}', "the bounded whitespace"),
    Difference("deep_indent", TWO, "{\n" + " " * 41 + '"a": 1}', "the bounded whitespace"),
]
