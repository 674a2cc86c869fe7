"""Held-out recall of the demo embedder: ``python -m makers.demo_embedder.evaluate``.

A thousand texts of each kind, a query for each, none of which training ever draws: other names, numbers and words, and
deeds done to things that they are never done to in training. Recall at k is the share of queries whose text is among
the k nearest. Next to it what a hashed bag of words and BM25 find.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from asyncengine.demo import EMBEDDER_PATH
from makers.demo_embedder.baselines import bm25, hashed
from makers.demo_embedder.bert import PROMPTS, Served
from makers.demo_embedder.pairs import MAKERS, Pair, batch, stream

Scorer = Callable[[Sequence[str], Sequence[str]], Tensor]
"""Queries and texts -> ``[queries, texts]``, more is nearer."""


def held_out(skill: str, count: int, seed: int = 7) -> list[Pair]:
    return batch(stream(f"held-out/{skill}/{seed}", held_out=True, skill=skill), count)


def recall(scores: Tensor, k: int) -> float:
    """The share of rows whose own column is among their k largest; of equal columns the first one counts."""
    own = scores.diagonal()[:, None]
    earlier = torch.arange(scores.shape[1])[None] < torch.arange(scores.shape[0])[:, None]
    before = (scores > own) | ((scores == own) & earlier)
    return float((before.sum(1) < k).float().mean())


def by_vectors(model: Served, dimensions: int | None = None) -> Scorer:
    def score(queries: Sequence[str], texts: Sequence[str]) -> Tensor:
        left, right = model(queries, PROMPTS["query"]), model(texts, PROMPTS["document"])
        left, right = (functional.normalize(side[:, :dimensions], dim=-1) for side in (left, right))
        return left @ right.T

    return score


def scorers(folder: Path) -> dict[str, Scorer]:
    model = Served(folder)
    return {
        "demo-embed": by_vectors(model),
        "its first 32": by_vectors(model, 32),
        "hashed words": lambda queries, texts: hashed(queries) @ hashed(texts).T,
        "BM25": bm25,
    }


def measure(folder: Path, count: int, seed: int = 7) -> dict[str, dict[str, tuple[float, float]]]:
    """Recall at 1 and at 5, by skill and by scorer."""
    found: dict[str, dict[str, tuple[float, float]]] = {}
    judges = scorers(folder)
    for skill in MAKERS:
        pairs = held_out(skill, count, seed)
        queries, texts = [pair.query for pair in pairs], [pair.text for pair in pairs]
        tables = {name: score(queries, texts) for name, score in judges.items()}
        found[skill] = {name: (recall(scores, 1), recall(scores, 5)) for name, scores in tables.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=EMBEDDER_PATH)
    parser.add_argument("--count", type=int, default=1000)
    arguments = parser.parse_args()
    found = measure(arguments.model, arguments.count)
    table = Table("recall at 1 / at 5", *next(iter(found.values())))
    for skill, rates in found.items():
        table.add_row(skill, *(f"{at_1:.1%} / {at_5:.1%}" for at_1, at_5 in rates.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
