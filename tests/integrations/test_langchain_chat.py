"""`ChatAsyncEngine`: what an answer carries, what a call may say, and that many calls run together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.exceptions import ContextOverflowError, ModelInvalidRequestError, ModelTimeoutError
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.outputs import LLMResult
from support.data import cases_of

from asyncengine import EngineHandle
from asyncengine.errors import InvalidParameter, RequestTimeout
from asyncengine.integrations.langchain import AsyncEngineLLM, ChatAsyncEngine

from .conftest import CONTEXT, LONG, Watch
from .peak import slowed

ROWS: dict[str, Any] = cases_of(__file__)

Make = Callable[..., ChatAsyncEngine]


def test_metadata_of_a_whole_answer(make_chat: Make) -> None:
    chat = make_chat(max_tokens=5, top_logprobs=2)
    answer = chat.invoke("Hello")
    metadata = answer.response_metadata
    assert metadata["model_name"] == chat.model
    assert metadata["model_provider"] == "asyncengine"
    assert metadata["finish_reason"] == "length"
    usage = answer.usage_metadata
    assert usage is not None
    assert usage["output_tokens"] == 5
    assert usage["input_tokens"] == chat.get_num_tokens_from_messages([HumanMessage("Hello")])
    assert usage["total_tokens"] == usage["input_tokens"] + 5
    content = metadata["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == answer.content
    assert all(entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 2 for entry in content)
    assert bytes(content[0]["bytes"]).decode() == content[0]["token"]


def test_stop_in_the_call_and_in_the_constructor(make_chat: Make) -> None:
    whole = str(make_chat(max_tokens=12).invoke("Hello").content)
    stop = whole[6:8]
    before = whole[: whole.index(stop)]
    for answer in (
        make_chat(max_tokens=12).invoke("Hello", stop=[stop]),
        make_chat(max_tokens=12, stop=[stop]).invoke("Hello"),
        make_chat(max_tokens=12, stop=stop).invoke("Hello"),
        make_chat(max_tokens=12, stop=["never-there"]).invoke("Hello", stop=[stop]),
    ):
        assert answer.content == before
        assert answer.response_metadata["finish_reason"] == "stop"
    assert make_chat(max_tokens=12, stop=[stop]).invoke("Hello", stop=[]).content == whole


def test_n_gives_generations_and_counts_each_token_once(make_chat: Make) -> None:
    chat = make_chat(n=3, temperature=1.0, seed=11, max_tokens=10)
    result = chat.generate([[HumanMessage("Hello")]])
    messages = [generation.message for generation in result.generations[0]]
    assert len({str(message.content) for message in messages}) == 3
    usages = [message.usage_metadata for message in messages if isinstance(message, AIMessage)]
    assert usages[0] is not None
    assert usages[0]["output_tokens"] == 30
    assert usages[1:] == [None, None]
    with pytest.raises(InvalidParameter, match="n: must be 1 when streaming"):
        list(chat.stream("Hello"))


@pytest.mark.parametrize(("keyword", "value"), ROWS["a_keyword_that_cannot_be_honoured_is_refused_by_name"])
async def test_a_keyword_that_cannot_be_honoured_is_refused_by_name(
    chat: ChatAsyncEngine, keyword: str, value: object
) -> None:
    for error in (InvalidParameter, ModelInvalidRequestError):
        with pytest.raises(error, match=keyword):
            chat.invoke("Hello", **{keyword: value})
        with pytest.raises(error, match=keyword):
            await chat.ainvoke("Hello", **{keyword: value})
        with pytest.raises(error, match=keyword):
            list(chat.stream("Hello", **{keyword: value}))
        with pytest.raises(error, match=keyword):
            [chunk async for chunk in chat.astream("Hello", **{keyword: value})]


async def test_a_deadline_raises_with_the_partial_text(make_chat: Make, handle: EngineHandle) -> None:
    chat = make_chat(**LONG, timeout=0.05)
    with slowed(handle):
        for ask in (lambda: chat.ainvoke("Hello"), lambda: _drain(chat)):
            with pytest.raises(ModelTimeoutError) as caught:
                await ask()
            assert isinstance(caught.value, RequestTimeout)
        with pytest.raises(ModelTimeoutError):
            chat.invoke("Hello")
        fallback = chat.with_fallbacks([make_chat(max_tokens=3)])
        assert (await fallback.ainvoke("Hello")).usage_metadata["output_tokens"] == 3  # type: ignore[index]


async def _drain(chat: ChatAsyncEngine) -> None:
    async for _ in chat.astream("Hello"):
        pass


def test_caching_tells_models_apart(make_chat: Make, watch: Watch) -> None:
    cache = InMemoryCache()
    first = make_chat(max_tokens=4, cache=cache)
    hit = [first.invoke("Hello").content, first.invoke("Hello").content]
    assert hit[0] == hit[1]
    assert watch.ended("length") == 1
    for other in ({"max_tokens": 5}, {"seed": 3}, {"stop": ["zzz"]}, {"model_kwargs": {"ignore_eos": True}}):
        make_chat(**{"max_tokens": 4, "cache": cache, **other}).invoke("Hello")
    assert watch.ended("length") == 5


def test_langsmith_parameters(make_chat: Make) -> None:
    params = make_chat(max_tokens=7, stop=["a"])._get_ls_params(model="tuned")
    assert params["ls_provider"] == "asyncengine"
    assert params["ls_model_name"] == "tuned"
    assert params["ls_model_type"] == "chat"
    assert params["ls_temperature"] == 0
    assert params["ls_max_tokens"] == 7
    assert params["ls_stop"] == ["a"]
    with pytest.raises(InvalidParameter, match="stop: must be a sequence, got 3"):
        make_chat().invoke("Hello", stop=3)  # type: ignore[arg-type]  # and not for what tracers are told
    for tools in (3, "add"):
        with pytest.raises(InvalidParameter, match="tools: must be a sequence of tools"):
            make_chat().bind_tools(tools)  # type: ignore[arg-type]


TOOL_ABILITIES = ("tool_calling", "tool_choice", "tool_call_streaming")


def test_profile(make_chat: Make, model_path: str) -> None:
    profile = make_chat().profile
    assert profile is not None
    assert profile["structured_output"] is profile["text_inputs"] is True
    for ability in TOOL_ABILITIES:  # its chat template writes no tool calls
        assert profile[ability] is False  # type: ignore[literal-required]
    assert profile["image_inputs"] is False
    assert profile["max_input_tokens"] == CONTEXT
    unloaded = ChatAsyncEngine(
        model=model_path, engine_config={"max_model_len": 512, "grammar_backend": "none"}
    ).profile
    assert unloaded is not None
    assert unloaded["max_input_tokens"] == 512
    assert (unloaded["tool_calling"], unloaded["structured_output"]) == (False, False)
    unknown = ChatAsyncEngine(model="a-model").profile
    assert unknown is not None
    assert not {"max_input_tokens", *TOOL_ABILITIES} & set(unknown)
    told = ChatAsyncEngine(model="a-model", engine_config={"tool_format": "hermes"}).profile
    assert told is not None
    assert told["tool_calling"] is True


class Tokens(BaseCallbackHandler):
    """Everything callbacks were told about one run."""

    def __init__(self) -> None:
        self.text = ""
        self.ends: list[LLMResult] = []

    def on_llm_new_token(self, token: str | list[Any], **kwargs: Any) -> None:
        self.text += token if isinstance(token, str) else "".join(block["text"] for block in token)

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        self.ends.append(response)


async def test_callbacks_see_every_token_exactly_once(make_chat: Make) -> None:
    chat = make_chat(max_tokens=12)
    text = chat.invoke("Hello").text

    def heard(tokens: Tokens) -> str:
        assert len(tokens.ends) == 1
        return tokens.text

    tokens = Tokens()
    list(chat.stream("Hello", {"callbacks": [tokens]}))
    assert heard(tokens) == text
    tokens = Tokens()
    [chunk async for chunk in chat.astream("Hello", {"callbacks": [tokens]})]
    assert heard(tokens) == text
    tokens = Tokens()
    make_chat(max_tokens=12, streaming=True).invoke("Hello", {"callbacks": [tokens]})
    assert heard(tokens) == text
    tokens = Tokens()
    chat.invoke("Hello", {"callbacks": [tokens]})
    assert heard(tokens) == ""


MakeText = Callable[..., AsyncEngineLLM]


async def test_generations_and_output(make_llm: MakeText) -> None:
    llm = make_llm(max_tokens=4, n=2, temperature=1.0, seed=5, logprobs=True)
    for result in (llm.generate(["a", "b"]), await llm.agenerate(["a", "b"])):
        assert [len(generations) for generations in result.generations] == [2, 2]
        info = result.generations[0][0].generation_info
        assert info is not None
        assert info["finish_reason"] == "length"
        assert "".join(entry["token"] for entry in info["logprobs"]["content"]) == result.generations[0][0].text
        assert result.llm_output is not None
        assert result.llm_output["model_name"] == llm.model
        assert result.llm_output["token_usage"]["completion_tokens"] == 16


async def test_one_refused_prompt_leaves_nothing_running(make_llm: MakeText, watch: Watch) -> None:
    llm = make_llm(**LONG)
    prompts = ["fine", "x" * 5000]
    with pytest.raises(ContextOverflowError):
        llm.generate(prompts)
    with pytest.raises(ContextOverflowError):
        await llm.agenerate(prompts)
    await watch.assert_all_given_back()
