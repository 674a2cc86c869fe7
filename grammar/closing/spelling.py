"""The cut of a text into as few tokens as the vocabulary allows."""

from __future__ import annotations

from asyncengine.grammar.vocabulary import Vocabulary

UNREACHABLE = 1 << 60


def cut(text: bytes, vocabulary: Vocabulary) -> list[tuple[int, int]]:
    """(fewest tokens to the end, the first of them) for each position in `text` and its end; `UNREACHABLE` or more
    where the vocabulary cannot spell it."""
    table, lengths = vocabulary.by_bytes, vocabulary.lengths
    found = [(UNREACHABLE, -1)] * len(text) + [(0, -1)]
    for at in range(len(text) - 1, -1, -1):
        first = table.get(text[at : at + 1], -1)
        best = UNREACHABLE if first < 0 else min(found[at + 1][0] + 1, UNREACHABLE)
        for length in lengths.get(text[at : at + 2], ()):
            end = at + length
            if end > len(text):
                break
            if found[end][0] + 1 < best and (token := table.get(text[at:end])) is not None:
                best, first = found[end][0] + 1, token
        found[at] = best, first
    return found
