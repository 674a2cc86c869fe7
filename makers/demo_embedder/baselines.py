"""Baseline of the embedder: counting words, with no idea of what they mean."""

from __future__ import annotations

import math
import re
import zlib
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

_WORD = re.compile(r"[\w@.:-]*\w")
_STOP = re.compile(
    r"an?|and|are|at|by|do|does|for|has|have|how|in|is|it|like|many|much|of|on|or|that|the|to|was|what|when|where|which"
    r"|who|with"
)
DIMENSIONS = 512


def words(text: str) -> list[str]:
    """Lower-cased, without those that say nothing."""
    return [word for word in _WORD.findall(text.lower()) if not _STOP.fullmatch(word)]


def hashed(texts: Sequence[str]) -> Tensor:
    """Hashed bags of words of length one, ``[texts, 512]``: texts that share rare words point the same way."""
    table = torch.zeros(len(texts), DIMENSIONS)
    for row, text in enumerate(texts):
        for word in words(text):
            table[row, zlib.crc32(word.encode()) % DIMENSIONS] += 1.0
    return torch.nn.functional.normalize(table, dim=-1)


def bm25(queries: Sequence[str], texts: Sequence[str], k1: float = 1.2, b: float = 0.75) -> Tensor:
    """Okapi BM25 (Robertson et al. 1994), ``[queries, texts]``: what a search engine counts."""
    counted = [Counter(words(text)) for text in texts]
    lengths = [sum(counts.values()) for counts in counted]
    mean = sum(lengths) / len(texts)
    holders: dict[str, list[int]] = {}
    for row, counts in enumerate(counted):
        for word in counts:
            holders.setdefault(word, []).append(row)
    scores = torch.zeros(len(queries), len(texts))
    for row, query in enumerate(queries):
        for word in words(query):
            found = holders.get(word, ())
            rarity = math.log(1 + (len(texts) - len(found) + 0.5) / (len(found) + 0.5))
            for text in found:
                count = counted[text][word]
                scores[row, text] += rarity * count * (k1 + 1) / (count + k1 * (1 - b + b * lengths[text] / mean))
    return scores
