"""Anthropic's dialect without a server: bodies to turns, events to frames."""

from __future__ import annotations

import copy
import itertools
import json
import random
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import TypeAdapter

from asyncengine.errors import InvalidParameter
from asyncengine.integrations.http import events
from asyncengine.integrations.http.dialects.anthropic_messages import Writer, read
from asyncengine.integrations.http.events import Event
from asyncengine.integrations.http.fields import Fields
from asyncengine.integrations.http.generating import grant
from asyncengine.integrations.http.turn import Answered, Turn
from asyncengine.outputs import Completion, Timings, ToolCall, Usage

ANSWERED = Answered("abc", "demo", 0)
USAGE = Usage(30, 9, cached_tokens=16, reasoning_tokens=4)


def turn(*messages: Any, **fields: Any) -> Turn:
    return read(Fields({"model": "m", "max_tokens": 9, "messages": list(messages), **fields}))


@cache
def stream_event() -> TypeAdapter[Any]:
    """The shape of a frame's data. Importing the library takes seconds, not to be spent where tests are only found."""
    from anthropic.types import RawMessageStreamEvent

    return TypeAdapter(RawMessageStreamEvent)


def frames(writer: Writer, given: list[Event]) -> list[dict[str, Any]]:
    text = writer.begin(USAGE, 1) + "".join(writer.write(event) for event in given) + writer.end(USAGE)
    found = []
    for frame in text.removesuffix("\n\n").split("\n\n"):
        kind, _, data = frame.partition("\ndata: ")
        found.append(json.loads(data))
        assert kind == f"event: {found[-1]['type']}"
        stream_event().validate_python(found[-1], strict=True)
    return found


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


STREAMS: dict[str, Any] = json.loads((Path(__file__).parent / "anthropic_streams.json").read_text(encoding="utf-8"))
"""Events and the frames that they become: blocks come one after another, each begun and ended once, text behind a call
in one of its own; a stop string of the model's own is no stop sequence."""


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_letter_for_letter(name: str) -> None:
    row = STREAMS[name]
    given: list[Event] = [getattr(events, kind)(*values) for kind, *values in row["events"]]
    assert frames(Writer(turn(user(text("hi")), **row["asked"]), ANSWERED), given) == row["frames"]


def test_a_whole_answer_goes_back_as_it_came() -> None:
    calls = [ToolCall("call_1", "add", '{"a": 1}')]
    completion = Completion(
        "I look.",
        [1],
        "tool_calls",
        usage=USAGE,
        timings=Timings(0, 0, 0),
        request_id="r",
        tool_calls=calls,
        reasoning="Let me see.",
    )
    whole = Writer(turn(user(text("hi"))), ANSWERED).whole(completion)
    from anthropic.types import Message

    message = Message.model_validate(whole, strict=True)
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": "2", "is_error": True}
    redacted = {"type": "redacted_thinking", "data": "x"}
    content = [redacted, *(block.model_dump() for block in message.content)]
    back = turn(user(text("hi")), {"role": "assistant", "content": content}, user(result, text("go on")))
    assert back.messages is not None
    answer, tool, words = back.messages[1:]
    assert (answer["reasoning_content"], answer["content"]) == ("Let me see.", [text("I look.")])
    assert answer["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert (tool["tool_call_id"], tool["name"], tool["content"]) == ("call_1", "add", [text("Error:"), text("2")])
    assert words == {"role": "user", "content": [text("go on")]}


@pytest.mark.parametrize(
    ("reads", "reasons", "told"),
    [
        (("thinking_budget",), True, {"thinking_budget": 2000}),
        (("enable_thinking", "reasoning_effort"), True, {"enable_thinking": True, "reasoning_effort": "medium"}),
        (("enable_thinking",), True, {"enable_thinking": True}),
        ((), False, {}),  # a model that does not think keeps every budget
    ],
)
def test_a_budget_of_thoughts_is_told_and_held(reads: tuple[str, ...], reasons: bool, told: dict[str, Any]) -> None:
    thinking = {"type": "enabled", "budget_tokens": 2000}
    fields = Fields({"max_tokens": 9000, "messages": [user(text("a"))], "thinking": thinking})
    info = SimpleNamespace(template_variables=reads, reasons=reasons)
    target: Any = SimpleNamespace(engine=SimpleNamespace(info=info))
    asked = read(fields)
    grant(asked, target, fields)
    assert asked.chat.get("template_kwargs", {}) == told
    assert asked.chat.get("max_thinking_tokens") == (2000 if reasons else None)
    assert "thinking.budget_tokens" not in fields.ignored


NASTY: list[Any] = json.loads(
    '[null, true, 0, -1, 2.5, "", "text", [], [5], [null], {}, {"type": 5}, {"type": []}, {"type": "text"}, [{}], [[]]]'
)
FULL: dict[str, Any] = json.loads((Path(__file__).parent / "messages_body.json").read_text(encoding="utf-8"))
"""A body with all that the dialect knows."""


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, each in inner for place in places(each, (*path, key)))]


def test_whatever_stands_anywhere_is_taken_or_refused_by_name() -> None:
    refused = 0
    for place, nasty in itertools.product(places(FULL)[1:], NASTY):
        body = copy.deepcopy(FULL)
        holder = body
        for key in place[:-1]:
            holder = holder[key]
        holder[place[-1]] = nasty
        try:
            read(Fields(body))
        except InvalidParameter as wrong:
            refused += 1
            if wrong.field.partition(".")[0].partition("[")[0] != place[0]:
                raise
    assert refused > 300


def test_any_order_of_blocks_is_read_without_loss() -> None:
    rng = random.Random(5)
    for _ in range(200):
        messages, said = [], 0
        for _ in range(rng.randrange(1, 8)):
            role = rng.choice(["user", "assistant", "system"])
            blocks = [text(f"w{said + i}.") for i in range(rng.randrange(1, 4))]
            said += len(blocks)
            messages.append({"role": role, "content": blocks})
        made = turn(*messages).messages
        assert made is not None
        words = [block["text"] for message in made for block in message["content"]]
        assert words == [f"w{i}." for i in range(said)]
        assert all(one["role"] != other["role"] for one, other in itertools.pairwise(made))
