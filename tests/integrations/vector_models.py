"""What the tests of vectors share: a random reranker, and an engine that notes what it is asked."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from asyncengine import DEMO_EMBEDDER, Embeddings, Ranked, Ranking, Usage

EMBEDDER: dict[str, Any] = {"dtype": "float32", "num_threads": 1}
"""Settings of the shared embedder; objects with equal ones share it."""


def make_reranker(folder: Path) -> Path:
    """A cross-encoder with random weights, which reads words as the demo embedder does."""
    config = transformers.BertConfig(
        vocab_size=4096, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=128, num_labels=1,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(3)
        model = transformers.BertForSequenceClassification(config).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_EMBEDDER / name, folder / name)
    return folder


def usage(prompt_tokens: int) -> Usage:
    return Usage(prompt_tokens=prompt_tokens, completion_tokens=0, cached_tokens=0)


class NotingEngine:
    """In place of an engine, sync or async: vectors of the texts' lengths, ranks by length, and a note of each call."""

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
    """In place of a model object's `EngineSource`."""

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
