"""Messages as Anthropic's own client sees them, beside what the engine says in process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pydantic
import pytest
from support.data import cases_of

ROWS: dict[str, Any] = cases_of(__file__)

if TYPE_CHECKING:  # importing it takes seconds, not to be spent where tests are collected
    import anthropic

QUESTION: list[Any] = [{"role": "user", "content": "hello"}]
SUM: list[Any] = [{"role": "user", "content": "What is 17 plus 25?"}]
GREEDY: dict[str, Any] = {"model": "demo", "extra_body": {"temperature": 0}}
ADD: Any = ROWS["add"]


@pytest.fixture
def client(demo_url: str) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(base_url=demo_url, api_key="none", max_retries=0) as made:
        yield made


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_message_and_a_stream_say_the_same(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(messages=QUESTION, max_tokens=12, **GREEDY)
    with client.messages.stream(messages=QUESTION, max_tokens=12, **GREEDY) as stream:
        events = list(stream)
        final = stream.get_final_message()
    assert text_of(whole) == text_of(final) != ""
    assert whole.stop_reason == final.stop_reason == "max_tokens"
    assert (whole.usage.output_tokens, final.usage.output_tokens) == (12, 12)
    assert whole.id.startswith("msg_")
    assert whole._request_id == f"req_{whole.id.removeprefix('msg_')}"
    kinds = [event.type for event in events if event.type != "text"]
    assert kinds[:3] == ["message_start", "content_block_start", "content_block_delta"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_a_stream_begins_with_what_the_prompt_cost(client: anthropic.Anthropic) -> None:
    long: list[Any] = [{"role": "user", "content": "Count from one to ninety. " * 40}]
    counted = client.messages.count_tokens(model="demo", messages=long, system="Be brief.", tools=[ADD]).input_tokens
    cached = []
    for _ in range(2):
        with client.messages.stream(messages=long, system="Be brief.", tools=[ADD], max_tokens=2, **GREEDY) as stream:
            start = next(event.message.usage for event in stream if event.type == "message_start")
            end = stream.get_final_message().usage
        assert start.cache_read_input_tokens is not None
        assert start.input_tokens + start.cache_read_input_tokens == counted
        assert (start.input_tokens, start.cache_read_input_tokens) == (end.input_tokens, end.cache_read_input_tokens)
        cached.append(start.cache_read_input_tokens)
    assert cached[0] == 0
    assert counted - 16 <= cached[1] < counted


def test_a_tool_is_called_and_its_result_answered(client: anthropic.Anthropic) -> None:
    with client.messages.stream(messages=SUM, tools=[ADD], max_tokens=80, **GREEDY) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        asked = stream.get_final_message()
    assert asked.stop_reason == "tool_use"
    call = asked.content[-1]
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("add", {"a": 17, "b": 25})
    assert len(pieces) > 1
    assert json.loads("".join(pieces)) == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "42"}]}
    turns = [*SUM, {"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(messages=turns, tools=[ADD], max_tokens=80, **GREEDY)
    assert answer.stop_reason == "end_turn"
    assert "42" in text_of(answer)


@pytest.mark.parametrize(
    ("choice", "calls"), [({"type": "any"}, True), ({"type": "tool", "name": "add"}, True), ({"type": "none"}, False)]
)
def test_the_choice_of_tools_holds(client: anthropic.Anthropic, choice: Any, calls: bool) -> None:
    choice = {**choice, **({"disable_parallel_tool_use": True} if calls else {})}
    messages = QUESTION if calls else SUM
    message = client.messages.create(messages=messages, tools=[ADD], tool_choice=choice, max_tokens=80, **GREEDY)
    assert [block.type for block in message.content].count("tool_use") == int(calls)
    assert (message.stop_reason == "tool_use") == calls


def test_what_an_agent_sends_is_tolerated_and_told(client: anthropic.Anthropic) -> None:
    body = json.loads((Path(__file__).parent / "agent_body.json").read_text(encoding="utf-8"))
    more = {"temperature": 0, "something_new": {"a": 1}}
    raw = client.beta.messages.with_raw_response.create(**body, extra_body=more)
    assert raw.parse().usage.output_tokens == 3
    told = raw.headers["x-asyncengine-ignored"].split(", ")
    assert sorted(told) == [
        "context_management", "output_config.effort", "something_new", "tools[3] (web_search_20250305)",
    ]  # fmt: skip


def test_models_are_listed_as_the_client_knows_them(client: anthropic.Anthropic, demo_url: str) -> None:
    page = client.models.list()
    assert [(model.id, model.display_name, model.type) for model in page] == [("demo", "demo", "model")]
    assert [client.models.retrieve(name).id for name in ("demo", "an/alias")] == ["demo", "an/alias"]
    assert httpx.get(f"{demo_url}/v1/models").json()["object"] == "list"
    assert httpx.get(f"{demo_url}/v1/models/demo").json()["object"] == "model"


@pytest.mark.parametrize("streaming", [False, True])
def test_the_stop_sequence_is_told(client: anthropic.Anthropic, streaming: bool) -> None:
    asked: dict[str, Any] = {"messages": QUESTION, "max_tokens": 30, "stop_sequences": ["zebra", "can I"], **GREEDY}
    if streaming:
        with client.messages.stream(**asked) as stream:
            message: Any = stream.get_final_message()
    else:
        message = client.messages.create(**asked)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "can I")
    assert "can I" not in text_of(message)


def test_the_client_parses_what_it_asked_for(client: anthropic.Anthropic) -> None:
    class Person(pydantic.BaseModel):
        name: str
        age: int

    about: list[Any] = [{"role": "user", "content": "Extract: Ada is 36 years old."}]
    parsed = client.messages.parse(messages=about, output_format=Person, max_tokens=80, **GREEDY)
    assert isinstance(parsed.parsed_output, Person)
    with client.messages.stream(messages=about, output_format=Person, max_tokens=80, **GREEDY) as stream:
        assert stream.get_final_message().parsed_output == parsed.parsed_output
