"""The Responses API as OpenAI's own client sees it, with its answers checked against its types."""

from __future__ import annotations

from functools import partial
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseFunctionToolCall
from support.data import cases_of
from support.http_server import serving

from asyncengine import AsyncEngine
from asyncengine.integrations.http import app

ROWS: dict[str, Any] = cases_of(__file__)

WEATHER: Any = ROWS["weather"]
FOR_EVER: Any = {"ignore_eos": True}


@pytest.fixture
def client(demo_url: str) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{demo_url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ).with_options(timeout=60)


def ask(client: openai.OpenAI, given: Any = "hello", **more: Any) -> Response:
    return client.responses.create(**{"model": "demo", "input": given, "temperature": 0, **more})


def call(response: Response) -> ResponseFunctionToolCall:
    (item,) = response.output
    assert isinstance(item, ResponseFunctionToolCall)
    return item


def settled(client: openai.OpenAI, response_id: str) -> Response:
    """The response once it has ended: a request that waits its turn behind it, asked again and again."""
    for _ in range(200):
        response = client.responses.retrieve(response_id)
        if response.status not in ("queued", "in_progress"):
            return response
        ask(client, max_output_tokens=1, store=False)
    raise AssertionError("the response does not end")


def test_an_answer_says_what_it_is(client: openai.OpenAI) -> None:
    answer = ask(client, instructions="Be kind.", metadata={"a": "b"}, prompt_cache_key="k")
    assert answer.status == "completed"
    assert answer.output_text
    assert (answer.instructions, answer.metadata, answer.prompt_cache_key) == ("Be kind.", {"a": "b"}, "k")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


def test_a_result_goes_back_with_its_items_or_with_an_id(client: openai.OpenAI) -> None:
    question: Any = {"role": "user", "content": "the weather in Paris?"}
    first = ask(client, [question], tools=[WEATHER], tool_choice="required")
    result: Any = {"type": "function_call_output", "call_id": call(first).call_id, "output": "sunny"}
    by_id = ask(client, [result], tools=[WEATHER], previous_response_id=first.id)
    by_items = ask(client, [question, *first.output, result], tools=[WEATHER], store=False)
    assert by_id.output_text == by_items.output_text == "Paris is sunny."
    assert by_id.usage is not None
    assert by_items.usage is not None
    assert by_id.usage.input_tokens == by_items.usage.input_tokens
    told = client.responses.input_items.list(by_id.id, order="asc", limit=2)
    assert [item.type for item in told] == ["message", "function_call", "function_call_output"]


def test_what_is_stored_can_be_fetched_and_deleted(client: openai.OpenAI) -> None:
    answer = ask(client, max_output_tokens=4)
    assert client.responses.retrieve(answer.id) == answer
    client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(answer.id)
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, previous_response_id=answer.id)
    assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")


@pytest.mark.usefixtures("held")
def test_a_stream_is_cancelled(client: openai.OpenAI) -> None:
    stream = client.responses.create(model="demo", input="hello", stream=True, extra_body=FOR_EVER)
    first = next(iter(stream))
    assert first.type == "response.created"
    with pytest.raises(openai.ConflictError):
        client.responses.delete(first.response.id)
    client.responses.cancel(first.response.id)
    last = list(stream)[-1]
    assert last.type == "response.incomplete"
    assert last.response.status == client.responses.retrieve(first.response.id).status == "cancelled"


def test_a_response_is_made_while_no_client_waits(client: openai.OpenAI) -> None:
    begun = ask(client, background=True, temperature=0)
    assert (begun.status, begun.background) == ("queued", True)
    done = settled(client, begun.id)
    assert (done.status, done.output_text) == ("completed", ask(client, temperature=0).output_text)
    events = [*client.responses.retrieve(begun.id, stream=True)]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert "".join([event.delta for event in events if event.type == "response.output_text.delta"]) == done.output_text
    assert events[-1].type == "response.completed"
    rest = client.responses.retrieve(begun.id, stream=True, starting_after=3)
    assert [*rest] == events[4:]
    assert client.responses.cancel(begun.id).status == "completed", "it has ended"
    waited_for = ask(client, max_output_tokens=1)
    for refused in (client.responses.cancel, partial(client.responses.retrieve, stream=True)):
        with pytest.raises(openai.BadRequestError):
            refused(waited_for.id)


@pytest.mark.usefixtures("held")
def test_a_response_that_runs_is_followed_left_and_cancelled(client: openai.OpenAI) -> None:
    with client.responses.create(model="demo", input="a", stream=True, background=True, extra_body=FOR_EVER) as stream:
        seen = [event for event, _ in zip(stream, range(8), strict=False)]
    response_id = seen[0].response.id
    assert client.responses.retrieve(response_id).status == "in_progress", "its first client left"
    follower = client.responses.retrieve(response_id, stream=True, starting_after=seen[-1].sequence_number)
    assert next(iter(follower)).sequence_number == seen[-1].sequence_number + 1
    with pytest.raises(openai.ConflictError, match="is still being written"):
        ask(client.with_options(max_retries=0), previous_response_id=response_id)
    assert client.responses.cancel(response_id).status == "cancelled"
    assert [*follower][-1].type == "response.incomplete"
    assert settled(client, response_id).status == "cancelled"


def test_a_conversation_becomes_one_item(client: openai.OpenAI) -> None:
    compact = client.responses.compact(model="demo", input="hello")
    (item,) = compact.output
    assert item.type == "compaction"
    assert ask(client, [item, {"role": "user", "content": "go on"}]).status == "completed"
    assert client.responses.input_tokens.count(model="demo", input="hello").input_tokens < compact.usage.input_tokens


def test_fields_that_change_nothing_are_listed(client: openai.OpenAI) -> None:
    given: Any = {"truncation": "auto", "tools": [{"type": "web_search"}], "user": "me"}
    given |= {"include": ["message.input_image.image_url"], "model": "demo", "input": "hello", "max_output_tokens": 1}
    raw = client.responses.with_raw_response.create(**given)
    told = "user, truncation, tools[0], include message.input_image.image_url"
    assert raw.headers["x-asyncengine-ignored"] == told


def test_a_long_input_is_read(client: openai.OpenAI) -> None:
    nothing: Any = {"type": "reasoning", "summary": []}
    long = ask(client, [nothing] * 1001 + [{"role": "user", "content": "hello"}])
    assert long.output_text == ask(client).output_text
    items = client.responses.input_items.list(long.id, limit=100, order="asc")
    assert len(list(items)) == 1002
    assert ask(client, "and then?", previous_response_id=long.id).status == "completed"


@pytest.mark.usefixtures("held")
def test_a_client_that_leaves_leaves_nothing(client: openai.OpenAI) -> None:
    stream = client.responses.create(model="demo", input="hello", stream=True, extra_body=FOR_EVER)
    first = next(iter(stream))
    assert first.type == "response.created"
    assert client.responses.retrieve(first.response.id).status == "in_progress"
    stream.close()
    with pytest.raises(openai.NotFoundError):
        settled(client, first.response.id)


async def test_an_app_stores_no_more_than_it_is_given() -> None:
    settings: dict[str, Any] = {"show_progress": False, "grammar_backend": "none", "speculation": "off"}
    async with (
        await AsyncEngine.from_pretrained("demo", **settings) as engine,
        serving(app(engine, response_memory=0)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client,
    ):
        answer = await client.responses.create(model="demo", input="hello", max_output_tokens=2)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(answer.id)


def test_a_tool_is_chosen_among_some(client: openai.OpenAI) -> None:
    other: Any = {**WEATHER, "name": "get_time"}
    choice: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_time"}]}
    assert call(ask(client, "the weather in Paris?", tools=[WEATHER, other], tool_choice=choice)).name == "get_time"
