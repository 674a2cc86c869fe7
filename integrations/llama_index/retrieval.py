"""`AsyncEngineEmbedding` and `AsyncEngineRerank`: LlamaIndex's embedding model and node postprocessor, in process."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.callbacks import CBEventType, EventPayload
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined, unused-ignore]
from llama_index.core.instrumentation.events.rerank import ReRankEndEvent, ReRankStartEvent
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle
from pydantic import AliasChoices, ConfigDict, Field, model_validator

from asyncengine import Ranking
from asyncengine.errors import InvalidParameter
from asyncengine.integrations.engine_source import EngineChoice
from asyncengine.integrations.vectors import EmbeddingFields, RerankFields

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
    def _either_name(cls, values: Any) -> Any:
        if isinstance(values, dict) and "model" not in values and values.get("model_name"):
            return {**values, "model": values["model_name"]}
        return values

    @model_validator(mode="after")
    def _fill_model_name(self) -> Self:
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


class RankedNodes(EngineChoice, BaseNodePostprocessor):
    """A node postprocessor that puts nodes in the order of scores that an engine gives them, and keeps the best."""

    top_n: int | None
    """The number of nodes to keep; None: all."""
    keep_retrieval_score: bool = False

    def _rank(self, query: str, texts: Sequence[str], top_n: int | None) -> Ranking:
        raise NotImplementedError

    async def _arank(self, query: str, texts: Sequence[str], top_n: int | None) -> Ranking:
        raise NotImplementedError

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        query = _query(query_bundle)
        if not nodes:
            return []
        with self._observed(nodes, query) as outcome:
            outcome.extend(self._kept(nodes, self._rank(query, _texts(nodes), self.top_n)))
        return outcome

    async def _apostprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        """The same, awaiting the engine natively."""
        query = _query(query_bundle)
        if not nodes:
            return []
        with self._observed(nodes, query) as outcome:
            outcome.extend(self._kept(nodes, await self._arank(query, _texts(nodes), self.top_n)))
        return outcome

    @contextmanager
    def _observed(self, nodes: Sequence[NodeWithScore], query: str) -> Generator[list[NodeWithScore], None, None]:
        """Tell LlamaIndex's observers of the start, and at the end of the nodes that the block put into the list."""
        name, outcome, dispatcher = self._engines().name, list[NodeWithScore](), get_dispatcher(__name__)
        kept = self.top_n or len(nodes)
        dispatcher.event(ReRankStartEvent(query=query, nodes=list(nodes), top_n=kept, model_name=name))
        payload: dict[str, Any] = {
            EventPayload.NODES: list(nodes), EventPayload.MODEL_NAME: name, EventPayload.QUERY_STR: query,
            EventPayload.TOP_K: kept,
        }  # fmt: skip
        with self.callback_manager.event(CBEventType.RERANKING, payload=payload) as event:
            yield outcome
            event.on_end(payload={EventPayload.NODES: outcome})
        dispatcher.event(ReRankEndEvent(nodes=outcome))

    def _kept(self, nodes: Sequence[NodeWithScore], ranking: Ranking) -> list[NodeWithScore]:
        return [self._scored(nodes[ranked.index], ranked.score) for ranked in ranking.results]

    def _scored(self, retrieved: NodeWithScore, score: float) -> NodeWithScore:
        node = retrieved.node
        if self.keep_retrieval_score:
            node = node.model_copy(update={"metadata": {**node.metadata, "retrieval_score": retrieved.score}})
        return NodeWithScore(node=node, score=score)


class AsyncEngineRerank(RerankFields, RankedNodes):
    """Puts retrieved nodes in the order in which they answer the query, and keeps the best.

    See `RerankFields` for its fields. A node's score becomes the reranker's; the nodes that were given are left as
    they are. Constructing is cheap, and engines are shared, as in `AsyncEngineEmbedding`.

    Example:
        index.as_query_engine(node_postprocessors=[AsyncEngineRerank(model="BAAI/bge-reranker-base", top_n=3)])
    """

    model_config = ConfigDict(extra="forbid")

    top_n: int = Field(default=2, ge=1)
    """The number of nodes to keep."""
    keep_retrieval_score: bool = False
    """Whether the score that a node came with goes into its metadata, as `retrieval_score`."""

    @classmethod
    def class_name(cls) -> str:
        return "AsyncEngineRerank"


def _query(bundle: QueryBundle | None) -> str:
    if bundle is None:
        raise InvalidParameter("query_bundle", "must be given: a reranker scores nodes for a query")
    return bundle.query_str


def _texts(nodes: Sequence[NodeWithScore]) -> list[str]:
    return [node.node.get_content(metadata_mode=MetadataMode.EMBED) for node in nodes]
