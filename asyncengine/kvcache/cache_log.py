"""Log of the pages that a prefix cache publishes and evicts, as hashes: others learn from it what the cache holds.

The hash of a page covers its tokens and, through its parent's hash, all tokens before it and the namespace: equal
hashes mean equal prefixes, so a flat set of them says as much as the tree. They are no more than hints
for routing: a collision sends a request to a cache that does not help it, for the cache itself compares tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass


def root_hash(namespace: tuple[Hashable, ...]) -> int:
    """Hash of a namespace, the same in every process (Python's own hash of a str is not)."""
    return int.from_bytes(hashlib.blake2b(repr(namespace).encode(), digest_size=8).digest()) >> 1


def page_hash(parent: int, tokens: tuple[int, ...]) -> int:
    """Hash of a page of `tokens` behind the page (or namespace) of hash `parent`, the same in every process."""
    return hash((parent, tokens))


def page_hashes(namespace: tuple[Hashable, ...], tokens: Sequence[int], page_size: int) -> list[int]:
    """Hashes of all full pages of `tokens`, in order."""
    parent, hashes = root_hash(namespace), []
    for start in range(0, len(tokens) - page_size + 1, page_size):
        parent = page_hash(parent, tuple(tokens[start : start + page_size]))
        hashes.append(parent)
    return hashes


@dataclass(frozen=True, slots=True)
class CacheNews:
    """Changes since the last news."""

    added: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()
    whole: bool = False
    """True: too much happened to tell it; `added` is all there is now."""

    def __bool__(self) -> bool:
        return self.whole or bool(self.added or self.removed)


class CacheLog:
    """Pages published and evicted since the log was last read; at most `limit` pages are kept.

    Written by the cache, drained where the cache lives: one thread.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._last: dict[int, bool] = {}
        """Whether the page of a hash is there now, in order of the first event."""
        self._new: dict[int, None] = {}
        """Hashes of pages that were not there when the log was last drained."""
        self.overflowed = False

    def published(self, page: int) -> None:
        if page not in self._last:
            self._new[page] = None
        self._note(page, True)

    def evicted(self, page: int) -> None:
        self._note(page, False)

    def _note(self, page: int, there: bool) -> None:
        if self.overflowed:
            return
        if len(self._last) >= self._limit and page not in self._last:
            self.overflowed = True
            self._last.clear()
            self._new.clear()
            return
        self._last[page] = there

    def drain(self, everything: Iterable[int]) -> CacheNews:
        """The news so far. `everything`: hashes of all pages, read only where events were dropped."""
        if self.overflowed:
            news = CacheNews(tuple(everything), whole=True)
        else:
            added = tuple(page for page, there in self._last.items() if there and page in self._new)
            news = CacheNews(added, tuple(p for p, there in self._last.items() if not there and p not in self._new))
        self._last, self._new, self.overflowed = {}, {}, False
        return news
