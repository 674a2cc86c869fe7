"""Finished outputs, to draft from: one text for all requests that may see each other's.

Keyed as the prefix cache is, by adapter and cache salt: a tenant's text must not be felt by another, not even by the
time that its tokens take.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from asyncengine.speculation.lookup import Place

Namespace = tuple[Hashable, ...]

BYTES_PER_TOKEN = 160
"""Of a token here: an entry of a dictionary, a pair, a place."""


class _Text:
    """One output."""

    __slots__ = ("namespace", "tokens")

    def __init__(self, namespace: Namespace, tokens: Sequence[int]) -> None:
        self.namespace = namespace
        self.tokens = tuple(tokens)


class OutputStore:
    """Outputs by namespace, the oldest dropped first when they take more than `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._most = max_bytes // BYTES_PER_TOKEN
        self._texts: OrderedDict[int, _Text] = OrderedDict()
        self._places: dict[Namespace, dict[tuple[int, int], tuple[_Text, int]]] = {}
        self._added = 0
        self.num_tokens = 0

    @property
    def nbytes(self) -> int:
        """About."""
        return self.num_tokens * BYTES_PER_TOKEN

    def add(self, namespace: Namespace, tokens: Sequence[int]) -> None:
        """Take in a finished output. One that is too short to be found, or too long to be kept, is left out."""
        if not 2 < len(tokens) <= self._most:
            return
        text = _Text(namespace, tokens)
        places = self._places.setdefault(namespace, {})
        for position in range(2, len(text.tokens)):
            places[text.tokens[position - 2], text.tokens[position - 1]] = (text, position)
        self._texts[self._added] = text
        self._added += 1
        self.num_tokens += len(text.tokens)
        while self.num_tokens > self._most:
            self._drop_oldest()

    def places(self, namespace: Namespace, first: int, second: int) -> list[Place]:
        """The latest one."""
        found = self._places.get(namespace, {}).get((first, second))
        return [] if found is None else [Place(found[0].tokens, found[1])]

    def clear(self) -> None:
        """Keep nothing."""
        self._texts.clear()
        self._places.clear()
        self.num_tokens = 0

    def _drop_oldest(self) -> None:
        _, text = self._texts.popitem(last=False)
        places = self._places[text.namespace]
        for pair in zip(text.tokens, text.tokens[1:], strict=False):
            found = places.get(pair)
            if found is not None and found[0] is text:
                del places[pair]
        if not places:
            del self._places[text.namespace]
        self.num_tokens -= len(text.tokens)
