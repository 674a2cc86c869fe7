"""Lowering: whitespace, exact choices, embedded schemas, and what `unsupported` leaves out."""

from __future__ import annotations

import json
from typing import Any, get_args

import jsonschema
import pytest
from support.data import cases_of

from asyncengine.grammar import Grammar
from asyncengine.grammar.lower import fragment, inline_json
from asyncengine.grammar.spec import Whitespace

from .oracle import accepts, complaint

ROWS: dict[str, Any] = cases_of(__file__)

VALUE = {"a": 1, "b": [1, {"c": "x, y: z"}], "d": {}}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array"}, "d": {"type": "object"}},
    "required": ["a", "b", "d"],
    "additionalProperties": False,
}
TEXTS = {
    "default": json.dumps(VALUE),
    "compact": json.dumps(VALUE, separators=(",", ":")),
    "indented": json.dumps(VALUE, indent=2),
    "tabs": json.dumps(VALUE, indent="\t"),
    "indented deep": json.dumps(VALUE, indent=13),
    "two spaces": json.dumps(VALUE).replace(": ", ":  "),
    "blank line": json.dumps(VALUE, indent=2).replace("\n", "\n\n"),
    "indented too deep": json.dumps(VALUE, indent=41),
    "space, newline": json.dumps(VALUE).replace(", ", ", \n"),
    "trailing": json.dumps(VALUE) + "\n",
}
ACCEPTED = {
    "flexible": ["default", "compact", "indented", "tabs", "indented deep"],
    "single_space": ["default"],
    "compact": ["compact"],
}


@pytest.mark.parametrize("whitespace", get_args(Whitespace))
def test_whitespace(whitespace: Any) -> None:
    """`single_space` is what `json.dumps` writes, no more; nothing lets a model run on in blanks, in Lark neither."""
    grammar = Grammar.json_schema(SCHEMA, whitespace=whitespace)
    inside = Grammar.lark(f'start: "<" {inline_json(SCHEMA, whitespace)} ">"\n')
    assert [name for name, text in TEXTS.items() if accepts(grammar, text)] == ACCEPTED[whitespace]
    assert [name for name, text in TEXTS.items() if accepts(inside, f"<{text}>")] == ACCEPTED[whitespace]


def test_inline_json_takes_text_booleans_and_options() -> None:
    assert inline_json('{"type":"integer"}') == inline_json({"type": "integer"})
    assert accepts(Grammar.lark(f"start: {inline_json(True)}\n"), "[1]")
    loose = inline_json({"type": "array"}, whitespace_pattern=" *")
    assert accepts(Grammar.lark(f"start: {loose}\n"), "[     1]")
    two = inline_json({"x-guidance": {"lenient": True, "whitespace_flexible": False}, "type": "array"}, "compact")
    assert '"lenient":false' in two


OPTIONS = ["not", "not enough", "", 'say "hi"\\', "日本\n", "/", "{a}", "%json", "é", "a|b", "\x7f\x01"]


def test_choices_are_exact() -> None:
    grammar = Grammar.choice(OPTIONS)
    pieces = [option[:cut] for option in OPTIONS for cut in range(len(option) + 1)] + [o + "x" for o in OPTIONS]
    wrong = [text for text in pieces if accepts(grammar, text) != (text in OPTIONS)]
    assert wrong == []
    assert accepts(Grammar.lark(f'start: "<" {fragment(grammar)} ">"\n'), "<not enough>")


@pytest.mark.parametrize("text", ["/", "a/b", "\n", "\\", '"', "[/]", "{}", "é😀", "\r\n\t", "//", "# x"])
def test_patterns_survive_the_way_into_lark(text: str) -> None:
    from asyncengine.grammar.regexes import escaped

    for grammar in (
        Grammar.regex(escaped(text)),
        Grammar.regex("[" + "".join("\\" + c for c in text if c in "/") + "a]|"),
    ):
        assert complaint(grammar) == ""
    assert accepts(Grammar.regex(escaped(text)), text)
    assert not accepts(Grammar.regex(escaped(text)), text + "x")
    assert accepts(Grammar.lark(f'start: "<" {fragment(Grammar.regex(escaped(text)))} ">"'), f"<{text}>")


@pytest.mark.parametrize(("schema", "values"), ROWS["keywords_without_effect_are_dropped_exactly"])
def test_keywords_without_effect_are_dropped_exactly(schema: dict[str, Any], values: list[Any]) -> None:
    grammar = Grammar.json_schema(schema)
    expected = [jsonschema.Draft202012Validator(schema).is_valid(value) for value in values]
    assert [accepts(grammar, json.dumps(value)) for value in values] == expected


@pytest.mark.parametrize(("schema", "value"), ROWS["ignore_leaves_out_what_error_refuses"])
@pytest.mark.parametrize("unsupported", ["ignore", "validate"])
def test_ignore_leaves_out_what_error_refuses(schema: dict[str, Any], value: Any, unsupported: Any) -> None:
    assert complaint(Grammar.json_schema(schema)) != ""
    lenient = Grammar.json_schema(schema, unsupported=unsupported)
    assert complaint(lenient) == ""
    assert accepts(lenient, json.dumps(value))
