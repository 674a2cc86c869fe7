"""Text completions over HTTP, number for number what the engine says in process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from statistics import fmean
from typing import Any

import openai
import pytest

from asyncengine import AsyncEngine, Chunk, Engine, RequestFailed, SamplingParams, beam_search
from asyncengine.integrations.http.several import Beams, Several

TEXT = "The capital of France is"


@pytest.fixture
def client(demo_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{demo_url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.from_pretrained("demo", show_progress=False) as engine:
        yield engine


def ask(client: openai.OpenAI, prompt: Any = TEXT, **fields: Any) -> Any:
    known = ("echo", "logprobs", "max_tokens", "n", "stream", "stream_options", "seed", "temperature", "stop")
    extra = {name: fields.pop(name) for name in list(fields) if name not in known}
    fields = {"temperature": 0, "max_tokens": 6, **fields}
    return client.completions.create(model="demo", prompt=prompt, extra_body=extra, **fields)


def test_each_prompt_has_its_samples_in_order(client: openai.OpenAI, engine: Engine) -> None:
    ids = engine.tokenize("Once upon a time")
    done = [engine.generate(prompt, SamplingParams(temperature=0, max_tokens=6)) for prompt in (TEXT, ids)]
    wanted = [each.text for each in done]
    answer = ask(client, [TEXT, ids], n=2)
    assert [choice.text for choice in answer.choices] == [wanted[0], wanted[0], wanted[1], wanted[1]]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == len(engine.tokenize(TEXT)) + len(ids)
    assert answer.usage.completion_tokens == 2 * sum(each.usage.completion_tokens for each in done)
    assert ask(client, ids).choices[0].text == wanted[1]
    assert ask(client, [TEXT]).choices[0].text == wanted[0]


def test_the_likeliest_samples_are_returned(client: openai.OpenAI) -> None:
    prompts, sampled = [TEXT, "Once"], {"temperature": 1.0, "seed": 4, "max_tokens": 12}
    made = ask(client, prompts, n=5, logprobs=0, **sampled).choices
    wanted = []
    for group in (made[:5], made[5:]):
        means = {choice.index: fmean(choice.logprobs.token_logprobs) for choice in group}
        wanted += sorted(group, key=lambda choice, of=means: -of[choice.index])[:2]
    best = ask(client, prompts, n=2, best_of=5, **sampled)
    assert [choice.text for choice in best.choices] == [choice.text for choice in wanted]
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    assert {choice.logprobs for choice in best.choices} == {None}
    scored = ask(client, prompts, n=1, best_of=5, logprobs=0, echo=True, **sampled).choices
    assert [choice.text for choice in scored] == [TEXT + wanted[0].text, "Once" + wanted[2].text]
    assert scored[1].logprobs.token_logprobs[-12:] == wanted[2].logprobs.token_logprobs
    assert best.usage.completion_tokens == sum(len(choice.logprobs.tokens) for choice in made)


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_a_prompt_is_scored_as_in_process(client: openai.OpenAI, engine: Engine, max_tokens: int) -> None:
    wanted = SamplingParams(temperature=0, max_tokens=max_tokens, prompt_logprobs=True, logprobs=True, top_logprobs=2)
    done = engine.generate(TEXT, wanted)
    ids = engine.tokenize(TEXT)
    answer = ask(client, echo=True, logprobs=2, max_tokens=max_tokens)
    scores = answer.choices[0].logprobs
    assert answer.choices[0].text == TEXT + done.text
    assert scores.tokens == [*engine.token_texts(ids), *(each.token for each in done.logprobs or ())]
    assert done.prompt_logprobs is not None
    assert scores.token_logprobs[0] is None
    of_prompt = [entry.logprob for entry in done.prompt_logprobs if entry is not None]
    assert scores.token_logprobs[1:] == [*of_prompt, *(each.logprob for each in done.logprobs or ())]
    assert scores.top_logprobs[0] is None
    for token, logprob, top in zip(scores.tokens[1:], scores.token_logprobs[1:], scores.top_logprobs[1:], strict=True):
        assert top[token] == logprob
        assert 2 <= len(top) <= 3
        assert max(top.values()) >= logprob
    assert answer.choices[0].text[scores.text_offset[3] :].startswith(scores.tokens[3])


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_stream_scores_its_prompts_first(client: openai.OpenAI, max_tokens: int) -> None:
    asked: Any = {"echo": True, "logprobs": 2, "max_tokens": max_tokens, "n": 2 if max_tokens else 1, "seed": 5}
    whole = ask(client, [TEXT, "Once"], **asked)
    *frames, last = ask(client, [TEXT, "Once"], stream=True, stream_options={"include_usage": True}, **asked)
    assert last.usage == whole.usage
    chunks = [chunk.choices[0] for chunk in frames]
    for choice in whole.choices:
        own = [chunk for chunk in chunks if chunk.index == choice.index]
        assert "".join(chunk.text for chunk in own) == choice.text
        for name, values in choice.logprobs:
            assert [each for chunk in own if chunk.logprobs for each in getattr(chunk.logprobs, name)] == values
        assert own[0].logprobs.token_logprobs[0] is None
        assert [chunk.finish_reason is not None for chunk in own] == [False] * (len(own) - 1) + [True]


def test_named_tokens_are_scored_as_in_process(client: openai.OpenAI, engine: Engine) -> None:
    ids = [engine.tokenize(word)[-1] for word in (" Paris", " the")]
    done = engine.generate(TEXT, SamplingParams(temperature=0, max_tokens=6, logprob_token_ids=ids))
    assert [[each.token_id for each in entry.top] for entry in done.logprobs or ()] == [ids] * len(done.token_ids)
    scores = ask(client, logprob_token_ids=ids).choices[0].logprobs
    for entry, top in zip(done.logprobs or (), scores.top_logprobs, strict=True):
        assert top == {**{each.token: each.logprob for each in entry.top}, entry.token: entry.logprob}
    chat: Any = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    for more in ({}, {"prompt_logprobs": 1}):
        told = client.chat.completions.create(**chat, extra_body={"logprob_token_ids": ids, **more})
        content = told.choices[0].logprobs.content  # type: ignore[union-attr]
        assert [[each.token for each in entry.top_logprobs] for entry in content or ()] == [engine.token_texts(ids)] * 2


def test_ids_go_in_and_out(client: openai.OpenAI, engine: Engine) -> None:
    ids = engine.tokenize(TEXT)
    done = engine.generate(ids, SamplingParams(temperature=0, max_tokens=6))
    choice = ask(client, ids, return_token_ids=True, prompt_logprobs=1, logprobs=0).choices[0].model_dump()
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (ids, done.token_ids)
    assert choice["prompt_logprobs"][0] is None
    for token, entry in zip(ids[1:], choice["prompt_logprobs"][1:], strict=True):
        assert next(iter(entry)) == str(token)
        assert entry[str(token)]["decoded_token"] == engine.token_texts([token])[0]
        best = max(entry.values(), key=lambda each: each["logprob"])
        assert best["rank"] == 1
    written, before = list[int](), None
    for chunk in ask(client, ids, return_token_ids=True, stream=True):
        one = chunk.choices[0].model_dump()
        before = before or one.get("prompt_token_ids")
        written += one["token_ids"]
    assert (before, written) == (ids, done.token_ids)


def test_tokens_are_named_by_id_also_those_of_the_prompt(client: openai.OpenAI) -> None:
    choice = ask(client, TEXT, echo=True, logprobs=1, return_token_ids=True, return_tokens_as_token_ids=True).choices[0]
    both = [*choice.model_dump()["prompt_token_ids"], *choice.model_dump()["token_ids"]]
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in both]
    pairs = [*zip(choice.logprobs.tokens, choice.logprobs.top_logprobs, strict=True)]
    assert all(token in top for token, top in pairs[1:])


def test_a_prompt_is_cut_to_a_number_of_tokens(client: openai.OpenAI, engine: Engine) -> None:
    ids = engine.tokenize(TEXT)
    for side, wanted in (("left", ids[-3:]), ("right", ids[:3]), (None, ids[-3:])):
        both = ask(
            client, [TEXT, ids], truncate_prompt_tokens=3, truncation_side=side, return_token_ids=True, echo=True
        )
        choices = [choice.model_dump() for choice in both.choices]
        assert [choice["prompt_token_ids"] for choice in choices] == [wanted, wanted]
        before = engine.detokenize(wanted, skip_special_tokens=False)
        assert all(choice["text"].startswith(before) for choice in choices)
    most = engine.info.max_model_len
    long = ask(client, ids * most, truncate_prompt_tokens=-1, max_tokens=6, return_token_ids=True).choices[0]
    assert long.model_dump()["prompt_token_ids"] == (ids * most)[6 - most :]


def test_the_likeliest_outputs_are_searched_for(client: openai.OpenAI, engine: Engine) -> None:
    searched = {"use_beam_search": True, "n": 3, "max_tokens": 5}
    answer = ask(client, [TEXT, "Once"], return_token_ids=True, **searched)
    for at, prompt in enumerate((TEXT, "Once")):
        wanted = asyncio.run(beam_search(engine.aengine, prompt, width=3, max_tokens=5))
        rows = [choice.model_dump() for choice in answer.choices[3 * at : 3 * at + 3]]
        assert [row["token_ids"] for row in rows] == [list(beam.token_ids) for beam in wanted]
        assert [row["text"] for row in rows] == [beam.text for beam in wanted]
        assert {row["prompt_token_ids"] == engine.tokenize(prompt) for row in rows} == {True}
        assert [row["finish_reason"] == "stop" for row in rows] == [beam.ended for beam in wanted]
    assert answer.usage.completion_tokens == sum(len(row.model_dump()["token_ids"]) for row in answer.choices)
    longer = ask(client, **searched, length_penalty=3.0, echo=True).choices
    assert all(choice.text.startswith(TEXT) for choice in longer)


async def test_a_search_that_is_left_ends() -> None:
    async with await AsyncEngine.from_pretrained("demo", show_progress=False) as engine:
        search = partial(beam_search, engine, width=4, max_tokens=400)
        beams = Beams([TEXT], engine.tokenize, search)  # type: ignore[arg-type]
        asking = asyncio.ensure_future(beams.result())
        while not any(engine.stats().requests.values()):  # noqa: ASYNC110 - what is awaited happens in the engine
            await asyncio.sleep(0.001)
        beams.abort()
        with pytest.raises(RequestFailed):
            await asking
        while any(engine.stats().requests.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_a_reader_of_several_prompts_sees_their_end_when_they_are_left() -> None:
    async with await AsyncEngine.from_pretrained("demo", show_progress=False) as engine:
        params = SamplingParams(max_tokens=500, ignore_eos=True)
        async with Several([TEXT, "Once"], lambda prompt: engine.stream(prompt, params), 1) as several:
            chunk = await anext(several)
            reading = asyncio.ensure_future(rest_of(several))
            await asyncio.sleep(0)  # until it waits
            several.abort()
            ends = [each.finish_reason for each in [chunk, *await reading] if each.finish_reason]
    assert ends == ["abort", "abort"]


async def rest_of(several: Several) -> list[Chunk]:
    return [chunk async for chunk in several]
