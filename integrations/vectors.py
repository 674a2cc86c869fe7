"""Fields of the adapter classes that embed, rerank and decide, and how they become keywords of the engine's calls."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from asyncengine import Decision, ModelInfo, Ranking
from asyncengine.errors import InvalidParameter
from asyncengine.integrations.engine_source import EngineChoice

Role = Literal["query", "document"]

PROMPT_NAMES: dict[Role, tuple[str, ...]] = {"query": ("query",), "document": ("document", "passage")}
"""Names that models have for the prompts of queries and documents, in order of preference."""
MANY_NUMBERS = 1 << 16
"""Numbers from which on vectors become Python's lists on a thread: a large list would hold up the event loop."""


class CallFields(EngineChoice):
    """Fields that every request of an object carries."""

    adapter: str | None = None
    """Name of the LoRA adapter that computes; None: the base model alone."""
    timeout: float | None = None
    """Seconds from submit to the end of a call; then it raises `RequestTimeout`."""
    priority: int | None = None
    """Lower goes first, where the engine's policy is "priority"."""

    def _request(self, **more: Any) -> dict[str, Any]:
        """Keywords of a call: these fields and `more`, without those that are None."""
        values = {**{name: getattr(self, name) for name in ("adapter", "timeout", "priority")}, **more}
        return {name: value for name, value in values.items() if value is not None}


class RequestFields(CallFields):
    truncate: bool = True
    """Cut texts that are too long for the model; False: refuse them by name."""

    def _request(self, **more: Any) -> dict[str, Any]:
        return super()._request(truncate=self.truncate, **more)


class EmbeddingFields(RequestFields):
    """The engine that embeds, and its settings."""

    variable: ClassVar[str] = "ASYNCENGINE_EMBEDDING_MODEL"
    choices: ClassVar[str] = 'a path, a hub id or "demo-embed"'

    model: str = Field(default_factory=lambda: os.environ.get(EmbeddingFields.variable, ""))
    """Path, hub id, or "demo-embed" (the bundled embedder). Defaults to the environment variable
    ASYNCENGINE_EMBEDDING_MODEL."""
    query_prompt_name: str | None = None
    """Name of the model's prompt that goes in front of a query; None: the one called "query", where there is one."""
    document_prompt_name: str | None = None
    """The same of a document; None: the one called "document" or "passage", where there is one."""
    query_prompt: str | None = None
    """The text itself, in place of a name; "" for none."""
    document_prompt: str | None = None
    """The same for documents."""
    dimensions: int | None = None
    """Keep so many of a vector's numbers (models trained for it); None: all."""
    normalize: bool | None = None
    """Whether vectors have length one; None: as the model says."""

    @model_validator(mode="after")
    def _check_prompts(self) -> Self:
        for role in PROMPT_NAMES:
            name, text = getattr(self, f"{role}_prompt_name"), getattr(self, f"{role}_prompt")
            if name is not None and text is not None:
                raise InvalidParameter(f"{role}_prompt", f"must be left out where {role}_prompt_name is given", text)
        return self

    def _keywords(self, role: Role, info: ModelInfo) -> dict[str, Any]:
        """Keywords for the engine's `embed`. If the model has no prompt for the text's role, its default applies."""
        prompt = getattr(self, f"{role}_prompt")
        name = getattr(self, f"{role}_prompt_name")
        if prompt is None and name is None:
            name = next((candidate for candidate in PROMPT_NAMES[role] if candidate in info.prompts), None)
        return self._request(prompt=prompt, prompt_name=name, dimensions=self.dimensions, normalize=self.normalize)

    def _embed(self, texts: Sequence[str], role: Role, show_progress: bool | None = None) -> list[list[float]]:
        if isinstance(texts, list) and not texts:
            return []
        engine = self._engines().sync()
        return _lists(engine.embed(texts, show_progress=show_progress, **self._keywords(role, engine.info)).vectors)

    async def _aembed(self, texts: Sequence[str], role: Role, show_progress: bool | None = None) -> list[list[float]]:
        if isinstance(texts, list) and not texts:
            return []
        engine = await self._engines().aio()
        vectors = (await engine.embed(texts, show_progress=show_progress, **self._keywords(role, engine.info))).vectors
        return _lists(vectors) if vectors.size < MANY_NUMBERS else await asyncio.to_thread(_lists, vectors)


class RerankFields(RequestFields):
    """The engine that reranks, and its settings."""

    variable: ClassVar[str] = "ASYNCENGINE_RERANK_MODEL"
    choices: ClassVar[str] = 'a path, a hub id or "demo-rerank"'

    model: str = Field(default_factory=lambda: os.environ.get(RerankFields.variable, ""))
    """Path, hub id, or "demo-rerank" (the bundled reranker). Defaults to the environment variable
    ASYNCENGINE_RERANK_MODEL."""
    instruction: str | None = None
    """The instruction for the reranker, where the model takes one; None: its own."""

    def _rank(self, query: str, texts: Sequence[str], top_n: int | None) -> Ranking:
        keywords = self._request(top_n=top_n, instruction=self.instruction)
        return self._engines().sync().rerank(query, texts, **keywords)

    async def _arank(self, query: str, texts: Sequence[str], top_n: int | None) -> Ranking:
        engine = await self._engines().aio()
        return await engine.rerank(query, texts, **self._request(top_n=top_n, instruction=self.instruction))


class DecisionFields(CallFields):
    """The engine that decides, and its settings."""

    model: str = Field(default_factory=lambda: os.environ.get(DecisionFields.variable, ""))
    """Path, hub id, or "demo" (the bundled model). Defaults to the environment variable ASYNCENGINE_MODEL."""

    def _decide(self, state: Any, questions: Mapping[str, Any]) -> Decision:
        return self._engines().sync().decide(state, questions, **self._request())

    async def _adecide(self, state: Any, questions: Mapping[str, Any]) -> Decision:
        engine = await self._engines().aio()
        return await engine.decide(state, questions, **self._request())


def _lists(vectors: NDArray[np.float32]) -> list[list[float]]:
    """The vectors as lists, made row by row, so that other threads get the interpreter in between."""
    return [row.tolist() for row in vectors]
