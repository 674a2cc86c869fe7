"""`AsyncEngineRerank`: LlamaIndex's node postprocessor over an in-process reranker."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from llama_index.core.callbacks import CBEventType, EventPayload
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined, unused-ignore]
from llama_index.core.instrumentation.events.rerank import ReRankEndEvent, ReRankStartEvent
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle
from pydantic import ConfigDict, Field

from asyncengine import Ranking
from asyncengine.errors import InvalidParameter
from asyncengine.integrations.engine_choice import EngineChoice
from asyncengine.integrations.vectors import RerankFields


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
        """Tells LlamaIndex's observers of the start, and of what the block puts into the list it is given."""
        name, outcome, dispatcher = self._engines().name, list[NodeWithScore](), get_dispatcher(__name__)
        kept = self.top_n or len(nodes)
        dispatcher.event(ReRankStartEvent(query=query, nodes=list(nodes), top_n=kept, model_name=name))
        payload: dict[str, Any] = {
            EventPayload.NODES: list(nodes),
            EventPayload.MODEL_NAME: name,
            EventPayload.QUERY_STR: query,
            EventPayload.TOP_K: kept,
        }
        with self.callback_manager.event(CBEventType.RERANKING, payload=payload) as event:
            yield outcome
            event.on_end(payload={EventPayload.NODES: outcome})
        dispatcher.event(ReRankEndEvent(nodes=outcome))

    def _kept(self, nodes: Sequence[NodeWithScore], ranking: Ranking) -> list[NodeWithScore]:
        return [self._scored(nodes[ranked.index], ranked.score) for ranked in ranking.results]

    def _scored(self, given: NodeWithScore, score: float) -> NodeWithScore:
        node = given.node
        if self.keep_retrieval_score:
            node = node.model_copy(update={"metadata": {**node.metadata, "retrieval_score": given.score}})
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
