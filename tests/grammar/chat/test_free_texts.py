"""Forms of calls that models write where no grammar holds them; each is read the same however it is cut."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from support.data import cases_of
from support.tables import table

from asyncengine.grammar.chat import TOOL_FORMATS, ChatPlanner, OutputParser

from .families import FAMILIES
from .models import ADD, Oracle, tokenizer

ROWS: dict[str, Any] = cases_of(__file__)

STRING, NUMBER, TRUTH, LIST = (frozenset((kind,)) for kind in ("string", "number", "boolean", "array"))
OTHERS = {"o": frozenset(("object", "null")), "either": frozenset(("string", "boolean"))}
TYPES = {"f": {"s": STRING, "n": NUMBER, "b": TRUTH, "l": LIST, **OTHERS}, "g.h": {}}
KIMI = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
ID = "<|tool_call_begin|>{} <|tool_call_argument_begin|>{}<|tool_call_end|>"


def raw(key: str, value: str) -> str:
    return f"<tool_call>\n<function=f>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"


def read(parser: OutputParser, pieces: list[str]) -> tuple[list[list[Any]], str]:
    text = "".join(part.text for part in [*map(parser.push, pieces), parser.finish()])
    return [[call.name, json.loads(call.arguments)] for call in parser.finished_calls()], text


def cuts(text: str) -> list[list[str]]:
    rng = random.Random(len(text))
    places = [sorted(rng.sample(range(len(text)), min(size, len(text)))) for size in (2, 4, 8)]
    return [[text], list(text), *([text[a:b] for a, b in zip([0, *at], [*at, None], strict=True)] for at in places)]


@pytest.mark.parametrize(("form", "text", "calls", "content"), table(__file__, "free texts"))
def test_read_however_it_is_cut(form: str, text: str, calls: list[Any], content: str) -> None:
    for pieces in cuts(text):
        found, shown = read(OutputParser(TOOL_FORMATS[form], tuple(TYPES), arguments=TYPES), pieces)
        assert (found, "".join(shown.split())) == (calls, "".join(content.split())), pieces


def test_the_only_tool_may_be_called_by_number() -> None:
    text = KIMI.format(ID.format("0", '{"s": "a"}'))
    for pieces in cuts(text):
        parser = OutputParser(TOOL_FORMATS["kimi_k2"], ("f",), arguments=TYPES)
        assert read(parser, pieces) == ([["f", {"s": "a"}]], "")
        assert [call.id for call in parser.finished_calls()] == ["0"]


def test_long_arguments_before_the_name_take_linear_time() -> None:
    parser = OutputParser(TOOL_FORMATS["granite"], ("f",))
    looks = 0
    begin = parser._read_head

    def counted(form: Any) -> Any:
        nonlocal looks
        looks += 1
        return begin(form)

    parser._read_head = counted  # type: ignore[method-assign]
    text = '<|tool_call|>[{"arguments": {"s": "' + "x" * 5000 + '"}, "name": "f"}]'
    assert read(parser, list(text)) == ([["f", {"s": "x" * 5000}]], "")
    assert looks < 100


@pytest.mark.parametrize(("family", "right", "wrong"), ROWS["text_under_a_grammar_cannot_be_read_as_a_call"])
def test_text_under_a_grammar_cannot_be_read_as_a_call(family: str, right: str, wrong: str) -> None:
    text = tokenizer(FAMILIES[family].template, FAMILIES[family].special)
    plan = ChatPlanner(text).plan("", tools=[ADD])
    assert plan.grammar is not None
    assert Oracle(text).refused_at(plan.grammar, right) is None
    assert Oracle(text).refused_at(plan.grammar, wrong) is not None


def test_a_raw_string_under_a_grammar_cannot_begin_the_next_parameter() -> None:
    text = tokenizer(FAMILIES["Qwen3-Coder"].template, FAMILIES["Qwen3-Coder"].special)
    tool = {"name": "f", "parameters": {"properties": {"s": {"type": "string"}}, "required": ["s"]}}
    plan = ChatPlanner(text).plan("", tools=[tool], tool_choice="required")
    assert plan.grammar is not None
    assert Oracle(text).refused_at(plan.grammar, raw("s", "a <parameter=s>")) is None
    assert Oracle(text).refused_at(plan.grammar, raw("s", "a\n<parameter=s>")) is not None
