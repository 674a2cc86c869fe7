"""Malformed, non-finite, unknown or impossible input is refused at submit by name and limit (contract 7)."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.data import cases_of
from support.fake_engine import executor_of, greedy, make_engine, oracle

from asyncengine import AsyncEngine, Engine, EngineConfig, SamplingParams
from asyncengine.errors import AdapterNotFound, ContextLengthExceeded, EngineError, GrammarError, InvalidParameter

ROWS: dict[str, Any] = cases_of(__file__)

NAN, INF = float("nan"), float("inf")
Call = Callable[[AsyncEngine], Awaitable[Any]]


def params(**values: Any) -> Call:
    async def call(engine: AsyncEngine) -> Any:
        return await engine.generate([2, 3], SamplingParams.from_dict(values))

    return call


def request(prompt: Any = (2, 3), **options: Any) -> Call:
    async def call(engine: AsyncEngine) -> Any:
        return await engine.generate(prompt, options.pop("params", greedy(4)), **options)

    return call


BAD: list[tuple[str, Call, str, str]] = [
    ("unknown parameter", params(temprature=1.0), "temprature", "did you mean 'temperature'"),
    ("a sampling parameter to the call", request(max_tokens=3), "max_tokens", "pass params=SamplingParams(max_tokens="),
    ("NaN temperature", params(temperature=NAN), "temperature", "must be finite"),
    ("overflowing temperature", params(temperature=10**400), "temperature", "must be finite"),
    ("negative temperature", params(temperature=-0.1), "temperature", ">= 0"),
    ("top_p 0", params(top_p=0.0), "top_p", "> 0 and <= 1"),
    ("top_k -2", params(top_k=-2), "top_k", ">= -1"),
    ("repetition penalty 0", params(repetition_penalty=0.0), "repetition_penalty", ">= 0.001 and <= 1000"),
    ("frequency penalty", params(frequency_penalty=-INF), "frequency_penalty", "must be finite"),
    ("max_tokens 0", params(max_tokens=0), "max_tokens", ">= 1"),
    ("prompt_logprobs 1", params(max_tokens=0, prompt_logprobs=1), "prompt_logprobs", "True or False"),
    ("fractional max_tokens", params(max_tokens=1.5), "max_tokens", "must be an integer"),
    ("min above max", params(max_tokens=2, min_tokens=3), "min_tokens", "max_tokens=2"),
    ("min_tokens beyond the context", params(min_tokens=10**6), "min_tokens", "leaves 506"),
    ("n 0", params(n=0), "n", ">= 1"),
    ("n too large", params(n=129), "n", "max_n=128"),
    ("seed too large", params(seed=2**64), "seed", "between"),
    ("stop is a number", params(stop=5), "stop", "must be a sequence"),
    ("empty stop string", params(stop=[""]), "stop", "non-empty"),
    ("100,000 stop strings", params(stop=["x"] * 100_000), "stop", "100000 exceeds the engine's max_stop_strings=64"),
    ("long stop string", params(stop=["x" * 2000]), "stop", "max_stop_string_length=1024"),
    ("stop without a tokenizer", params(stop=["x"]), "stop", "needs a tokenizer"),
    ("stop id out of range", params(stop_token_ids=[97]), "stop_token_ids", "below 97"),
    ("too many stop ids", params(stop_token_ids=[5] * 1025), "stop_token_ids", "max_stop_token_ids=1024"),
    ("top_logprobs", params(top_logprobs=51), "top_logprobs", "max_top_logprobs=50"),
    ("bias of names", params(logit_bias={"a1": 1, "5": 1, "b2": 1}), "logit_bias", "got 'a1, b2'"),
    ("NaN bias", params(logit_bias={5: NAN}), "logit_bias[5]", "must be finite"),
    ("bias out of range", params(logit_bias={5: 101}), "logit_bias[5]", "<= 100"),
    ("bias of an unknown token", params(logit_bias={97: 1.0}), "logit_bias", "below 97"),
    ("ignore_eos of text", params(ignore_eos="no"), "ignore_eos", "True or False"),
    ("on_budget", params(on_budget="hope"), "on_budget", "one of 'close', 'offer', 'truncate', 'error'"),
    ("empty prompt", request([]), "prompt", "must not be empty"),
    ("text without a tokenizer", request("hello"), "prompt", "no tokenizer"),
    ("no prompt", request(None), "prompt", "must be a str or a sequence"),
    ("bytes", request(b"ab"), "prompt", "must be a str or a sequence"),
    ("a set", request({5, 6}), "prompt", "must be a str or a sequence"),
    ("an array of rows", request(np.array([[5, 6, 7]])), "prompt[0]", "between 0 and 96"),
    ("a prompt without end", request(itertools.repeat(5)), "prompt", "more tokens than the context of 508"),
    ("token id out of range", request([2, 97]), "prompt[1]", "between 0 and 96"),
    ("boolean token id", request([True]), "prompt[0]", "between 0 and 96"),
    ("prompt longer than the context", request([2] * 5000), "prompt", "has 5000 tokens; the context of 508"),
    ("answer longer than the context", request([2] * 500, params=greedy(9)), "max_tokens", "508 leaves 8"),
    ("params of another kind", request(params={"max_tokens": 3}), "params", "must be a SamplingParams"),
    ("timeout 0", request(timeout=0), "timeout", "positive, finite"),
    ("text timeout", request(timeout="1s"), "timeout", "positive, finite"),
    ("clipping of text", request(clip_max_tokens="yes"), "clip_max_tokens", "True or False"),
    ("fractional priority", request(priority=1.5), "priority", "must be an integer"),
    ("numeric request id", request(request_id=7), "request_id", "must be a str"),
    ("unknown adapter", request(adapter="french"), "adapter", "takes no adapters"),
    ("grammar without a compiler", params(grammar="x"), "grammar", "takes no grammars"),
]
KINDS: dict[str, type[Exception]] = {
    "a prompt without end": ContextLengthExceeded,
    "prompt longer than the context": ContextLengthExceeded,
    "answer longer than the context": ContextLengthExceeded,
    "min_tokens beyond the context": ContextLengthExceeded,
    "unknown adapter": AdapterNotFound,
    "grammar without a compiler": GrammarError,
}


@pytest.mark.parametrize(("name", "call", "field", "limit"), BAD, ids=[case[0] for case in BAD])
async def test_bad_input_is_refused_by_name_and_disturbs_nobody(name: str, call: Call, field: str, limit: str):
    async with make_engine() as engine:
        executor_of(engine).hold()
        other = engine.stream([4, 5], greedy(6))
        await other.__aenter__()
        with pytest.raises(KINDS.get(name, InvalidParameter)) as refused:
            await call(engine)
        assert isinstance(refused.value, EngineError)
        assert isinstance(refused.value, ValueError)
        assert refused.value.field == field
        assert limit in str(refused.value)
        assert str(refused.value).startswith(f"{field}: ")
        assert len(str(refused.value)) < 300
        executor_of(engine).release()
        assert (await other.result()).token_ids == oracle(engine, [4, 5], 6)
        assert sum(engine.stats().finished.values()) == 1


@pytest.mark.parametrize("kind", [np.array, torch.tensor, iter, tuple, lambda ids: [np.int16(i) for i in ids]])
async def test_token_ids_of_any_kind_of_integer_are_taken(kind: Callable[[Any], Any]):
    ids = list(range(2, 9))
    async with make_engine() as engine:
        done = await engine.generate(kind(ids), greedy(6))
        assert done.token_ids == oracle(engine, ids, 6)
        assert done.usage.prompt_tokens == 7


async def test_more_tokens_than_the_context_has_left_can_mean_what_is_left():
    async with make_engine() as engine:
        done = await engine.generate([2] * 500, greedy(900), clip_max_tokens=True)
        assert (len(done.token_ids), done.finish_reason) == (8, "length")
        assert len((await engine.generate([2] * 500, greedy(3), clip_max_tokens=True)).token_ids) == 3
        params = SamplingParams(min_tokens=9, max_tokens=900)
        with pytest.raises(ContextLengthExceeded, match="leaves 8"):
            await engine.generate([2] * 500, params, clip_max_tokens=True)


async def test_the_longest_request_that_fits_is_served():
    async with make_engine() as engine:
        done = await engine.generate([2] * 507, greedy(1))
        assert len(done.token_ids) == 1
        done = await engine.generate([2] * 8, greedy(500, ignore_eos=True))
        assert len(done.token_ids) == 500


@pytest.mark.parametrize(
    ("settings", "field"),
    [*ROWS["a_bad_setting_is_refused_by_name"], ({"request_timeout": NAN}, "request_timeout")],
    ids=str,
)
def test_a_bad_setting_is_refused_by_name(settings: dict[str, Any], field: str):
    with pytest.raises(InvalidParameter) as refused:
        EngineConfig.from_dict(settings)
    assert refused.value.field == field


def test_what_is_no_engine_and_no_loader_is_refused_where_it_is_given():
    with pytest.raises(InvalidParameter, match=r"^build: must be callable; .*AsyncEngine\.from_pretrained, got 'demo'"):
        AsyncEngine("demo")  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match=r"^engine: must be .*; a model: Engine\.from_pretrained, got 'demo'"):
        Engine("demo")  # type: ignore[arg-type]


@pytest.mark.parametrize(("prompts", "said"), ROWS["which_of_many_prompts_is_wrong"])
def test_which_of_many_prompts_is_wrong(prompts: Any, said: str):
    engine = make_engine(hosted=True)
    engine.start_blocking()
    with Engine(engine) as blocking, pytest.raises(InvalidParameter, match=f"^{said}"):
        blocking.generate_many(prompts, greedy(3))


def test_a_context_larger_than_the_cache_is_refused_when_wiring():
    with pytest.raises(InvalidParameter, match="max_model_len: the KV cache holds 508 tokens"):
        make_engine(hosted=True, max_model_len=600).start_blocking()
