"""Which pages of a second pool hold what the first pool's pages of the same numbers do.

A draft model keeps its keys and values under the page numbers of the model that it guesses for. It computes nothing
while nobody asks it, so its pages fall behind: a page holds what it should up to some position. Nobody tells it that a
page changed hands; that is seen when the model that owns the page writes into it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from asyncengine.step import Row


class DraftPages:
    """The number of first positions of each page for which the draft model has keys and values."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._size = page_size
        self._held = [0] * num_pages
        self._empty = True
        """Nothing was ever written: nothing needs to be looked after."""

    def overwritten(self, rows: Iterable[Row]) -> None:
        """`rows` are about to write into the first pool: from there on nothing holds."""
        if self._empty:
            return
        size, held = self._size, self._held
        for row in rows:
            number, offset = divmod(row.start, size)
            page = row.pages[number]
            held[page] = min(held[page], offset)
            for page in row.pages[number + 1 : -(-(row.start + row.num_scheduled) // size)]:
                held[page] = 0

    def first_missing(self, pages: Sequence[int], end: int) -> int:
        """The first position below `end` that is not there; `end` if none is missing."""
        if self._empty:
            return 0
        size, held = self._size, self._held
        for number, page in enumerate(pages[: -(-end // size)]):
            if held[page] < size:
                return min(end, number * size + held[page])
        return end

    def written(self, pages: Sequence[int], begin: int, end: int) -> None:
        """Positions [begin, end) are there, and all before them."""
        self._empty = False
        size, held = self._size, self._held
        for number in range(begin // size, -(-end // size)):
            page = pages[number]
            held[page] = max(held[page] if number * size < begin else 0, min(size, end - number * size))
