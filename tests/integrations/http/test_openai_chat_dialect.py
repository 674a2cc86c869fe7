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
ANSWERED = Answered("1f", "demo", 7, prompts=lambda: [(5, 6)])


def read(strict: bool = False, **given: Any) -> tuple[Turn, Fields]:
    fields = Fields({"messages": [ASK], **given}, strict=strict)
    return openai_chat.read(fields), fields


ROWS: dict[str, Any] = json.loads((Path(__file__).parent / "chat_fields.json").read_text(encoding="utf-8"))
"""Fields as they are given, and the grammars that they become."""


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
