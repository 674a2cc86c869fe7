"""The cut of a text into as few tokens as the vocabulary allows."""

from __future__ import annotations

from functools import cached_property

from asyncengine.grammar.vocabulary import Vocabulary

UNREACHABLE = 1 << 60


class Spelling:
    """A text, and how it is cut into the fewest tokens from each position on."""

    def __init__(self, text: bytes, vocabulary: Vocabulary) -> None:
        self._text = text
        self._vocabulary = vocabulary

    def cost(self, start: int) -> int:
        """Tokens from position `start` to the end; `UNREACHABLE` or more if the vocabulary cannot spell it."""
        return self._cut[start][0]

    @cached_property
    def tokens(self) -> list[int]:
        """All of them, from the beginning. Not to be changed."""
        found, at = [], 0
        while at < len(self._text):
            found.append(self._cut[at][1])
            at += len(self._vocabulary.token_bytes[found[-1]])
        return found

    @cached_property
    def _cut(self) -> list[tuple[int, int]]:
        """(fewest tokens to the end, the first of them) for each position."""
        table, lengths, text = self._vocabulary.by_bytes, self._vocabulary.lengths, self._text
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
