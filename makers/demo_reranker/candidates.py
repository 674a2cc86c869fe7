"""Candidates for each query: the text that answers it, and those that are most easily taken for it."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from makers.demo_embedder.baselines import hashed
from makers.demo_embedder.bert import PROMPTS, Served
from makers.demo_embedder.pairs import Pair, batch

NEAREST, SHARING = 3, 2
"""Wrong texts of each query: the nearest by the embedder's vectors, then those that share most rare words. One more is
drawn at random."""
PER_QUERY = NEAREST + SHARING + 2


def candidates(
    groups: Iterator[list[Pair]], embedder: Served, rng: random.Random, queries: int, pool: int
) -> list[tuple[str, list[str]]]:
    """Queries with `PER_QUERY` texts each, the right one first; wrong ones are answers to others of `pool` pairs."""
    pairs = batch(groups, pool)
    asked, texts = [pair.query for pair in pairs], [pair.text for pair in pairs]
    near = embedder(asked[:queries], PROMPTS["query"]) @ embedder(texts, PROMPTS["document"]).T
    shared = hashed(asked[:queries]) @ hashed(texts).T
    made = []
    for row in range(queries):
        chosen = {row: None}
        for scores, count in ((near[row], NEAREST), (shared[row], SHARING)):
            wanted = len(chosen) + count
            for column in torch.argsort(scores, descending=True).tolist():
                if len(chosen) == wanted:
                    break
                chosen.setdefault(column)
        chosen.setdefault(rng.choice([column for column in range(pool) if column not in chosen]))
        made.append((asked[row], [texts[column] for column in chosen]))
    return made
