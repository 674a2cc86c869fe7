"""`AsyncEngineEmbeddings` and `AsyncEngineReranker`: embeddings and a compressor for LangChain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.embeddings import Embeddings
from pydantic import AliasChoices, ConfigDict, Field

from asyncengine import Ranking
from asyncengine.errors import InvalidParameter
from asyncengine.integrations.langchain.errors import mapped_errors
from asyncengine.integrations.vectors import EmbeddingFields, RerankFields


class AsyncEngineEmbeddings(EmbeddingFields, Embeddings):
    """Embedding model on an in-process engine; see `EmbeddingFields` for its fields.

    Constructing is cheap: the model loads at the first call, once per process for equal (model, engine settings).
    Documents are embedded with the model's prompt for documents, queries with that for queries, where it has such.
    Many calls at once, from any task, loop or thread, are computed as one batch. Errors are the engine's and
    LangChain's at once.

    Example:
        embeddings = AsyncEngineEmbeddings(model="demo-embed")
        await embeddings.aembed_query("Who leads Velmora?")
    """

    model_config = ConfigDict(extra="forbid")

    setting_names: ClassVar[frozenset[str]] = EmbeddingFields.setting_names - {"show_progress"}

    show_progress: bool | None = Field(
        default=None, validation_alias=AliasChoices("show_progress", "show_progress_bar")
    )
    """A progress bar on stderr for long lists; None: as the engine is configured."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """One vector for each text, in order. Waits; works inside a running event loop too, on a shared engine."""
        with mapped_errors():
            return self._embed(texts, "document", self.show_progress)

    def embed_query(self, text: str) -> list[float]:
        with mapped_errors():
            return self._embed([text], "query")[0]

    async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
        """The same, awaiting the engine natively; cancelling it frees the compute before the next step."""
        with mapped_errors():
            return await self._aembed(texts, "document", self.show_progress)

    async def aembed_query(self, text: str) -> list[float]:
        with mapped_errors():
            return (await self._aembed([text], "query"))[0]


class AsyncEngineReranker(RerankFields, BaseDocumentCompressor):
    """Puts retrieved documents in the order in which they answer the query, and keeps the best.

    See `RerankFields` for its fields. The score is in a document's metadata, as `relevance_score`; the documents that
    were given are left as they are. Constructing is cheap, and engines are shared, as in `AsyncEngineEmbeddings`.

    Example:
        AsyncEngineReranker(model="BAAI/bge-reranker-base", top_n=3).compress_documents(documents, "Who leads Velmora?")
    """

    model_config = ConfigDict(extra="forbid")

    top_n: int | None = Field(default=3, ge=1)
    """The number of documents to keep; None: all of them."""

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> list[Document]:
        if not documents:
            return []
        with mapped_errors():
            return _kept(documents, self._rank(query, _texts(documents), self.top_n))

    async def acompress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> list[Document]:
        """The same, awaiting the engine natively."""
        if not documents:
            return []
        with mapped_errors():
            return _kept(documents, await self._arank(query, _texts(documents), self.top_n))


def _texts(documents: Sequence[Document]) -> list[str]:
    for index, document in enumerate(documents):
        if not isinstance(document, Document):
            raise InvalidParameter(f"documents[{index}]", "must be a LangChain Document", document)
    return [document.page_content for document in documents]


def _kept(documents: Sequence[Document], ranking: Ranking) -> list[Document]:
    kept = [(documents[ranked.index], ranked.score) for ranked in ranking.results]
    return [each.model_copy(update={"metadata": {**each.metadata, "relevance_score": score}}) for each, score in kept]
