"""A stand-in that the tests of vectors share: an engine that notes what it is asked."""

from __future__ import annotations

from typing import Any

import numpy as np

from asyncengine import Embeddings, Ranked, Ranking, Usage

EMBEDDER: dict[str, Any] = {"dtype": "float32", "num_threads": 1}
"""Settings of the shared embedder; objects with equal ones share it."""


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
