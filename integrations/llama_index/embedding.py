"""`AsyncEngineEmbedding`: LlamaIndex's embedding model over an in-process engine."""

from __future__ import annotations

from typing import Any, Self

from llama_index.core.base.embeddings.base import BaseEmbedding
from pydantic import AliasChoices, ConfigDict, Field, model_validator

from asyncengine.integrations.vectors import EmbeddingFields

LARGEST_BATCH = 2048
"""The largest `embed_batch_size` that LlamaIndex allows. Its default of ten would send ten texts, wait, and send ten
more."""


class AsyncEngineEmbedding(EmbeddingFields, BaseEmbedding):
    """Embedding model on an in-process engine; see `EmbeddingFields` for its fields.

    Constructing is cheap: the model loads at the first call, once per process for equal (model, engine settings).
    Texts are embedded with the model's prompt for documents, queries with that for queries, where it has such. Many
    calls at once, from any task, loop or thread, are computed as one batch. Errors are the engine's own.

    Example:
        VectorStoreIndex(nodes, embed_model=AsyncEngineEmbedding(model="demo-embed"))
    """

    model_config = ConfigDict(extra="forbid")

    model_name: str = Field(default="", validation_alias=AliasChoices("model_name", "model"))
    """LlamaIndex's name for `model`: either is enough."""
    embed_batch_size: int = Field(default=LARGEST_BATCH, gt=0, le=LARGEST_BATCH)
    """Texts that LlamaIndex hands over at once; the engine makes batches of its own."""

    @model_validator(mode="before")
    @classmethod
    def _either_name(cls, given: Any) -> Any:
        if isinstance(given, dict) and "model" not in given and given.get("model_name"):
            return {**given, "model": given["model_name"]}
        return given

    @model_validator(mode="after")
    def _named(self) -> Self:
        self.model_name = self.model_name or self._engines().name
        return self

    @classmethod
    def class_name(cls) -> str:
        return "AsyncEngineEmbedding"

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._embed([query], "query")[0]

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return (await self._aembed([query], "query"))[0]

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._embed([text], "document")[0]

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return (await self._aembed([text], "document"))[0]

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return self._embed(texts, "document")

    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return await self._aembed(texts, "document")
