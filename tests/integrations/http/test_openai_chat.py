"""Chat completions as OpenAI's own client sees them, beside what the engine says in process."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import httpx
import openai
import pytest
from support.http_server import serving_models

import asyncengine
from asyncengine import Engine, SamplingParams

QUESTION = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(demo_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{demo_url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def expected() -> str:
    with Engine.from_pretrained("demo", show_progress=False) as engine:
        return engine.chat(QUESTION, SamplingParams(temperature=0, max_tokens=12)).text


def test_an_answer_is_that_of_the_engine(client: openai.OpenAI, expected: str) -> None:
    answer = client.chat.completions.create(model="demo", messages=QUESTION, temperature=0, max_tokens=12)
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.model) == (12, "demo")


def test_a_stream_adds_up_to_it(client: openai.OpenAI, expected: str) -> None:
    options = {"include_usage": True}
    stream = client.chat.completions.create(
        model="demo", messages=QUESTION, temperature=0, max_tokens=12, stream=True, stream_options=options
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-2:] == [None, "length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12


def test_every_frame_may_tell_the_usage_so_far(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    ask = partial(client.chat.completions.create, model="demo", messages=QUESTION, temperature=0, max_tokens=9)
    counts = [chunk.usage.completion_tokens for chunk in ask(stream=True, stream_options=options)]
    assert (counts[0], counts[-1], counts) == (0, 9, sorted(counts))
    assert len({*counts}) > 3
    silent = ask(stream=True, stream_options={**options, "include_usage": False})
    assert {chunk.usage for chunk in silent} == {None}


def test_an_answer_may_begin_with_the_message_that_it_goes_on_from(client: openai.OpenAI) -> None:
    begun = [*QUESTION, {"role": "assistant", "content": [{"type": "text", "text": "Good "}]}]
    going_on: Any = {"continue_final_message": True, "echo": True}
    ask: Any = partial(client.chat.completions.create, model="demo", temperature=0, max_tokens=4)
    plain = ask(messages=begun, extra_body={"continue_final_message": True}).choices[0].message.content
    assert ask(messages=begun, extra_body=going_on).choices[0].message.content == "Good " + plain
    chunks = ask(messages=begun, extra_body=going_on, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Good " + plain
    asked = ask(messages=QUESTION, extra_body={"echo": True}).choices[0].message.content
    assert asked == ask(messages=QUESTION).choices[0].message.content, "what the user said is not repeated"


def test_all_of_the_vocabulary_is_scored() -> None:
    with serving_models({"demo": "demo"}, {"max_top_logprobs": 2048, "num_threads": 1}) as (url, _):
        ask = partial(openai.OpenAI(base_url=f"{url}/v1", api_key="none").chat.completions.create, model="demo")
        more = {"top_logprobs": -1, "prompt_logprobs": -1}
        answer = ask(messages=QUESTION, max_tokens=1, logprobs=True, extra_body=more)
    (entry,) = answer.choices[0].logprobs.content
    assert sum(math.exp(each.logprob) for each in entry.top_logprobs) == pytest.approx(1, abs=1e-3)
    assert {len(each) for each in answer.model_dump()["prompt_logprobs"][1:]} == {len(entry.top_logprobs)} == {2048}


@pytest.mark.usefixtures("held")
def test_the_load_is_that_of_requests_which_run(demo_url: str, client: openai.OpenAI) -> None:
    def load() -> int:
        return int(httpx.get(f"{demo_url}/load").json()["server_load"])

    assert httpx.get(f"{demo_url}/version").json() == {"version": asyncengine.__version__}
    assert load() == 0
    with client.chat.completions.create(
        model="demo", messages=QUESTION, max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
        assert load() == 1
