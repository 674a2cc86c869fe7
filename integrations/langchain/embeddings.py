"""`AsyncEngineEmbeddings`: LangChain's embedding model over an in-process engine."""

from __future__ import annotations

from typing import ClassVar

from langchain_core.embeddings import Embeddings
from pydantic import AliasChoices, ConfigDict, Field

from asyncengine.integrations.langchain.errors import mapped_errors
from asyncengine.integrations.vectors import EmbeddingFields


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
