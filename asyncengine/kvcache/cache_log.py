"""Log of the pages that a prefix cache publishes and evicts, as hashes: others learn from it what the cache holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from asyncengine.cache_news import CacheNews

if TYPE_CHECKING:
    from asyncengine.kvcache.radix_tree import Node


class CacheLog:
    """Pages published and evicted since the log was last read; at most `limit` pages are kept.

    Written by the cache, drained where the cache lives: one thread.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._last: dict[int, Node] = {}
        """The node that last had the page of a hash, or has it now, in order of the first event."""
        self._new: dict[int, None] = {}
        """Hashes of pages that were not there when the log was last drained."""
        self.overflowed = False

    def __bool__(self) -> bool:
        return self.overflowed or bool(self._last)

    def note(self, node: Node) -> None:
        """The page of `node` was published or, where it has none now, evicted."""
        if self.overflowed:
            return
        if node.hash not in self._last:
            if node.page:
                self._new[node.hash] = None
            self.overflowed = len(self._last) >= self._limit
        self._last[node.hash] = node

    def drain(self, everything: Iterable[Node]) -> tuple[bool, list[Node], list[int]]:
        """(whether the log overflowed, nodes of new pages, hashes of evicted pages) since the last call. After an
        overflow the nodes are `everything`, those of all pages, which is read only then."""
        whole, last, new = self.overflowed, self._last, self._new
        self._last, self._new, self.overflowed = {}, {}, False
        if whole:
            return True, list(everything), []
        gone = [page for page, node in last.items() if not node.page and page not in new]
        return False, [node for page, node in last.items() if node.page and page in new], gone

    def news(self, everything: Iterable[Node]) -> CacheNews:
        """The changes that `drain` gives, as hashes."""
        whole, stored, removed = self.drain(everything)
        return CacheNews(tuple(node.hash for node in stored), tuple(removed), whole)
