"""Requests of the four adapter classes to an engine: prompts by the kind of text, settings, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from langchain_core.documents import Document
from llama_index.core.schema import NodeWithScore, TextNode
from pydantic import ValidationError
from support.data import cases_of

from asyncengine import Embeddings, Ranked, Ranking, Usage
from asyncengine.integrations.langchain import AsyncEngineEmbeddings, AsyncEngineReranker
from asyncengine.integrations.llama_index import AsyncEngineEmbedding, AsyncEngineRerank

ROWS: dict[str, Any] = cases_of(__file__)

EMBEDDERS: list[type[Any]] = [AsyncEngineEmbeddings, AsyncEngineEmbedding]


def usage(prompt_tokens: int) -> Usage:
    return Usage(prompt_tokens=prompt_tokens, completion_tokens=0, cached_tokens=0)


class NotingEngine:
    """A fake engine, sync or async: vectors of the texts' lengths, ranks by length, and a note of each call."""

    def __init__(self, prompts: tuple[str, ...] = (), asynchronous: bool = False) -> None:
        self.info = type("Info", (), {"prompts": prompts})()
        self.calls: list[dict[str, Any]] = []
        self._asynchronous = asynchronous

    def embed(self, texts: Any, **keywords: Any) -> Any:
        self.calls.append({"texts": list(texts), **keywords})
        vectors = np.array([[len(text), 0.5] for text in texts], dtype=np.float32)
        return self._answer(Embeddings(vectors=vectors, usage=usage(1), truncated=()))

    def rerank(self, query: str, documents: Any, **keywords: Any) -> Any:
        self.calls.append({"query": query, "documents": list(documents), **keywords})
        found = [Ranked(index=i, score=float(len(text)), document=text) for i, text in enumerate(documents)]
        best = sorted(found, key=lambda ranked: -ranked.score)[: keywords.get("top_n")]
        return self._answer(Ranking(results=best, usage=usage(1), truncated=()))

    def _answer(self, value: Any) -> Any:
        if not self._asynchronous:
            return value

        async def later() -> Any:
            return value

        return later()


class NotingSource:
    """A fake of a model object's `EngineSource`."""

    name = "noting"

    def __init__(self, *prompts: str) -> None:
        self.blocking, self.awaited = NotingEngine(prompts), NotingEngine(prompts, asynchronous=True)

    def serves(self, *_: Any) -> bool:
        return True

    def sync(self) -> Any:
        return self.blocking

    async def aio(self) -> Any:
        return self.awaited

    @property
    def calls(self) -> list[dict[str, Any]]:
        return self.blocking.calls + self.awaited.calls


def noting(kind: type[Any], *prompts: str, **fields: Any) -> tuple[Any, NotingSource]:
    made = kind(**{"model": "nowhere", **fields})
    source = NotingSource(*prompts)
    made._source = source
    return made, source


def of_both(made: Any) -> tuple[Callable[[str], Any], Callable[[list[str]], Any]]:
    """Embedding a query and documents, by whatever the class calls it."""
    if isinstance(made, AsyncEngineEmbeddings):
        return made.embed_query, made.embed_documents
    return made.get_query_embedding, made.get_text_embedding_batch


@pytest.mark.parametrize("kind", EMBEDDERS)
@pytest.mark.parametrize(("prompts", "fields", "query", "document"), ROWS["what_is_asked_for"])
def test_what_is_asked_for(
    kind: type[Any], prompts: tuple[str, ...], fields: dict[str, Any], query: dict[str, Any], document: Any
) -> None:
    made, source = noting(kind, *prompts, **fields)
    ask, store = of_both(made)
    ask("who?")
    store(["somebody", "nobody"])
    asked, stored = source.calls
    always = {"truncate": True, "show_progress": None}
    assert asked == {"texts": ["who?"], **always, **query}
    assert stored == {"texts": ["somebody", "nobody"], **always, **(query if document is None else document)}


DOCUMENTS = [Document("aa", id="1", metadata={"page": 7}), Document("aaaa", id="2"), Document("a", id="3")]


async def test_a_compressor_keeps_the_best_and_changes_nothing_of_its_callers() -> None:
    made, source = noting(AsyncEngineReranker, top_n=2, instruction="look")
    kept = made.compress_documents(DOCUMENTS, "q")
    assert [(d.id, d.metadata["relevance_score"]) for d in kept] == [("2", 4.0), ("1", 2.0)]
    assert kept[1].metadata["page"] == 7
    assert "relevance_score" not in DOCUMENTS[0].metadata
    assert await made.acompress_documents(DOCUMENTS, "q") == kept
    expected = {"query": "q", "documents": ["aa", "aaaa", "a"], "top_n": 2, "instruction": "look", "truncate": True}
    assert source.calls == [expected, expected]
    assert len(source.awaited.calls) == 1
    assert len(noting(AsyncEngineReranker, top_n=None)[0].compress_documents(DOCUMENTS, "q")) == 3
    assert made.compress_documents([], "q") == await made.acompress_documents([], "q") == []


async def test_a_postprocessor_keeps_the_best_and_changes_nothing_of_its_callers() -> None:
    made, source = noting(AsyncEngineRerank, keep_retrieval_score=True)
    texts = ("aa", "aaaa", "a")
    nodes = [NodeWithScore(node=TextNode(id_=text, text=text), score=0.1) for text in texts]
    kept = made.postprocess_nodes(nodes, query_str="q")
    assert [(k.node.node_id, k.score, k.node.metadata) for k in kept] == [
        ("aaaa", 4.0, {"retrieval_score": 0.1}),
        ("aa", 2.0, {"retrieval_score": 0.1}),
    ]
    assert [(given.score, given.node.metadata) for given in nodes] == [(0.1, {})] * 3
    again = await made.apostprocess_nodes(nodes, query_str="q")
    assert [k.node.node_id for k in again] == ["aaaa", "aa"]
    assert len(source.awaited.calls) == 1
    assert made.postprocess_nodes([], query_str="q") == []
    with pytest.raises(ValueError, match="query_bundle"):
        made.postprocess_nodes(nodes)


@pytest.mark.parametrize("kind", EMBEDDERS)
def test_a_prompt_and_its_name_contradict_each_other(kind: type[Any]) -> None:
    with pytest.raises(ValidationError, match="query_prompt"):
        kind(model="m", query_prompt="q: ", query_prompt_name="query")


@pytest.mark.parametrize("kind", [AsyncEngineReranker, AsyncEngineRerank])
def test_at_least_one_is_kept(kind: type[Any]) -> None:
    with pytest.raises(ValidationError, match="top_n"):
        kind(model="m", top_n=0)


@pytest.mark.parametrize(
    ("kind", "variable"),
    [
        (AsyncEngineEmbeddings, "ASYNCENGINE_EMBEDDING_MODEL"),
        (AsyncEngineEmbedding, "ASYNCENGINE_EMBEDDING_MODEL"),
        (AsyncEngineReranker, "ASYNCENGINE_RERANK_MODEL"),
        (AsyncEngineRerank, "ASYNCENGINE_RERANK_MODEL"),
    ],
)
def test_the_model_by_the_environment(kind: type[Any], variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chat model's variable says nothing of embedders."""
    monkeypatch.setenv("ASYNCENGINE_MODEL", "a-chat-model")
    with pytest.raises(ValidationError, match=variable) as refused:
        kind()
    assert ("demo-embed" in str(refused.value)) is (kind in EMBEDDERS)
    monkeypatch.setenv(variable, "from-the-environment")
    assert kind().model == "from-the-environment"


def test_llama_index_calls_it_model_name() -> None:
    by_either = [AsyncEngineEmbedding(model_name="m"), AsyncEngineEmbedding(model="m")]
    assert [(made.model, made.model_name) for made in by_either] == [("m", "m")] * 2
    assert AsyncEngineEmbedding.from_dict(by_either[0].to_dict()).model == "m"
    assert by_either[0].to_payload()["model_name"] == "m"
