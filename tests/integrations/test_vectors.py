"""The adapters of both frameworks over the bundled embedder and a random reranker: their standard tests, and RAG's
parts as programs use them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import transformers
from langchain_core.documents import Document
from langchain_tests.integration_tests import EmbeddingsIntegrationTests
from langchain_tests.unit_tests import EmbeddingsUnitTests
from llama_index.core.schema import NodeWithScore, TextNode
from support.random_reranker import make_reranker

from asyncengine import DEMO_EMBEDDER, EngineHandle, shared_engine
from asyncengine.integrations.cli.demo import DOCUMENTS
from asyncengine.integrations.langchain import AsyncEngineEmbeddings, AsyncEngineReranker
from asyncengine.integrations.llama_index import AsyncEngineEmbedding, AsyncEngineRerank
from makers.demo_embedder.bert import PROMPTS, Served

EMBEDDER: dict[str, Any] = {"dtype": "float32", "num_threads": 1}
"""Settings of the shared embedder."""
TEXTS = list(DOCUMENTS.values())


@pytest.fixture(scope="module")
def embedder() -> Iterator[EngineHandle]:
    """Keeps the shared embedder loaded."""
    held = shared_engine("demo-embed", **EMBEDDER)
    engine = held.get()
    yield held
    engine.close()
    held.close()


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = str(make_reranker(tmp_path_factory.mktemp("reranker")))
    held = shared_engine(folder, **EMBEDDER)
    engine = held.get()
    yield folder
    engine.close()
    held.close()


@pytest.fixture
def chain(embedder: EngineHandle) -> AsyncEngineEmbeddings:
    return AsyncEngineEmbeddings(model="demo-embed", engine_config=EMBEDDER)


@pytest.fixture
def index(embedder: EngineHandle) -> AsyncEngineEmbedding:
    return AsyncEngineEmbedding(model="demo-embed", engine_config=EMBEDDER)


class TestUnit(EmbeddingsUnitTests):
    embeddings_class = AsyncEngineEmbeddings
    embedding_model_params: ClassVar[dict[str, Any]] = {"model": "a-model"}
    init_from_env_params = {"ASYNCENGINE_EMBEDDING_MODEL": "an-embedder"}, {}, {"model": "an-embedder"}


@pytest.mark.usefixtures("embedder")
class TestIntegration(EmbeddingsIntegrationTests):
    embeddings_class = AsyncEngineEmbeddings
    embedding_model_params: ClassVar[dict[str, Any]] = {"model": "demo-embed", "engine_config": EMBEDDER}


async def test_vectors_are_the_model_s_own(chain: AsyncEngineEmbeddings, index: AsyncEngineEmbedding) -> None:
    """All ten calls put the prompt of their kind before the text."""
    served = Served(DEMO_EMBEDDER)
    documents = served(TEXTS, PROMPTS["document"]).numpy()
    query = served(["Who leads Velmora?"], PROMPTS["query"]).numpy()[0]
    for found in (
        chain.embed_documents(TEXTS),
        await chain.aembed_documents(TEXTS),
        index.get_text_embedding_batch(TEXTS),
        await index.aget_text_embedding_batch(TEXTS),
        [index.get_text_embedding(text) for text in TEXTS],
        [await index.aget_text_embedding(text) for text in TEXTS],
    ):
        np.testing.assert_allclose(np.array(found), documents, atol=1e-5)
    for one in (
        chain.embed_query("Who leads Velmora?"),
        await chain.aembed_query("Who leads Velmora?"),
        index.get_query_embedding("Who leads Velmora?"),
        await index.aget_query_embedding("Who leads Velmora?"),
    ):
        np.testing.assert_allclose(np.array(one), query, atol=1e-5)


def scores(folder: str, query: str, texts: list[str]) -> list[float]:
    """Scores as sentence-transformers' CrossEncoder has them: one label, squashed."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    import torch

    with torch.inference_mode():
        batch = tokenizer([query] * len(texts), texts, return_tensors="pt", padding=True)
        return torch.sigmoid(model(**batch).logits[:, 0]).tolist()


async def test_rerankers_of_both_frameworks(reranker: str) -> None:
    expected = scores(reranker, "Who leads Velmora?", TEXTS)
    best = sorted(range(len(TEXTS)), key=lambda i: -expected[i])[:3]
    chain = AsyncEngineReranker(model=reranker, engine_config=EMBEDDER)
    documents = [Document(text) for text in TEXTS]
    for kept in (
        chain.compress_documents(documents, "Who leads Velmora?"),
        await chain.acompress_documents(documents, "Who leads Velmora?"),
    ):
        assert [document.page_content for document in kept] == [TEXTS[i] for i in best]
        found = [document.metadata["relevance_score"] for document in kept]
        assert found == pytest.approx([expected[i] for i in best], abs=1e-5)
    index = AsyncEngineRerank(model=reranker, engine_config=EMBEDDER, top_n=3)
    nodes = [NodeWithScore(node=TextNode(text=text), score=0.0) for text in TEXTS]
    for ranked in (
        index.postprocess_nodes(nodes, query_str="Who leads Velmora?"),
        await index.apostprocess_nodes(nodes, query_str="Who leads Velmora?"),
    ):
        assert [node.node.get_content() for node in ranked] == [TEXTS[i] for i in best]
        assert [node.score for node in ranked] == pytest.approx([expected[i] for i in best], abs=1e-5)
