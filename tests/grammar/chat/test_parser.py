"""Outputs are taken apart the same way however they are cut, nothing is lost, and nothing half is shown."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from support.data import cases_of
from support.tables import table

from asyncengine.grammar.chat import TOOL_FORMATS, OutputParser, Parsed, Reasoning, ToolFormat
from asyncengine.outputs import ToolCall

NAMES = ("add", "add_address")
ARGS = '{"a": 1, "b": {"c": "}{\\"\\\\"}}'
MARKED_ARGS = '{"a": "</tool_call>\\n<tool_call>"}'
THINK = Reasoning("<think>", "</think>")
HERMES, LLAMA, MISTRAL, MARKED, JSON = (
    TOOL_FORMATS[name] for name in ("hermes", "llama3", "mistral", "mistral-args", "json")
)
WRAPPED = replace(JSON, trigger="<calls>", opening="[", closing="]</calls>", list_for_several=False)


@dataclass
class Read:
    """A whole output, put together from its deltas."""

    text: str
    reasoning: str
    calls: list[tuple[str, str]]
    finished: list[tuple[str, str]]
    broken: list[tuple[str, str]]


def pairs(calls: list[ToolCall]) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in calls]


def read(parser: OutputParser, pieces: list[str]) -> Read:
    """Reads all pieces, and checks the shape of the deltas: id and name first and once, indices without gaps."""
    parts: list[Parsed] = [*[parser.push(piece) for piece in pieces], parser.finish()]
    names: list[str] = []
    ids: list[str] = []
    arguments: list[str] = []
    for delta in (delta for part in parts for delta in part.tool_calls):
        if delta.name is not None:
            assert delta.index == len(names)
            assert delta.id
            names.append(delta.name)
            ids.append(delta.id)
            arguments.append("")
        else:
            assert delta.id is None
            assert delta.index == len(names) - 1
        arguments[delta.index] += delta.arguments
    finished, broken = parser.finished_calls(), parser.finished_calls(complete=False)
    assert len(set(ids)) == len(ids) == len(finished) + len(broken)
    assert {call.id for call in [*finished, *broken]} == set(ids)
    text, reasoning = "".join(part.text for part in parts), "".join(part.reasoning for part in parts)
    return Read(text, reasoning, list(zip(names, arguments, strict=True)), pairs(finished), pairs(broken))


def cuts(text: str, seed: int = 0) -> Iterator[list[str]]:
    """All at once, by single characters, in two at every place, and at random."""
    yield [text]
    yield list(text)
    yield from ([text[:i], "", text[i:]] for i in range(len(text)))
    rng = random.Random(seed)
    for _ in range(10):
        places = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(1, 8)))
        yield [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def check(parser: Iterator[OutputParser], text: str, expected: Read) -> None:
    for pieces in cuts(text):
        assert read(next(parser), pieces) == expected, pieces


def parsers(form: ToolFormat | None, **settings: object) -> Iterator[OutputParser]:
    while True:
        yield OutputParser(form, NAMES, **settings)  # type: ignore[arg-type]


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


ONE, TWO = ("add", ARGS), ("add_address", "{}")


FORMS = {"HERMES": HERMES, "JSON": JSON, "LLAMA": LLAMA, "MARKED": MARKED, "MISTRAL": MISTRAL, "WRAPPED": WRAPPED}


@pytest.mark.parametrize(("form", "text", "content", "calls"), cases_of(__file__)["content_and_calls"])
def test_content_and_calls(form: str | None, text: str, content: str, calls: list[list[str]]) -> None:
    """`form`: the name of a format, None: there is none, and all is text."""
    made = [(name, arguments) for name, arguments in calls]
    check(parsers(FORMS[form] if form else None), text, Read(content, "", made, made, []))


@pytest.mark.parametrize("text", table(__file__, "no calls"))
def test_what_is_no_call_stays_text(text: str) -> None:
    check(parsers(HERMES), text, Read(text, "", [], [], []))


def test_calls_that_are_cut_off_are_broken() -> None:
    whole = hermes(*ONE)
    end = whole.index(ARGS) + len(ARGS)
    for size in range(len(whole)):
        got = read(OutputParser(HERMES, NAMES), list(whole[:size]))
        named = size >= whole.index('add"') + 4
        assert got.text == ("" if named else whole[:size])
        assert got.finished == ([ONE] if size >= end else [])
        assert got.broken == ([("add", whole[:size][whole.index(ARGS) :])] if named and size < end else [])


@pytest.mark.parametrize("form", [HERMES, MISTRAL, MARKED, LLAMA])
def test_calls_only_at_the_beginning_if_asked(form: ToolFormat) -> None:
    """In an answer that is either calls or JSON, a marker inside the JSON is data."""
    answer = f'{{"text": "{form.trigger} {form.name_open[:1]}"}}'
    check(parsers(form, calls_after_text=False), answer, Read(answer, "", [], [], []))
    written = f"{form.trigger}{form.opening}{form.name_open}add{form.name_close}{{}}{form.call_close}{form.closing}"
    check(parsers(form, calls_after_text=False), written, Read("", "", [("add", "{}")], [("add", "{}")], []))


@pytest.mark.parametrize(("state", "text", "reasoning", "content"), table(__file__, "reasoning"))
def test_reasoning(state: str, text: str, reasoning: str, content: str) -> None:
    for form in (None, HERMES):
        check(parsers(form, reasoning=THINK, state=state), text, Read(content, reasoning, [], [], []))
    if state != "closed" and "</think>" in text and reasoning:
        expected = Read(content.rstrip(), reasoning, [ONE], [ONE], [])
        check(parsers(HERMES, reasoning=THINK, state=state), text + hermes(*ONE), expected)


def test_text_is_passed_on_at_once() -> None:
    parser = OutputParser(HERMES, NAMES)
    shown = [parser.push(piece).text for piece in ("Hel", "lo <", "b", " ", "<tool", "x", "!")]
    assert shown == ["Hel", "lo", " <b", "", "", " <toolx", "!"]


def test_a_name_is_shown_when_it_is_complete_and_arguments_as_they_come() -> None:
    parser = OutputParser(HERMES, NAMES)
    assert not parser.push('<tool_call>\n{"name": "add')
    (first,) = parser.push('"').tool_calls
    assert (first.index, first.name, first.arguments) == (0, "add", "")
    assert not parser.push(', "arguments": ')
    assert [delta.arguments for delta in parser.push('{"a": "').tool_calls] == ['{"a": "']
    assert [delta.arguments for delta in parser.push('}"').tool_calls] == ['}"']
    assert [delta.arguments for delta in parser.push("}}\n</tool").tool_calls] == ["}"]
    assert not parser.push("_call>")
    assert parser.finished_calls() == [ToolCall(first.id or "", "add", '{"a": "}"}')]


@pytest.mark.parametrize(("form", "pattern"), [(HERMES, r"call_[0-9a-f]{24}"), (MARKED, r"[A-Za-z0-9]{9}")])
def test_ids(form: ToolFormat, pattern: str) -> None:
    text = hermes("add", "{}") if form is HERMES else "[TOOL_CALLS]add[ARGS]{}"
    ids = []
    for _ in range(20):
        parser = OutputParser(form, NAMES)
        parser.push(text)
        ids.append(parser.finished_calls()[0].id)
    assert all(re.fullmatch(pattern, identity) for identity in ids)
    assert len(set(ids)) == 20


@pytest.mark.parametrize("form", [*TOOL_FORMATS.values(), WRAPPED])
def test_any_soup_of_markers_reads_the_same_in_any_pieces(form: ToolFormat) -> None:
    rng = random.Random(7)
    call = f"{form.trigger}{form.opening}{form.name_open}add{form.name_close}{ARGS}{form.call_close}{form.closing}"
    bits = [
        call, form.trigger, form.opening, form.name_open, "add", "other", form.name_close, ARGS, "{", "}", '"', "\\",
        "[", "]", ",", ";", " ", "\n", "x", "<", form.call_close, form.separator, form.closing, "<think>", "</think>",
    ]  # fmt: skip
    for _ in range(150):
        text = "".join(rng.choices(bits, k=rng.randrange(1, 14)))
        state = rng.choice(["none", "open", "undecided"])
        results = []
        for pieces in ([text], list(text), *([text[:i], text[i:]] for i in rng.sample(range(len(text) + 1), 1))):
            parser = OutputParser(form, NAMES, reasoning=THINK, state=state)  # type: ignore[arg-type]
            results.append(read(parser, pieces))
        assert results[0] == results[1] == results[2], (state, text)
        for name, arguments in results[0].finished:
            assert name in NAMES
            assert isinstance(json.loads(arguments), dict)


def test_long_outputs_take_linear_time() -> None:
    """Work for each piece does not grow with what came before: the buffer stays short."""
    parser = OutputParser(HERMES, NAMES)
    for _ in range(2000):
        parser.push("text ")
        assert len(parser._buffer) < 20
    parser.push('<tool_call>\n{"name": "add", "arguments": {"a": "')
    for _ in range(2000):
        parser.push("} <tool_call>")
        assert len(parser._buffer) < 20
