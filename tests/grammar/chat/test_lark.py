"""Grammars of whole answers, against llguidance itself, token by token: right texts pass, wrong ones are refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from asyncengine.grammar import Grammar

from .models import ADD, ADDRESS, COMPACT, HERMES, JSON, LLAMA, MARKED, MISTRAL, TURNS, Model

TOOLS = [ADD, ADDRESS]
OK = '{"a": 1, "b": -2}'
PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


@dataclass
class Case:
    """A family: how it writes calls by hand, independent of the code's own table."""

    template: str
    special: tuple[str, ...]
    before: str
    call: str
    separator: str
    after: str
    trigger: str

    def calls(self, *arguments: tuple[str, str]) -> str:
        written = [self.call.replace("NAME", name).replace("ARGS!", args) for name, args in arguments]
        return self.before + self.separator.join(written) + self.after


HERMES_CALL = '<tool_call>\n{"name": "NAME", "arguments": ARGS!}\n</tool_call>'
JSON_CALL = '{"name": "NAME", "arguments": ARGS!}'
CASES = {
    "hermes": Case(HERMES, TURNS, "", HERMES_CALL, "\n", "", "<tool_call>"),
    "hermes-special": Case(HERMES, (*TURNS, "<tool_call>", "</tool_call>"), "", HERMES_CALL, "\n", "", "<tool_call>"),
    "mistral": Case(MISTRAL, ("[TOOL_CALLS]",), "[TOOL_CALLS] [", JSON_CALL, ", ", "]", "[TOOL_CALLS]"),
    "mistral-text": Case(MISTRAL, (), "[TOOL_CALLS] [", JSON_CALL, ", ", "]", "[TOOL_CALLS]"),
    "compact": Case(COMPACT, ("[TOOL_CALLS]",), "[TOOL_CALLS][", JSON_CALL, ", ", "]", "[TOOL_CALLS]"),
    "marked": Case(MARKED, ("[TOOL_CALLS]", "[ARGS]"), "", "[TOOL_CALLS]NAME[ARGS]ARGS!", "", "", "[TOOL_CALLS]"),
    "marked-text": Case(MARKED, (), "", "[TOOL_CALLS]NAME[ARGS]ARGS!", "", "", "[TOOL_CALLS]"),
    "llama3": Case(LLAMA, TURNS, "", '{"name": "NAME", "parameters": ARGS!}', "; ", "", ""),
    "json": Case(JSON, TURNS, "", JSON_CALL, "", "", ""),
}
WITH_TRIGGER = [name for name, case in CASES.items() if case.trigger]


class CaseModel(Model):
    """A model of a family, with the texts that the family is expected to write."""

    def __init__(self, case: Case) -> None:
        super().__init__(case.template, case.special)
        self.case = case

    def grammar(self, **settings: Any) -> Grammar:
        grammar = self.planner.plan(settings.pop("tail", ""), **{"tools": TOOLS, **settings}).grammar
        assert grammar is not None
        return grammar


MODELS = {name: CaseModel(case) for name, case in CASES.items()}


@pytest.fixture(params=CASES)
def model(request: pytest.FixtureRequest) -> CaseModel:
    return MODELS[request.param]


def test_named_is_one_call_of_that_tool(model: CaseModel) -> None:
    grammar = model.grammar(tool_choice="add")
    one = model.case.calls(("add", OK))
    model.judge(grammar, [one], [model.case.calls(("add_address", "{}")), "", "text"])
    assert grammar == model.grammar(tool_choice={"type": "function", "function": {"name": "add"}})
    if model.case.separator:
        model.judge(grammar, [], [model.case.calls(("add", OK), ("add", OK))])


@pytest.mark.parametrize("name", [name for name in CASES if name != "json"])
def test_several_calls_if_parallel(name: str) -> None:
    model = MODELS[name]
    several = model.case.calls(("add", OK), ("add_address", "{}"), ("add", OK))
    broken = model.case.calls(("add", OK), ("add", "{}"))
    for choice in ("required", "auto"):
        model.judge(model.grammar(tool_choice=choice), [several], [broken, several + "x"])
        model.judge(model.grammar(tool_choice=choice, parallel_tool_calls=False), [model.case.calls(("add", OK))], [])
        model.judge(model.grammar(tool_choice=choice, parallel_tool_calls=False), [], [several])


def test_several_bare_calls_are_a_json_list() -> None:
    model, call = MODELS["json"], CASES["json"].calls(("add", OK))
    right = [call, f"[{call}]", f"[{call}, {call}]"]
    model.judge(model.grammar(tool_choice="required"), right, [f"{call}, {call}", "[]", f"[{call}", f"[{call},{call}]"])
    model.judge(model.grammar(tool_choice="required", parallel_tool_calls=False), [call], right[1:])


def test_llama_may_announce_calls_by_its_special_token() -> None:
    model = CaseModel(Case(LLAMA, (*TURNS, "<|python_tag|>"), "", "", "", "", ""))
    call = CASES["llama3"].calls(("add", OK))
    for choice in ("auto", "required", "add"):
        model.judge(
            model.grammar(tool_choice=choice), [call, "<|python_tag|>" + call], ["<|python_tag|>", "x<|python_tag|>"]
        )
    model.judge(model.grammar(tool_choice="none"), ["text", "{"], ["<|python_tag|>" + call])


@pytest.mark.parametrize("name", WITH_TRIGGER)
def test_none_forbids_the_trigger(name: str) -> None:
    model, case = MODELS[name], CASES[name]
    grammar = model.grammar(tool_choice="none")
    model.judge(grammar, ["", "text {", "a\nb"], [case.trigger, f"text {case.trigger} x", case.calls(("add", OK))])


def test_what_has_no_choice_is_forced() -> None:
    model = MODELS["hermes"]
    start = '<tool_call>\n{"name": "add'
    assert model.oracle.forced(model.grammar(tool_choice="required"), "") == start
    assert model.oracle.forced(model.grammar(), "text <tool_call>") == start.removeprefix("<tool_call>")
    assert model.oracle.forced(model.grammar(tool_choice="add"), "") == start + '", "arguments": {'
    assert (
        model.oracle.forced(model.grammar(tool_choice="add"), CASES["hermes"].calls(("add", OK))[:-12])
        == "</tool_call>"
    )


def test_a_last_newline_begins_no_call() -> None:
    model, one = MODELS["hermes"], CASES["hermes"].calls(("add", OK))
    for choice in ("auto", "required"):
        model.judge(model.grammar(tool_choice=choice), [one + "\n"], [one + "\n\n", one + "\nx"])


def test_tools_and_a_response_format_are_calls_or_the_format(model: CaseModel) -> None:
    one, answer = model.case.calls(("add", OK)), '{"name": "Ada"}'
    grammar = model.grammar(response_format=PERSON)
    model.judge(
        grammar, [one, answer], ["", "text", f"{answer}{one}", f"{one}{answer}", '{"name": 1}', '{"name": "a", "b": 1}']
    )
    model.judge(model.grammar(response_format=PERSON, tool_choice="required"), [one], [answer])
    assert model.planner.plan("", tools=TOOLS, tool_choice="none", response_format=PERSON).grammar == Grammar(
        kind="json_schema", text='{"type":"object","properties":{"name":{"type":"string"}},"required":["name"],'
        '"additionalProperties":false}',
    )  # fmt: skip


@pytest.mark.parametrize(
    ("final", "right", "wrong"),
    [
        (Grammar.regex("a+/b"), ["aa/b"], ["b", "a/b/"]),
        (Grammar.choice(["not", "not enough", 'a"\\']), ["not", "not enough", 'a"\\'], ["no", "not "]),
        (Grammar.lark('start: "x" call\ncall: "y"+'), ["xy", "xyy"], ["x", "y"]),
        (Grammar.json_schema(PERSON, whitespace="compact"), ['{"name":"a"}'], ['{"name": "a"}']),
        (Grammar.json_schema({"type": "array", "uniqueItems": True}, unsupported="ignore"), ["[1, 1]"], ["{}"]),
    ],
)
def test_any_kind_of_grammar_can_be_the_format(final: Grammar, right: list[str], wrong: list[str]) -> None:
    model = MODELS["hermes"]
    one = CASES["hermes"].calls(("add", OK))
    model.judge(model.grammar(response_format=final), [one, *right], wrong)


# ---------------------------------------------------------------- schemas


def test_references_stay_inside_their_tool() -> None:
    def tool(name: str, kind: str) -> dict[str, Any]:
        definitions = {"X": {"type": "object", "properties": {"v": {"type": kind}}, "required": ["v"]}}
        properties = {"x": {"$ref": "#/$defs/X"}}
        return {"name": name, "parameters": {"properties": properties, "required": ["x"], "$defs": definitions}}

    model = MODELS["hermes"]
    grammar = model.grammar(tools=[tool("number", "integer"), tool("word", "string")], tool_choice="required")
    calls = CASES["hermes"].calls
    right = [calls(("number", '{"x": {"v": 1}}')), calls(("word", '{"x": {"v": "1"}}'))]
    model.judge(grammar, right, [calls(("number", '{"x": {"v": "1"}}')), calls(("word", '{"x": {"v": 1}}'))])


def test_arguments_may_be_indented_but_not_run_away() -> None:
    model, calls = MODELS["hermes"], CASES["hermes"].calls
    indented = '{\n    "a": 1,\n    "b": 2\n}'
    runaway = '{\n\n "a": 1, "b": 2}'
    tools = [
        {
            **ADD["function"],
            "parameters": {**ADD["function"]["parameters"], "x-guidance": {"whitespace_flexible": True}},
        }
    ]  # type: ignore[index,dict-item]
    for offered in (TOOLS, tools):
        grammar = model.grammar(tools=offered, tool_choice="required")
        model.judge(grammar, [calls(("add", indented)), calls(("add", '{"a":1,"b":2}'))], [calls(("add", runaway))])


def test_a_tool_that_is_not_strict_is_open_and_lenient() -> None:
    model, calls = MODELS["hermes"], CASES["hermes"].calls
    parameters = {"properties": {"a": {"type": "array", "uniqueItems": True}}, "required": ["a"]}
    grammar = model.grammar(tools=[{"name": "f", "parameters": parameters, "strict": False}], tool_choice="required")
    model.judge(grammar, [calls(("f", '{"a": [1, 1], "b": 2}'))], [calls(("f", "{}")), calls(("f", "[]"))])


def test_a_tool_without_parameters_takes_an_empty_object() -> None:
    model, calls = MODELS["hermes"], CASES["hermes"].calls
    grammar = model.grammar(tools=[{"name": "now"}], tool_choice="required")
    model.judge(grammar, [calls(("now", "{}"))], [calls(("now", '{"a": 1}'))])
