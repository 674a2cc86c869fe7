"""The Responses API without an engine: items become messages, events become frames, and responses are stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from asyncengine.errors import InvalidParameter
from asyncengine.integrations.http import events
from asyncengine.integrations.http.dialects import openai_responses as dialect
from asyncengine.integrations.http.dialects.responses_items import read_input, seal
from asyncengine.integrations.http.events import CallArguments, CallBegin, CallEnd, End, Event, Text, Thinking
from asyncengine.integrations.http.fields import Fields
from asyncengine.integrations.http.problems import Problem
from asyncengine.integrations.http.responses import ResponseStore
from asyncengine.integrations.http.turn import Answered, Turn
from asyncengine.outputs import Completion, FinishReason, LogprobEntry, Sample, Timings, ToolCall, Usage

EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "found"}
USAGE = Usage(5, 7, 3, 2)


def read(given: Any = "hello", **more: Any) -> Turn:
    return dialect.read(Fields({"input": given, **more}))


def message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def written(*events: Event, problem: Problem | None = None, **more: Any) -> list[dict[str, Any]]:
    """The events of a stream, each of which OpenAI's own types take."""
    writer = dialect.Writer(read(**more), Answered("1f", "m", 7))
    frames = writer.begin(USAGE) + "".join(writer.write(event) for event in events)
    frames += writer.end(USAGE) if problem is None else writer.failed(problem)
    found = []
    for frame in frames.split("\n\n")[:-1]:
        name, data = frame.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        EVENT.validate_python(found[-1], strict=True)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def entry(token: str, number: int) -> LogprobEntry:
    return LogprobEntry(number, token, -0.5, token.encode())


ROWS: dict[str, Any] = json.loads((Path(__file__).parent / "responses_items.json").read_text(encoding="utf-8"))


def test_a_result_without_its_call_is_named_by_its_place_in_the_request() -> None:
    body = {"input": [message("user", "x"), RESULT], "previous_response_id": "r"}
    with pytest.raises(InvalidParameter) as refused:
        dialect.read(Fields(body), lambda _: read_input([message("user", "look")]))
    assert refused.value.field == "input[1].call_id"


# -------------------------------------------------------------------- events


def test_a_stream_letter_for_letter() -> None:
    """Every item opens, is told in pieces, and closes."""
    file = Path(__file__).parent / "responses_streams.json"
    (row,) = json.loads(file.read_text(encoding="utf-8")).values()
    told = written(*(getattr(events, kind)(*values) for kind, *values in row["events"]))
    assert isinstance(told[-1]["response"].pop("completed_at"), int)
    assert told == row["frames"]


@pytest.mark.parametrize(("reason", "kind", "status"), ROWS["ends"])
def test_the_last_event_says_how_it_ended(reason: FinishReason, kind: str, status: str) -> None:
    last = written(Text(0, "a"), End(0, reason))[-1]
    assert (last["type"], last["response"]["status"]) == (f"response.{kind}", status)
    assert last["response"]["output"][0]["status"] == status
    assert (last["response"]["incomplete_details"] is None) == (status == "completed")
    assert (last["response"]["completed_at"] is None) == (status != "completed")
    assert last["response"]["usage"]["input_tokens_details"]["cached_tokens"] == 3


def test_a_stream_that_breaks_off_says_why() -> None:
    last = written(Text(0, "a"), problem=Problem(503, "gone", code="engine_unavailable"))[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "gone"}
    assert last["response"]["output"][0]["status"] == "incomplete"


def test_log_probabilities_stay_with_the_text_they_are_of() -> None:
    events = [
        Thinking(0, "hm", [entry("hm", 1)]), Text(0, "", [entry("\xc3", 2)]), Text(0, "ü", [entry("\xbc", 3)]),
        Text(0, "", [entry("<call>", 4)]), CallBegin(0, 0, "c", "look"), Text(0, "", [entry("{}", 5)]),
        CallArguments(0, 0, "{}"), Text(0, "", [entry("</call>", 6)]), CallEnd(0, 0), Text(0, "x", [entry("x", 7)]),
        End(0, "stop"),
    ]  # fmt: skip
    told = written(*events, include=["message.output_text.logprobs"])
    output = told[-1]["response"]["output"]
    texts = [item["content"][0] for item in output if item["type"] == "message"]
    assert [[each["token"] for each in part["logprobs"]] for part in texts] == [["\xc3", "\xbc"], ["x"]]
    assert (
        written(Text(0, "x", [entry("x", 7)]), End(0, "stop"))[-1]["response"]["output"][0]["content"][0]["logprobs"]
        == []
    )


def test_thoughts_are_sealed_where_that_is_asked_for() -> None:
    told = written(Thinking(0, "hm"), Text(0, "a"), End(0, "stop"), include=["reasoning.encrypted_content"])
    thought = told[-1]["response"]["output"][0]
    assert thought["encrypted_content"] == seal("hm")
    del thought["content"]
    assert read([thought, message("assistant", "a")]).messages == [
        {**message("assistant", "a"), "reasoning_content": "hm"}
    ]


def test_a_whole_answer_is_the_stream_s_last_word() -> None:
    sample = Sample(
        "Found.", [1], "length", reasoning="hm", tool_calls=[ToolCall("c1", "look", "{}")],
        broken_calls=[ToolCall("c2", "look", '{"a')],
    )  # fmt: skip
    writer = dialect.Writer(read(), Answered("1f", "m", 7))
    completion = Completion(
        "Found.", [1], "length", usage=USAGE, timings=Timings(None, None, 0.0), request_id="r", samples=[sample]
    )
    whole = writer.whole(completion)
    Response.model_validate(whole, strict=True)
    events = [
        Thinking(0, "hm"), Text(0, "Found."), CallBegin(0, 0, "c1", "look"), CallArguments(0, 0, "{}"), CallEnd(0, 0),
        CallBegin(0, 1, "c2", "look"), CallArguments(0, 1, '{"a'), CallEnd(0, 1), End(0, "length"),
    ]  # fmt: skip
    assert whole == written(*events)[-1]["response"]
    assert [item["status"] for item in whole["output"]] == ["completed", "completed", "completed", "incomplete"]


def test_an_input_is_needed() -> None:
    with pytest.raises(InvalidParameter, match="is missing"):
        dialect.read(Fields({}))


# -------------------------------------------------------------------- the store


def response(name: str, previous: str | None = None) -> dict[str, Any]:
    return {"id": name, "previous_response_id": previous, "output": []}


def test_it_takes_no_more_than_it_may() -> None:
    store = ResponseStore(100_000)
    for number in range(1000):
        store.put(response(f"r{number}"), [{"text": "x" * 5000}])
        assert 0 < store.used <= 100_000
    assert store.get("r999") is not None
    assert store.get("r0") is None
    used = store.used
    store.put(response("r999"), [{"text": "x" * 5000}])
    assert store.used == used, "it is replaced"
    store.put(response("large"), [{"text": "x" * 200_000}])
    assert store.get("large") is None
    for number in range(1000):
        store.delete(f"r{number}")
    assert store.used == 0


def test_one_that_is_used_outlives_one_that_is_not() -> None:
    store = ResponseStore(20_000)
    for name in ("a", "b"):
        store.put(response(name), [{"text": "x" * 5000}])
    assert store.get("a") is not None
    store.put(response("c"), [{"text": "x" * 8000}])
    assert [name for name in "abc" if store.get(name)] == ["a", "c"]


def test_a_chain_is_read_oldest_first_and_only_whole() -> None:
    store = ResponseStore(1 << 20)
    for number in range(5000):
        store.put(response(str(number), str(number - 1) if number else None), [])
        if number < 3:
            chain = store.chain(str(number))
            assert chain is not None
            assert [json.loads(each.response)["id"] for each in chain] == [str(n) for n in range(number + 1)]
    assert store.chain("4999") is None  # its first ones had to go
    assert store.chain("nobody") is None
    assert store.chain(None) == []


def test_items_get_ids_of_their_own() -> None:
    store = ResponseStore(1 << 20)
    store.put(response("r"), [{"text": "a"}, {"id": "mine", "text": "b"}])
    found = store.get("r")
    assert found is not None
    assert [item["id"] for item in json.loads(found.items)] == ["item_r_0", "mine"]
