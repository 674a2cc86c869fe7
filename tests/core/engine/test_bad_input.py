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
from asyncengine.errors import ContextLengthExceeded, EngineError, InvalidParameter

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


BAD: list[Any] = [
    *((name, params(**values), *said) for name, values, *said in ROWS["parameters"]),
    *((name, request(**values), *said) for name, values, *said in ROWS["requests"]),
    ("overflowing temperature", params(temperature=10**400), "temperature", "must be finite"),
    ("100,000 stop strings", params(stop=["x"] * 100_000), "stop", "100000 exceeds the engine's max_stop_strings=64"),
    ("long stop string", params(stop=["x" * 2000]), "stop", "max_stop_string_length=1024"),
    ("too many stop ids", params(stop_token_ids=[5] * 1025), "stop_token_ids", "max_stop_token_ids=1024"),
    ("NaN bias", params(logit_bias={5: NAN}), "logit_bias[5]", "must be finite"),
    ("bias out of range", params(logit_bias={5: 101}), "logit_bias[5]", "<= 100"),
    ("bias of an unknown token", params(logit_bias={97: 1.0}), "logit_bias", "below 97"),
    ("bytes", request(b"ab"), "prompt", "must be a str or a sequence"),
    ("a set", request({5, 6}), "prompt", "must be a str or a sequence"),
    ("an array of rows", request(np.array([[5, 6, 7]])), "prompt[0]", "between 0 and 96"),
    (
        "a prompt without end",
        request(itertools.repeat(5)),
        "prompt",
        "more tokens than the context of 508",
        "ContextLengthExceeded",
    ),
    (
        "prompt longer than the context",
        request([2] * 5000),
        "prompt",
        "has 5000 tokens; the context of 508",
        "ContextLengthExceeded",
    ),
    (
        "answer longer than the context",
        request([2] * 500, params=greedy(9)),
        "max_tokens",
        "508 leaves 8",
        "ContextLengthExceeded",
    ),
]
"""Name, call, field in the error, words of it, and the name of its class if that is not InvalidParameter."""


@pytest.mark.parametrize("case", BAD, ids=[case[0] for case in BAD])
async def test_bad_input_is_refused_by_name_and_disturbs_nobody(case: tuple[Any, ...]):
    _, call, field, limit, *kind = case
    async with make_engine() as engine:
        executor_of(engine).hold()
        other = engine.stream([4, 5], greedy(6))
        await other.__aenter__()
        with pytest.raises(EngineError) as refused:
            await call(engine)
        assert type(refused.value).__name__ == (kind or ["InvalidParameter"])[0]
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
