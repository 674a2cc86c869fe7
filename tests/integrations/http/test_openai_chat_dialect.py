"""OpenAI's chats without an engine: what becomes of each field, and transcripts of answers, letter for letter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncengine.errors import InvalidParameter
from asyncengine.grammar import Grammar
from asyncengine.integrations.http.dialects import openai_chat
from asyncengine.integrations.http.events import EventReader
from asyncengine.integrations.http.fields import TABLES, Fields
from asyncengine.integrations.http.turn import Answered, Turn
from asyncengine.outputs import Chunk, Completion, LogprobEntry, Sample, Timings, ToolCall, ToolCallDelta, Usage

ASK = {"role": "user", "content": "hi"}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ANSWERED = Answered("1f", "demo", 7, prompts=lambda: [(5, 6)])


def read(strict: bool = False, **given: Any) -> tuple[Turn, Fields]:
    fields = Fields({"messages": [ASK], **given}, strict=strict)
    return openai_chat.read(fields), fields


# -------------------------------------------------------------------- messages


ROWS: dict[str, Any] = json.loads((Path(__file__).parent / "chat_fields.json").read_text(encoding="utf-8"))
"""Fields as they are given, and what becomes of them."""


@pytest.mark.parametrize(("given", "wanted"), ROWS["messages"])
def test_older_and_newer_forms_become_the_engines(given: Any, wanted: Any) -> None:
    assert read(messages=given)[0].messages == wanted


@pytest.mark.parametrize("given", ["hi", [5], [{"role": 5}], [{"content": [5, {"type": 5}], "tool_calls": 5}], {}])
def test_what_is_malformed_is_left_to_the_engine_to_name(given: Any) -> None:
    read(messages=given)


# -------------------------------------------------------------------- tools


def test_functions_go_unread_beside_tools() -> None:
    turn, fields = read(functions=[ADD["function"]], function_call="none", tools=[ADD])
    assert turn.chat == {"tools": [ADD]}
    assert fields.ignored == ["functions", "function_call"]


# -------------------------------------------------------------------- grammars


@pytest.mark.parametrize(("given", "wanted"), [(given, wanted) for given, *wanted in ROWS["grammars"]])
def test_every_name_of_a_grammar_is_taken(given: dict[str, Any], wanted: list[Any]) -> None:
    turn, _ = read(**given)
    assert turn.grammar is not None
    kind, *of = wanted
    assert turn.grammar() == getattr(Grammar, kind)(*of)


# -------------------------------------------------------------------- the other fields


def test_every_field_of_the_clients_own_is_known() -> None:
    from openai.types.chat import completion_create_params

    assert set(completion_create_params.CompletionCreateParamsBase.__annotations__) <= TABLES["chat"].keys()


@pytest.mark.parametrize("name", ["user", "ttl"])
def test_a_field_without_meaning_is_told_or_refused(name: str) -> None:
    """One that changes nothing here, and one that nobody here knows."""
    assert read(**{name: "x"})[1].ignored == [name]
    assert read(strict=True, **{name: None})[1].ignored == [], "null asks for nothing"
    with pytest.raises(InvalidParameter) as refused:
        read(strict=True, **{name: "x"})
    assert refused.value.field == name


@pytest.mark.parametrize(("given", "wanted"), ROWS["names"])
def test_other_names_of_the_same_are_understood(given: dict[str, Any], wanted: dict[str, Any]) -> None:
    turn, fields = read(**given)
    assert (turn.params, fields.ignored) == (wanted, [])


def test_other_words_for_thinking_are_wishes() -> None:
    off = {"enable_thinking": False}
    assert read(thinking={"type": "disabled"})[0].wishes == {"thinking": off}
    assert read(think=False)[0].wishes == {"think": off}
    for name in ("max_thinking_tokens", "thinking_token_budget", "thinking_budget"):
        assert read(**{name: 7})[0].chat["max_thinking_tokens"] == 7
    assert read(reasoning={"max_tokens": 0})[0].chat["max_thinking_tokens"] == 0
    turn, _ = read(reasoning={"effort": "low", "enabled": False, "exclude": True})
    assert turn.wishes == {"reasoning.enabled": off, "reasoning.effort": {"reasoning_effort": "low"}}
    assert turn.extra["reasoning"] is False


@pytest.mark.parametrize("text", ["{a:", "[]", "5"])
def test_a_broken_call_of_an_earlier_answer_does_not_end_the_conversation(text: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": text}}
    turn, _ = read(messages=[ASK, {"role": "assistant", "content": None, "tool_calls": [call]}])
    assert turn.messages is not None
    ((kept,), *_) = [message["tool_calls"] for message in turn.messages if "tool_calls" in message]
    assert kept["function"] == {"name": "add", "arguments": {"arguments": text}}


def test_template_variables_and_hints() -> None:
    turn, _ = read(reasoning_effort="none", continue_final_message=True, chat_template_kwargs={"a": 1}, documents=[])
    assert turn.wishes == {"reasoning_effort": {"reasoning_effort": "none", "enable_thinking": False}}
    assert turn.chat["template_kwargs"] == {
        "a": 1, "documents": [], "continue_final_message": True, "add_generation_prompt": False,
    }  # fmt: skip


# -------------------------------------------------------------------- answers

CHUNKS = [
    Chunk("", [1], reasoning="Hm."),
    Chunk("He", [2], logprobs=[LogprobEntry(2, "He", -0.5, b"He", (LogprobEntry(2, "He", -0.5, b"He"),))]),
    Chunk("", [3], tool_calls=[ToolCallDelta(0, "c1", "add", ""), ToolCallDelta(0, None, None, '{"a":1}')]),
    Chunk("", [4], "tool_calls"),
]
COMPLETION = Completion(
    "He", [1, 2, 3, 4], "tool_calls", usage=Usage(2, 4, 1, 1), timings=Timings(0.25, 0.5, 1), request_id="r",
    samples=[Sample("He", [1, 2, 3, 4], "tool_calls", tool_calls=[ToolCall("c1", "add", '{"a":1}')], reasoning="Hm.",
                    broken_calls=[ToolCall("c2", "add", '{"a"')])],
)  # fmt: skip


STREAMS: dict[str, Any] = json.loads((Path(__file__).parent / "chat_streams.json").read_text(encoding="utf-8"))
"""Frames of `CHUNKS`, by what a request wishes beside its answer."""


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_letter_for_letter(name: str) -> None:
    extra = STREAMS[name]["extra"]
    writer, events = openai_chat.Writer(Turn(extra=extra), ANSWERED), EventReader(bool(extra.get("token_ids")))
    text = writer.begin(Usage(2, 0, 1), 1)
    text += "".join(writer.write(event) for chunk in CHUNKS for event in events.read(chunk))
    *frames, done = (text + writer.end(COMPLETION.usage)).removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    assert [json.loads(frame.removeprefix("data: ")) for frame in frames] == STREAMS[name]["frames"]


def test_ids_of_prompt_and_answer_are_told() -> None:
    whole = openai_chat.Writer(Turn(extra={"return_ids": True}), ANSWERED).whole(COMPLETION)
    assert (whole["prompt_token_ids"], whole["choices"][0]["token_ids"]) == ([5, 6], [1, 2, 3, 4])


def test_a_whole_answer_letter_for_letter() -> None:
    whole = openai_chat.Writer(Turn(), ANSWERED).whole(COMPLETION)
    assert whole == json.loads((Path(__file__).parent / "chat_answer.json").read_text(encoding="utf-8"))
