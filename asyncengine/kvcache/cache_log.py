"""Log of the pages that a prefix cache publishes and evicts, as hashes: others learn from it what the cache holds."""

from __future__ import annotations

from collections.abc import Iterable

from asyncengine.cache_news import CacheNews


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

    def note(self, page: int, there: bool) -> None:
        """The page was published (`there`), or evicted."""
        if self.overflowed:
            return
        if page not in self._last:
            if there:
                self._new[page] = None
            self.overflowed = len(self._last) >= self._limit
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
