"""Forms of calls that models write where no grammar holds them; each is read the same however it is cut."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from asyncengine.grammar.chat import TOOL_FORMATS, ChatPlanner, OutputParser, Reasoning

from .families import FAMILIES
from .models import ADD, Oracle, tokenizer

STRING, NUMBER, TRUTH, LIST = (frozenset((kind,)) for kind in ("string", "number", "boolean", "array"))
OTHERS = {"o": frozenset(("object", "null")), "either": frozenset(("string", "boolean"))}
TYPES = {"f": {"s": STRING, "n": NUMBER, "b": TRUTH, "l": LIST, **OTHERS}, "g.h": {}}
F, NO = ("f", {"s": "a"}), ("g.h", {})
XML = "<function=f>\n<parameter=s>\na\n</parameter>\n</function>"
KIMI = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
ID = "<|tool_call_begin|>{} <|tool_call_argument_begin|>{}<|tool_call_end|>"
DSML = (
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="n" string="true">7'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>"
)


def raw(key: str, value: str) -> str:
    return f"<tool_call>\n<function=f>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"


def python(arguments: str) -> str:
    return f"<|tool_call_start|>[f({arguments}), g.h()]<|tool_call_end|>"


JSON = [
    ("hermes", '<tool_call>{"arguments": {"s": "a"}, "name": "f"}</tool_call>', [F], ""),
    ("granite", '<|tool_call|>[{"arguments": {"name": "}"}, "name": "f"}]', [("f", {"name": "}"})], ""),
    ("mistral", '[TOOL_CALLS] [{"type": "function", "name": "f", "arguments": {"s": "a"}}]', [F], ""),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"s\\": \\"a\\"}"}</tool_call> so', [F], "so"),
    ("hermes", '<tool_call>{"arguments": "{\\"s\\": \\"a\\"}", "name": "f"}</tool_call>', [F], ""),
    ("granite", '<tool_call>[{"name": "f", "arguments": {"s": "a"}}]', [F], ""),
    ("nemotron", '<TOOLCALL>{"name": "f", "arguments": {"s": "a"}}</TOOLCALL>', [F], ""),
    ("phi4_mini", 'so functools[{"name": "f", "arguments": {"s": "a"}}] end', [F], "so end"),
    ("phi4_mini", "functools is a module", [], "functools is a module"),
    ("llama3", 'so {"name": "f", "parameters": {"s": "a"}}\n{"name": "g.h", "parameters": {}} {1}', [F, NO], "so {1}"),
    (
        "llama3",
        '{"type": "object", "name": "f", "parameters": {}}',
        [],
        '{"type": "object", "name": "f", "parameters": {}}',
    ),
    ("xlam", 'so\n```json\n[{"name": "f", "arguments": {"s": "a"}}]\n```', [F], "so"),
    ("xlam", 'so [TOOL_CALLS][{"name": "f", "arguments": {"s": "a"}}] [TOOL', [F], "so [TOOL"),
    ("xlam", "a [1] ```json\n{}```", [], "a [1] ```json\n{}```"),
    ("jamba", '<tool_calls>[{"name": "f", "arguments": {"s": "a"}}]\n</tool_calls>', [F], ""),
]
NAMED = [
    ("mistral-args", '[TOOL_CALLS]f{"s": "a"}[TOOL_CALLS]g.h{}', [F, NO], ""),
    ("kimi_k2", KIMI.format(ID.format("f:0", '{"s": "a"}') + ID.format("functions.g.h:1", "{}")), [F, NO], ""),
    ("kimi_k2", f"so {KIMI.format(ID.format('0', '{}'))}", [], f"so {KIMI.format(ID.format('0', '{}'))}"),
    ("qwen3_coder", f"so {XML} end", [F], "so end"),
    ("qwen3_coder", f"{XML}\n</tool_call>", [F], ""),
    ("qwen3_coder", raw("s", "a\n<parameter=n>\n7"), [("f", {"s": "a", "n": 7})], ""),
    ("qwen3_coder", raw("b", "True"), [("f", {"b": True})], ""),
    ("qwen3_coder", raw("either", "True"), [("f", {"either": "True"})], ""),
    ("qwen3_coder", raw("o", "{'k': None, 'l': ('a',)}"), [("f", {"o": {"k": None, "l": ["a"]}})], ""),
    ("deepseek_v32", DSML, [("f", {"n": 7})], ""),
    ("deepseek_v32", DSML.replace('"n"', '"s"'), [("f", {"s": "7"})], ""),
]
NOTATION = [
    ("lfm2", python("l=('a', 'b',), n=07"), [("f", {"l": ["a", "b"], "n": 7}), NO], ""),
    ("lfm2", python("l={'a', 1, None}, o={}"), [("f", {"l": ["a", 1, None], "o": {}}), NO], ""),
    ("lfm2", python("s='sed '3p' x', b=True"), [("f", {"s": "sed '3p' x", "b": True}), NO], ""),
    ("lfm2", python("s='f('a'))'"), [("f", {"s": "f('a'))"}), NO], ""),
    ("lfm2", python("n=1e999, s=')'"), [NO], ""),
    ("lfm2", python("s=b'a)'"), [NO], ""),
    ("pythonic", "<|python_start|>[f(s='a')]<|python_end|>", [F], ""),
    ("gemma4", '<|tool_call>call:f{n:<|"|>7<|"|>,s:<|"|>7<|"|>}<tool_call|>', [("f", {"n": 7, "s": "7"})], ""),
    ("functiongemma", "<start_function_call>call:f{s:<escape>a<escape>n:5.}<end_function_call>",
     [("f", {"s": "a", "n": 5.0})], ""),
]  # fmt: skip


def read(parser: OutputParser, pieces: list[str]) -> tuple[list[tuple[str, Any]], str]:
    text = "".join(part.text for part in [*map(parser.push, pieces), parser.finish()])
    return [(call.name, json.loads(call.arguments)) for call in parser.finished_calls()], text


def cuts(text: str) -> list[list[str]]:
    rng = random.Random(len(text))
    places = [sorted(rng.sample(range(len(text)), min(size, len(text)))) for size in (2, 4, 8)]
    return [[text], list(text), *([text[a:b] for a, b in zip([0, *at], [*at, None], strict=True)] for at in places)]


@pytest.mark.parametrize(("form", "text", "calls", "content"), [*JSON, *NAMED, *NOTATION])
def test_read_however_it_is_cut(form: str, text: str, calls: list[Any], content: str) -> None:
    for pieces in cuts(text):
        found, shown = read(OutputParser(TOOL_FORMATS[form], tuple(TYPES), arguments=TYPES), pieces)
        assert (found, "".join(shown.split())) == (calls, "".join(content.split())), pieces


def test_the_only_tool_may_be_called_by_number() -> None:
    text = KIMI.format(ID.format("0", '{"s": "a"}'))
    for pieces in cuts(text):
        parser = OutputParser(TOOL_FORMATS["kimi_k2"], ("f",), arguments=TYPES)
        assert read(parser, pieces) == ([F], "")
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
    assert read(parser, list(text)) == ([("f", {"s": "x" * 5000})], "")
    assert looks < 100


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder", "glm", "kimi_k2"])
def test_a_call_in_thoughts_is_only_thought_of(form: str) -> None:
    own = TOOL_FORMATS[form]
    call = f"{own.trigger}{own.opening}{own.name_open}f{own.name_close}{{}}{own.call_close}".replace("{#}", "0")
    for pieces in cuts(f"I could {call}, but no.</think>No."):
        parser = OutputParser(own, ("f",), reasoning=Reasoning("<think>", "</think>"), state="open")
        assert read(parser, pieces) == ([], "No.")


@pytest.mark.parametrize(
    ("family", "right", "wrong"),
    [
        ("Phi-4 mini", "functools is a module", "so functools[1]"),
        ("Granite 3", "so <tool>", "so <tool_call>"),
        ("Qwen3-Coder", "so <function>", "so <function=add>"),
        ("Llama 3.1", 'so {"name": "Ada"}', 'so {"name": "add", "parameters": {}}'),
        ("xLAM 2", 'so [{"name": "Ada"}]', 'so [{"arguments": {}, "name":"add"}]'),
    ],
)
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
