"""LangChain: which LoRA adapter answers, how a call says so, and what is told about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import get_usage_metadata_callback
from langchain_core.exceptions import ModelInvalidRequestError
from langchain_core.messages import HumanMessage

from asyncengine import EngineHandle, SamplingParams
from asyncengine.integrations.langchain import ChatAsyncEngine

from .conftest import TOKENS, Watch, added

Make = Callable[..., ChatAsyncEngine]
NAMES = (None, "first", "second")
pytestmark = pytest.mark.usefixtures("loaded_adapters")


async def test_every_way_to_choose_an_adapter(make_chat: Make, answers: dict[str | None, str]) -> None:
    base, first = make_chat(max_tokens=TOKENS), make_chat(max_tokens=TOKENS, adapter="first")
    asked: list[tuple[str | None, Any]] = [
        (None, base.invoke("Hello")),
        (None, first.invoke("Hello", model=base.model)),
        (None, first.invoke("Hello", adapter=base.model)),
        (None, first.invoke("Hello", adapter=None)),
        ("first", first.invoke("Hello")),
        ("first", base.bind(model="first").invoke("Hello")),
        ("first", base.bind(adapter="first").invoke("Hello")),
        ("second", first.invoke("Hello", model="second")),
        ("second", await first.ainvoke("Hello", model="second")),
        ("second", added(list(first.stream("Hello", model="second")))),
        ("second", added([chunk async for chunk in first.astream("Hello", model="second")])),
        ("second", first.batch(["Hello", "Hi"], model="second")[0]),
        ("second", (await base.bind(model="second").abatch(["Hello", "Hi"]))[0]),
    ]
    for name, answer in asked:
        assert answer.content == answers[name]
        assert answer.response_metadata["model_name"] == (name or base.model)


def test_the_cache_tells_adapters_apart(make_chat: Make, answers: dict[str | None, str], watch: Watch) -> None:
    """The choice may be written as a field, or as `model=` or `adapter=` on top of it."""
    cache = InMemoryCache()
    chats = {name: make_chat(max_tokens=TOKENS, cache=cache, adapter=name) for name in NAMES}
    base = chats[None].model
    asked = []
    for _ in range(2):
        for own, chat in chats.items():
            assert chat.invoke("Hello").content == answers[own]
            assert chat.invoke("Hello", model=base).content == answers[None]
            assert chat.invoke("Hello", adapter=base).content == answers[None]
            for name in ("first", "second"):
                assert chat.invoke("Hello", model=name).content == answers[name]
                assert chat.invoke("Hello", adapter=name).content == answers[name]
        asked.append(watch.ended("length"))
    assert asked[0] == asked[1] > 0, "the second round comes from the cache"


def test_a_call_that_names_two_adapters_is_refused(make_chat: Make) -> None:
    with pytest.raises(ModelInvalidRequestError, match="adapter: contradicts model='first'"):
        make_chat().invoke("Hello", model="first", adapter="second")
    assert make_chat(max_tokens=2).invoke("Hello", model="first", adapter="first").content


def test_what_tracers_and_counters_are_told(make_chat: Make) -> None:
    chat = make_chat(max_tokens=4, adapter="first")
    base = chat.model
    told = [{}, {"model": "second"}, {"adapter": "second"}, {"model": base}, {"adapter": None}]
    names = [chat._get_ls_params(**kwargs)["ls_model_name"] for kwargs in told]
    assert names == ["first", "second", "second", base, base]
    with get_usage_metadata_callback() as callback:
        chat.invoke("Hello")
        chat.invoke("Hello", model="second")
        chat.invoke("Hello", model=base)
    assert {name: usage["output_tokens"] for name, usage in callback.usage_metadata.items()} == {
        "first": 4, "second": 4, base: 4,
    }  # fmt: skip
    assert chat.profile is not None
    assert chat.profile["name"] == "first"
    result = chat.generate([[HumanMessage("Hello")], [HumanMessage("Hi")]], model="second")
    assert result.llm_output is not None
    assert result.llm_output["model_name"] == "second"


async def test_text_completion_takes_adapters_too(handle: EngineHandle, make_llm: Callable[..., Any]) -> None:
    params = SamplingParams(temperature=0, max_tokens=TOKENS)
    text = handle.get().generate("Once", params, adapter="first").text
    base, first = make_llm(max_tokens=TOKENS), make_llm(max_tokens=TOKENS, adapter="first")
    assert first.invoke("Once") == base.bind(model="first").invoke("Once") == text
    assert base.invoke("Once") == first.invoke("Once", model=base.model) != text
    assert "".join([piece async for piece in base.astream("Once", model="first")]) == text
    assert (await base.agenerate(["Once"], adapter="first")).llm_output["model_name"] == "first"
