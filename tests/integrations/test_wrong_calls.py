"""Mistakes that people make: each is refused by the name of what is wrong, and costs nobody else anything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel, ValidationError

from asyncengine import EngineHandle
from asyncengine.errors import InvalidParameter
from asyncengine.integrations.langchain import AsyncEngineEmbeddings, AsyncEngineReranker, ChatAsyncEngine
from asyncengine.integrations.llama_index import AsyncEngineLLM

from .conftest import CONFIG

DICTS: Any = [{"role": "user", "content": "x"}]


class Person(BaseModel):
    name: str


def double(x: int) -> int:
    """Twice x."""
    return 2 * x


DOUBLE = FunctionTool.from_defaults(double)


@pytest.fixture
def llm(model_path: str, handle: EngineHandle) -> AsyncEngineLLM:
    return AsyncEngineLLM(model=model_path, engine_config=CONFIG, temperature=0.0, max_tokens=4)


Call = Callable[[AsyncEngineLLM], Any]
BAD: list[tuple[str, Call, str]] = [
    ("complete a message", lambda llm: llm.complete(ChatMessage("hi")), "messages go to chat"),
    ("acomplete", lambda llm: asyncio.run(llm.acomplete(None)), "prompt: must be a str"),
    ("stream_complete", lambda llm: list(llm.stream_complete(None)), "prompt: must be a str"),
    ("chat with dicts", lambda llm: llm.chat(DICTS), r"messages\[0\]: must be LlamaIndex's ChatMessage\(role"),
    ("stream_chat with dicts", lambda llm: list(llm.stream_chat(DICTS)), r"messages\[0\]: must be LlamaIndex's"),
    ("a generator", lambda llm: llm.chat(m for m in [ChatMessage("x")]), "messages: must be a list"),
    ("tools of numbers", lambda llm: llm.chat_with_tools([42], "x"), r"tools\[0\]: must be a LlamaIndex tool"),
    ("plain functions", lambda llm: llm.chat_with_tools([DOUBLE, double], "x"), r"tools\[1\]: must be a LlamaIndex"),
    ("tools are a number", lambda llm: llm.chat_with_tools(3, "x"), "tools: must be a list"),
    ("user_msg", lambda llm: llm.chat_with_tools([DOUBLE], 3), "user_msg: must be a str or"),
    ("history", lambda llm: llm.chat_with_tools([DOUBLE], chat_history="abc"), "chat_history: must be"),
    ("output_cls 3", lambda llm: llm.structured_predict(3, PromptTemplate("x")), "output_cls: must be"),
    (
        "output_cls while streaming",
        lambda llm: list(llm.stream_structured_predict({}, PromptTemplate("x"))),
        "output_cls: must be a pydantic class",
    ),
    (
        "llm_kwargs",
        lambda llm: llm.structured_predict(Person, PromptTemplate("x"), llm_kwargs=3),
        "llm_kwargs: must be a dict",
    ),
    ("lone surrogate", lambda llm: llm.chat([ChatMessage("a\ud800")]), r"messages\[0\]\.content: is not valid Unicode"),
]


@pytest.mark.parametrize(("name", "call", "said"), BAD, ids=[case[0] for case in BAD])
def test_llama_index_calls_are_refused_by_name(name: str, call: Call, said: str, llm: AsyncEngineLLM):
    with pytest.raises(InvalidParameter, match=said):
        call(llm)
    assert len(llm.complete("still there").text) == 4


@pytest.mark.parametrize("window", [-1, 0, 1.5, float("nan"), "many"])
def test_a_context_window_is_a_positive_number(window: Any):
    with pytest.raises(ValidationError, match="context_window"):
        AsyncEngineLLM(model="demo", context_window=window)


def test_an_assigned_context_window_is_checked_when_it_is_used(llm: AsyncEngineLLM):
    llm.context_window = -4
    with pytest.raises(InvalidParameter, match="context_window: must be an integer >= 1, got -4"):
        _ = llm.metadata


def test_functions_of_the_caller_that_make_no_text_are_named(model_path: str, handle: EngineHandle):
    made = AsyncEngineLLM(model=model_path, engine_config=CONFIG, completion_to_prompt=lambda _: 3)
    with pytest.raises(InvalidParameter, match="completion_to_prompt: must return a str, got 3"):
        made.complete("x")
    made = AsyncEngineLLM(model=model_path, engine_config=CONFIG, is_chat_model=False, messages_to_prompt=lambda _: 3)
    with pytest.raises(InvalidParameter, match="messages_to_prompt: must return a str, got 3"):
        made.chat([ChatMessage("x")])


WRONG: list[tuple[str, Callable[[ChatAsyncEngine], Any], str]] = [
    ("invoke None", lambda chat: chat.invoke(None), "Invalid input type"),
    ("bind_tools", lambda chat: chat.bind_tools([42]), r"tools\[0\]: cannot be read as a tool"),
    ("schema 3", lambda chat: chat.with_structured_output(3), "schema: .*, got 3"),
    ("schema str", lambda chat: chat.with_structured_output("x"), "schema: is not JSON text"),
    ("method", lambda chat: chat.with_structured_output(Person, method="magic"), "method: "),
    ("batch of one text", lambda chat: chat.batch("hi"), "inputs: must be a list"),
    ("none at a time", lambda chat: chat.batch(["a", "b"], {"max_concurrency": 0}), "max_concurrency: must be"),
    (
        "none at a time, awaited",
        lambda chat: asyncio.run(chat.abatch(["a", "b"], {"max_concurrency": 0})),
        "max_concurrency: must be",
    ),
    (
        "lone surrogate",
        lambda chat: chat.invoke([HumanMessage("a\ud800")]),
        r"messages\[0\]\.content: is not valid Unicode",
    ),
]


@pytest.mark.parametrize(("name", "call", "said"), WRONG, ids=[case[0] for case in WRONG])
def test_langchain_calls_are_refused_by_name(
    name: str, call: Callable[[ChatAsyncEngine], Any], said: str, chat: ChatAsyncEngine
):
    with pytest.raises(ValueError, match=said):
        call(chat)
    assert len(chat.invoke("still there").text) == 12


def test_no_list_of_texts_is_not_an_empty_one():
    embeddings = AsyncEngineEmbeddings(model="demo-embed")
    with pytest.raises(InvalidParameter, match="texts: must be"):
        embeddings.embed_documents(None)
    assert embeddings.embed_documents([]) == []


def test_a_reranker_takes_documents():
    with pytest.raises(InvalidParameter, match=r"documents\[1\]: must be a LangChain Document, got 'x'"):
        AsyncEngineReranker(model="demo").compress_documents([Document("a"), "x"], "q")


def test_an_empty_text_has_a_length(chat: ChatAsyncEngine, llm: AsyncEngineLLM):
    """Frameworks count whatever they are about to put together."""
    assert chat.get_num_tokens("") == 0
    assert llm.tokenize("") == []
