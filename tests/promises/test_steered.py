"""The engine's text is told apart from the model's, and is no part of a call (contract line 15)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.small_grammars import closed

from asyncengine import Completion, Engine, SamplingParams

WEATHER: list[Any] = [{"role": "user", "content": "What is the weather in Sankt Petersburg?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ABOUT = {"name": "get_weather", "description": "Get the current weather for a city.", "parameters": CITY}
TOOL: dict[str, Any] = {"type": "function", "function": ABOUT}
REQUEST: list[Any] = [
    {"role": "user", "content": "Extract name, age and job as JSON.\n\nText: Marta is a baker. Marta is 41 years old."}
]
PERSON = closed({"name": {"type": "string"}, "age": {"type": "integer"}, "job": {"type": "string"}})
FORM: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.from_pretrained("demo", show_progress=False) as made:
        yield made


def params(budget: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=budget, **more)


def streamed(engine: Engine, messages: list[Any], how: SamplingParams, **options: Any) -> Completion:
    """The completion of a stream whose chunks say the same."""
    with engine.stream_chat(messages, how, **options) as stream:
        chunks = list(stream)
        completion = stream.result()
    own = [chunk.steered_from for chunk in chunks]
    assert own == [None] * own.count(None) + [completion.steered_from] * (len(own) - own.count(None))
    assert own[-1] == completion.steered_from
    assert "".join(chunk.text for chunk in chunks) == completion.text
    written: dict[int, str] = {}
    for delta in [delta for chunk in chunks for delta in chunk.tool_calls or ()]:
        written[delta.index] = written.get(delta.index, "") + delta.arguments
    calls = (*completion.tool_calls, *completion.broken_calls)
    assert sorted(written.values()) == sorted(call.arguments for call in calls)
    return completion


def test_a_call_that_the_engine_closed_is_a_broken_one_unless_asked_for(engine: Engine) -> None:
    [whole] = engine.chat(WEATHER, params(60), tools=[TOOL]).tool_calls
    assert json.loads(whole.arguments) == {"city": "Sankt Petersburg"}
    ends = set()
    for budget in range(13, 30):
        for chat in (engine.chat, lambda *args, **options: streamed(engine, *args, **options)):
            made = chat(WEATHER, params(budget), tools=[TOOL])
            assert [call.arguments for call in made.tool_calls] in ([], [whole.arguments])
            for call in made.broken_calls:
                assert whole.arguments.startswith(call.arguments) != (call.arguments == whole.arguments)
                assert call.steered_from == len(call.arguments)
            if made.broken_calls:
                assert (made.finish_reason, made.steered_from) == ("length", 0)
            ends.add((made.finish_reason, len(made.tool_calls), len(made.broken_calls)))
    assert {("length", 0, 1), ("tool_calls", 1, 0)} <= ends
    offered = engine.chat(WEATHER, params(20, on_budget="offer"), tools=[TOOL], tool_choice="required")
    [call] = offered.tool_calls
    assert offered.finish_reason == "tool_calls"
    assert call.steered_from is not None
    assert whole.arguments.startswith(call.arguments[: call.steered_from])
    assert json.loads(call.arguments)["city"] != "Sankt Petersburg"


@pytest.mark.parametrize("stop", [None, ['er"}', "}]"]], ids=["plain", "text is held back"])
def test_a_structured_answer_ends_with_stop_if_it_is_all_the_models_own(engine: Engine, stop: Any) -> None:
    whole = engine.chat(REQUEST, params(120), response_format=FORM)
    assert (whole.finish_reason, whole.steered_from) == ("stop", None)
    needed, closed = len(whole.token_ids), 0
    for budget in range(12, needed + 2):
        how = params(budget, stop=stop, n=2)
        made = [engine.chat(REQUEST, how, response_format=FORM).samples[1]]
        made += [streamed(engine, REQUEST, params(budget, stop=stop), response_format=FORM)]  # type: ignore[list-item]
        for answer in made:
            if answer.steered_from is None:
                assert answer.finish_reason == "stop"
                assert answer.stop or json.loads(answer.text) == json.loads(whole.text)
                continue
            closed += answer.stop is None
            assert answer.finish_reason == "length" or answer.stop
            assert whole.text.startswith(answer.text[: answer.steered_from])
            assert answer.stop or json.loads(answer.text) != json.loads(whole.text)
    assert closed
