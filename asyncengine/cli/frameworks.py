"""The same two jobs through LangChain and LlamaIndex, or through the plain API where they are not installed."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from asyncengine.async_engine import AsyncEngine
from asyncengine.cli.documents import DOCUMENTS
from asyncengine.sampling_params import SamplingParams
from asyncengine.sync_engine import Engine

MAX_TOKENS = 96
SYSTEM = "Answer from this text:\n\n{context}"
WITH_CONTEXT = "Context information is below.\n---------------------\n{c}\n---------------------\n" \
    "Given the context information and not prior knowledge, answer the query.\nQuery: {q}\nAnswer: "  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reply:
    text: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    source: str = ""


class Chain(Protocol):
    """A prompt and a model. `context`, if any, goes in front of every question."""

    name: str

    def stream(self, question: str) -> AsyncIterator[str]: ...

    async def batch(self, questions: Sequence[str], context: str) -> list[Reply]: ...


class QueryEngine(Protocol):
    """Finds the documents for a question, and answers from them."""

    name: str

    async def query(self, question: str) -> Reply: ...


def installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even its parent package
        return False


def chain(engine: AsyncEngine) -> Chain:
    return _LangChain(engine) if installed("langchain_core") else _PlainChain(engine)


def query_engine(engine: AsyncEngine, embedder: AsyncEngine) -> QueryEngine:
    """Over the documents, which are embedded here: blocking, so not on the embedder's own loop."""
    made = _LlamaIndex if installed("llama_index.core") else _PlainQueryEngine
    return made(engine, embedder)


class _LangChain:
    name = "LangChain"

    def __init__(self, engine: AsyncEngine) -> None:
        from langchain_core.output_parsers import StrOutputParser
        from langchain_core.prompts import ChatPromptTemplate

        from asyncengine.integrations.langchain import ChatAsyncEngine

        model = ChatAsyncEngine(engine=engine, temperature=0.0, max_tokens=MAX_TOKENS)
        self._ask: Any = ChatPromptTemplate.from_messages([("human", "{question}")]) | model | StrOutputParser()
        self._read: Any = ChatPromptTemplate.from_messages([("system", SYSTEM), ("human", "{question}")]) | model

    async def stream(self, question: str) -> AsyncIterator[str]:
        async for piece in self._ask.astream({"question": question}):
            yield piece

    async def batch(self, questions: Sequence[str], context: str) -> list[Reply]:
        messages = await self._read.abatch([{"context": context, "question": question} for question in questions])
        return [_from_message(message) for message in messages]


def _from_message(message: Any) -> Reply:
    usage = message.usage_metadata
    return Reply(str(message.content), usage["input_tokens"], usage["input_token_details"]["cache_read"])


class _PlainChain:
    name = ""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)

    async def stream(self, question: str) -> AsyncIterator[str]:
        stream = self._engine.stream_chat([{"role": "user", "content": question}], self._params)
        try:
            async for chunk in stream:
                yield chunk.text
        finally:
            stream.abort()

    async def batch(self, questions: Sequence[str], context: str) -> list[Reply]:
        system = {"role": "system", "content": SYSTEM.format(context=context)}
        chats = [[system, {"role": "user", "content": question}] for question in questions]
        done = await asyncio.gather(*(self._engine.chat(messages, self._params) for messages in chats))
        return [Reply(c.text, c.usage.prompt_tokens, c.usage.cached_tokens) for c in done]


class _LlamaIndex:
    name = "LlamaIndex"

    def __init__(self, engine: AsyncEngine, embedder: AsyncEngine) -> None:
        from llama_index.core import VectorStoreIndex
        from llama_index.core.schema import TextNode

        from asyncengine.integrations.llama_index import AsyncEngineEmbedding, AsyncEngineLLM

        nodes = [TextNode(id_=name, text=text) for name, text in DOCUMENTS.items()]
        index = VectorStoreIndex(nodes, embed_model=AsyncEngineEmbedding(engine=embedder))
        llm = AsyncEngineLLM(engine=engine, temperature=0.0, max_tokens=MAX_TOKENS)
        self._engine: Any = index.as_query_engine(llm=llm, similarity_top_k=2)

    async def query(self, question: str) -> Reply:
        response = await self._engine.aquery(question)
        return Reply(str(response), source=response.source_nodes[0].node.node_id)


class _PlainQueryEngine:
    name = ""

    def __init__(self, engine: AsyncEngine, embedder: AsyncEngine) -> None:
        self._engine, self._embedder = engine, embedder
        self._vectors = Engine(embedder).embed(list(DOCUMENTS.values()), prompt_name="document").vectors

    async def query(self, question: str) -> Reply:
        found = await self._embedder.embed(question, prompt_name="query")
        source = list(DOCUMENTS)[int((self._vectors @ found.vectors[0]).argmax())]
        prompt = WITH_CONTEXT.format(c=DOCUMENTS[source], q=question)
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
        done = await self._engine.chat([{"role": "user", "content": prompt}], params)
        return Reply(done.text, done.usage.prompt_tokens, done.usage.cached_tokens, source)
