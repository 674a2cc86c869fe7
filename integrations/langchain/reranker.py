"""`AsyncEngineReranker`: LangChain's document compressor over an in-process reranker."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document
from pydantic import ConfigDict, Field

from asyncengine import Ranking
from asyncengine.errors import InvalidParameter
from asyncengine.integrations.langchain.errors import mapped_errors
from asyncengine.integrations.vectors import RerankFields


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
    return [
        given.model_copy(update={"metadata": {**given.metadata, "relevance_score": ranked.score}})
        for ranked in ranking.results
        for given in (documents[ranked.index],)
    ]
