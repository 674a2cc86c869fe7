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
from support.data import cases_of

from asyncengine.errors import InvalidParameter
from asyncengine.integrations.http.dialects.anthropic_messages import Writer, read
from asyncengine.integrations.http.events import CallArguments, CallBegin, CallEnd, End, Event, Text, Thinking
from asyncengine.integrations.http.fields import Fields
from asyncengine.integrations.http.generating import grant
from asyncengine.integrations.http.turn import Answered, Turn
from asyncengine.outputs import Completion, Timings, ToolCall, Usage

ROWS: dict[str, Any] = cases_of(__file__)

ANSWERED = Answered("abc", "demo", 0)
USAGE = Usage(30, 9, cached_tokens=16, reasoning_tokens=4)
EVENTS: list[Event] = [
    Thinking(0, "Let me "), Thinking(0, "see."), Text(0, "I look"), Text(0, "."), CallBegin(0, 0, "call_1", "add"),
    CallArguments(0, 0, '{"a": '), CallArguments(0, 0, "1}"), CallEnd(0, 0), CallBegin(0, 1, "call_2", "now"),
    CallArguments(0, 1, "{}"), CallEnd(0, 1), End(0, "tool_calls"),
]  # fmt: skip


def turn(*messages: Any, **fields: Any) -> Turn:
    return read(Fields({"model": "m", "max_tokens": 9, "messages": list(messages), **fields}))


@cache
def stream_event() -> TypeAdapter[Any]:
    """The shape of a frame's data. Importing the library takes seconds, not to be spent where tests are only found."""
    from anthropic.types import RawMessageStreamEvent

    return TypeAdapter(RawMessageStreamEvent)


def frames(writer: Writer, events: list[Event]) -> list[dict[str, Any]]:
    text = writer.begin(USAGE, 1) + "".join(writer.write(event) for event in events) + writer.end(USAGE)
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


def test_blocks_come_one_after_another_each_begun_and_ended() -> None:
    told = frames(Writer(turn(user(text("hi"))), ANSWERED), EVENTS)
    assert told[0]["message"]["usage"] == {
        "input_tokens": 14, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 16, "output_tokens": 0,
        "output_tokens_details": {"thinking_tokens": 0},
    }  # fmt: skip
    middle = [(e["type"].removeprefix("content_block_"), e["index"]) for e in told if "index" in e]
    assert [index for kind, index in middle if kind == "start"] == [0, 1, 2, 3]
    for index, group in itertools.groupby(middle, key=lambda each: each[1]):
        kinds = [kind for kind, _ in group]
        assert (kinds[0], kinds[-1], set(kinds[1:-1])) == ("start", "stop", {"delta"}), index
    deltas = [(e["index"], e["delta"]) for e in told if e["type"] == "content_block_delta"]
    assert [d["type"] for i, d in deltas if i == 0] == ["thinking_delta", "thinking_delta", "signature_delta"]
    assert "".join(d["partial_json"] for i, d in deltas if i == 2) == '{"a": 1}'
    assert told[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_text_after_a_call_is_a_block_of_its_own_and_nothing_ends_twice() -> None:
    events = [CallBegin(0, 0, "c", "f"), Text(0, "then"), CallEnd(0, 0), Text(0, " on"), End(0, "length")]
    told = frames(Writer(turn(user(text("hi"))), ANSWERED), events)
    assert [(e["type"], e["index"]) for e in told if e["type"].endswith(("start", "stop")) and "index" in e] == [
        ("content_block_start", 0), ("content_block_stop", 0), ("content_block_start", 1), ("content_block_stop", 1),
        ("content_block_start", 2), ("content_block_stop", 2),
    ]  # fmt: skip


def test_a_stop_string_of_the_models_own_is_no_stop_sequence() -> None:
    asked = turn(user(text("hi")), stop_sequences=["END"])
    for stop, reason in (("END", "stop_sequence"), ("<own>", "end_turn"), (None, "end_turn")):
        ended = frames(Writer(asked, ANSWERED), [Text(0, "x"), End(0, "stop", stop)])[-2]["delta"]
        assert ended == {"stop_reason": reason, "stop_sequence": "END" if stop == "END" else None}


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


def test_turns_of_a_role_are_one_and_late_system_messages_are_the_users() -> None:
    made = turn(
        {"role": "system", "content": "Second."}, user(text("a")), {"role": "system", "content": "Note."},
        user(text("b")), {"role": "assistant", "content": "c"}, {"role": "assistant", "content": [text("d")]},
        system=[text("x-anthropic-billing-header: cc_version=2.1; cch=abcde;\nFirst.")],
    )  # fmt: skip
    assert made.messages == [
        {"role": "system", "content": [text("First."), text("Second.")]},
        {"role": "user", "content": [text("a"), text("Note."), text("b")]},
        {"role": "assistant", "content": [text("c"), text("d")]},
    ]
    assert made.chat["template_kwargs"] == {"add_generation_prompt": False, "continue_final_message": True}


@pytest.mark.parametrize(("given", "kept"), ROWS["only_the_head_of_the_system_prompt_loses_a_pseudo_header"])
def test_only_the_head_of_the_system_prompt_loses_a_pseudo_header(given: str, kept: str | None) -> None:
    made = turn(user(text("a")), system=given).messages
    assert made is not None
    assert made[:-1] == ([] if kept is None else [{"role": "system", "content": [text(kept)]}])


def test_thinking_and_effort_are_wishes() -> None:
    asked = turn(user(text("a")), thinking={"type": "disabled"}, output_config={"effort": "max"})
    assert asked.wishes == {
        "thinking": {"enable_thinking": False},
        "output_config.effort": {"reasoning_effort": "high"},
    }
    assert turn(user(text("a")), thinking={"type": "adaptive"}).wishes == {}
    asked = turn(user(text("a")), thinking={"type": "enabled", "budget_tokens": 2000})
    assert asked.wishes == {
        "thinking": {"enable_thinking": True},
        "thinking.budget_tokens": {"thinking_budget": 2000, "reasoning_effort": "medium"},
    }


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
